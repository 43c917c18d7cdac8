"""What a codec costs: error of the taps, error of c*, and, with a trained drafter, acceptance and accepted length.

The coded target is the target itself with its hidden states sent through a codec and back before anybody reads them, so
the unchanged engine measures what a drafter loses. Prompts, seeds and outputs are the same for every codec; differences
are taken per prompt and their intervals come from resampling prompts. Zeroed taps are the control: where they cost
nothing, the study cannot see damage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.decoding.playing import Played, Player
from pipeline.decoding.teacher_forced import ANCHORS, _draft_logits, acceptance_sums
from pipeline.draft.interface import Anchors, Context
from pipeline.shards.codecs import channel_rms, decode_taps, encode_taps
from pipeline.shards.layout import Spec
from pipeline.shards.teacher import encode_logits, surrogate
from pipeline.speculative.acceptance import bootstrap, ratio
from pipeline.speculative.verify import Law
from pipeline.target import TargetOutput

Taps = Callable[[Tensor], Tensor]
CODECS = ("bf16", "fp8", "int8", "int4", "int4+rms", "int3", "int3+rms", "int2", "int2+rms")
ZEROED = "no taps"
KEPT = (16, 32, 64, 128)


class CodedTarget:
    """A target whose tapped states pass through `code` [N, L, D] -> [N, L, D]."""

    def __init__(self, target: Any, code: Taps) -> None:
        self._target, self._code = target, code

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward(self, ids_BT: Tensor, **options: Any) -> TargetOutput:
        out = self._target.forward(ids_BT, **options)
        flat = out.taps_BTLD.flatten(0, 1)
        return TargetOutput(self._code(flat).view_as(out.taps_BTLD), out.last_hidden_BTD)


def spec_of(codec: str, *, num_taps: int, hidden_size: int, vocab_size: int, topk: int = 64) -> Spec:
    """`int4+rms` is int4 with static per-channel RMS."""
    taps, _, rms = codec.partition("+")
    return Spec(
        taps=taps, logits="topk", topk=topk, positions="supervised", num_taps=num_taps, hidden_size=hidden_size,
        vocab_size=vocab_size, channel_rms=bool(rms),
    )  # fmt: skip


def coder(codec: str, sample_NLD: Tensor, vocab_size: int) -> Taps:
    """There and back through a codec; `sample_NLD` gives the static RMS values."""
    if codec == ZEROED:
        return torch.zeros_like
    spec = spec_of(codec, num_taps=sample_NLD.shape[1], hidden_size=sample_NLD.shape[2], vocab_size=vocab_size)
    rms = channel_rms(sample_NLD.float()) if spec.channel_rms else None

    def code(taps_NLD: Tensor) -> Tensor:
        return decode_taps(encode_taps(taps_NLD, spec, rms), spec, rms, dtype=taps_NLD.dtype)

    return code


def tap_errors(taps_NLD: Tensor, codec: str, vocab_size: int) -> list[float]:
    """Mean over tokens of the relative error |x' - x| / |x|, one per tapped layer."""
    values = taps_NLD.float()
    error = coder(codec, values, vocab_size)(values) - values
    return [float(value) for value in (error.norm(dim=-1) / values.norm(dim=-1)).mean(0)]


def surrogate_errors(
    player: Player, played: Sequence[Played], kept: Sequence[int] = KEPT
) -> dict[int, dict[str, float]]:
    """Largest and mean |c* under the top-n surrogate - exact c*|, and the mean tail mass that bounds it (S11)."""
    rows = [_laws(player, item) for item in played if len(item.answers[0].ids) > 1]
    out = {}
    for count in kept:
        errors, tails = [], []
        for hidden_ND, draft_NV, target_NV, words in rows:
            spec = spec_of("bf16", num_taps=1, hidden_size=1, vocab_size=player.target.vocab_size, topk=count)
            stored, _ = encode_logits(hidden_ND, player.target.frozen, spec)
            law_NV = surrogate(
                stored["logits.ids"], stored["logits.logprobs"], stored["logits.tail"], player.target.vocab_size
            )
            errors.append(_shared(draft_NV, law_NV, words) - _shared(draft_NV, target_NV, words))
            tails.append(stored["logits.tail"].exp())
        error, tail = torch.cat(errors), torch.cat(tails)
        out[count] = {
            "largest": float(error.abs().max()), "mean": float(error.abs().mean()), "bias": float(error.mean()),
            "mean_tail": float(tail.mean()),
        }  # fmt: skip
    return out


@torch.inference_mode()
def _laws(player: Player, item: Played) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """At the slots of some blocks of an answer, T = 1: the target's states [N, D], the drafter's law [N, V or |D|], the
    target's law [N, V], and the draft vocabulary."""
    target, drafter = player.target, player.drafter
    prompt, output = item.asked[0], item.answers[0].ids
    ids_T = torch.tensor([*prompt, *output], device=target.device)
    places = range(len(prompt), len(ids_T) - 1)
    index_A = torch.tensor(list(places[:: max(1, -(-len(places) // ANCHORS))]), device=target.device)
    at_AK = index_A[:, None] + torch.arange(drafter.config.block_size, device=target.device)
    valid_AK = at_AK < len(ids_T) - 1
    at_AK = at_AK.clamp(max=len(ids_T) - 1)
    seen = target.forward(ids_T[None])
    states_TD = seen.last_hidden_BTD[0]
    context = Context(
        ids_T, torch.arange(len(ids_T), device=target.device), torch.zeros_like(ids_T), seen.taps_BTLD[0], states_TD
    )
    logits = _draft_logits(drafter, context, Anchors(index_A, ids_T[at_AK], valid_AK), target.frozen)
    hidden_ND = states_TD[at_AK[valid_AK]]
    return hidden_ND, logits[valid_AK].softmax(-1), target.frozen.logits(hidden_ND).softmax(-1), drafter.rows


def _shared(draft_NV: Tensor, target_NV: Tensor, words: Tensor | None) -> Tensor:
    return torch.minimum(draft_NV, target_NV if words is None else target_NV[:, words]).sum(-1)


@dataclass(frozen=True)
class Columns:
    """Per prompt: teacher-forced acceptance [sum, slots], and decoding [tokens, rounds]."""

    accepted_R: Tensor
    slots_R: Tensor
    tokens_R: Tensor
    rounds_R: Tensor


def measure(
    player: Player, code: Taps, played: Sequence[Played], *, temperature: float, max_new_tokens: int, batch_size: int
) -> Columns:
    """Teacher-forced acceptance on the given answers, then decoding the same prompts, both with coded taps."""
    target = player.target
    law = Law(temperature)
    coded: Any = CodedTarget(target, code)
    forced = [acceptance_sums(coded, player.drafter, item.asked[0], item.answers[0].ids, law) for item in played]
    player.target = coded
    try:
        decoded = player.play(
            [item.prompt for item in played],
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
        )
    finally:
        player.target = target
    steps = [[step for answer in item.answers for step in answer.rounds] for item in decoded]
    return Columns(
        torch.tensor([sum(total for total, _ in row) for row in forced], dtype=torch.float64),
        torch.tensor([sum(count for _, count in row) for row in forced], dtype=torch.float64),
        torch.tensor([sum(s.accepted + s.bonus for s in row) for row in steps], dtype=torch.float64),
        torch.tensor([len(row) for row in steps], dtype=torch.float64),
    )


def compare(found: Mapping[str, Columns], *, reference: str, resamples: int, seed: int) -> dict[str, dict[str, Any]]:
    """Acceptance and tau of each codec, and their change against `reference` with paired 95 % intervals."""
    base = found[reference]
    out: dict[str, dict[str, Any]] = {}
    for codec, columns in found.items():
        out[codec] = {
            "acceptance": ratio(columns.accepted_R.sum(), columns.slots_R.sum()),
            "tau": ratio(columns.tokens_R.sum(), columns.rounds_R.sum()),
            "acceptance_change": _change(
                columns.accepted_R, columns.slots_R, base.accepted_R, base.slots_R, resamples, seed
            ),
            "tau_change": _change(columns.tokens_R, columns.rounds_R, base.tokens_R, base.rounds_R, resamples, seed),
        }
    return out


def _change(
    top_R: Tensor, bottom_R: Tensor, base_top_R: Tensor, base_bottom_R: Tensor, resamples: int, seed: int
) -> dict[str, Any]:
    """Difference of two pooled ratios. Linearised per prompt, so that one bootstrap pairs the prompts."""
    ours, theirs = top_R.sum() / bottom_R.sum(), base_top_R.sum() / base_bottom_R.sum()
    influence_R = (top_R - ours * bottom_R) / bottom_R.mean() - (
        base_top_R - theirs * base_bottom_R
    ) / base_bottom_R.mean()
    interval = bootstrap(influence_R, torch.ones_like(influence_R), resamples=resamples, seed=seed)
    change = float(ours - theirs)
    return {
        "change": change,
        "interval": None if interval is None else [change + interval[0], change + interval[1]],
    }
