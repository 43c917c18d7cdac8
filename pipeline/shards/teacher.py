"""What a shard keeps of the target's distribution, and the distribution it stands for (S11).

    encoded = encode_logits(hidden_PD, frozen, spec)           # one row per kept position
    p_NV = surrogate(ids_Nn, logprobs_Nn, tail_N, vocab_size)  # the law training uses under `topk`

`last_hidden` keeps the state the head reads, so logits are recomputed exactly. `topk` keeps the n largest
log-probabilities (fp16) and the log of the tail mass m (fp32, summed over the tail itself, so a tail of 1e-9 is not
lost in 1 - sum).

**The surrogate and its bound.** Let p be the target's law, K the kept tokens, m = p(V∖K), and p' equal p on K and
m/(V - n) on each other token. For any law q, total variation obeys the triangle inequality, so

    |TV(p, q) - TV(p', q)| <= TV(p, p') = ½ Σ_tail |p_t - m/(V - n)| <= ½ (Σ_tail p_t + Σ_tail m/(V - n)) = m.

Rounding a kept log-probability x to fp16 multiplies its p by at most exp(2⁻¹¹|x|), which adds at most about
½ · 2⁻¹¹ · Σ_K p|log p|: 2.5e-4 per nat of entropy.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from pipeline.shards.layout import Spec

_LOWEST = -65_504.0  # fp16's most negative number; log-probabilities below it are stored as it


class Head(Protocol):
    """The part of `pipeline.frozen.Frozen` needed here."""

    def logits(self, last_hidden_ND: Tensor) -> Tensor: ...

    def rough_logits(self, last_hidden_ND: Tensor) -> Tensor: ...

    def logits_at(self, last_hidden_ND: Tensor, ids_Nn: Tensor) -> Tensor: ...


def encode_logits(hidden_PD: Tensor, head: Head, spec: Spec) -> tuple[dict[str, Tensor], Tensor]:
    """Encode kept positions from their post-final-norm states [P, D].

    Returns the `logits.*` tensors of `spec` and a bool [P] that marks rows with finite logits.
    """
    if spec.logits == "last_hidden":
        dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[spec.dtype]
        return {"logits.hidden": hidden_PD.to(dtype)}, torch.isfinite(hidden_PD).all(-1)
    # About 64 MB of logits at a time on a CPU (they should stay near the caches), 1 GB on an accelerator.
    rows = max(1, (1 << 24 if hidden_PD.device.type == "cpu" else 1 << 28) // spec.vocab_size)
    encode = _full if spec.logits == "full" else _topk
    parts = [encode(chunk, head, spec) for chunk in hidden_PD.split(rows)]  # an empty tensor splits into itself
    return {name: torch.cat([part[name] for part, _ in parts]) for name in parts[0][0]}, torch.cat(
        [ok for _, ok in parts]
    )


def _full(hidden_ND: Tensor, head: Head, spec: Spec) -> tuple[dict[str, Tensor], Tensor]:
    logits_NV = head.logits(hidden_ND)
    return {"logits.full": logits_NV}, torch.isfinite(logits_NV).all(-1)


def _topk(hidden_ND: Tensor, head: Head, spec: Spec) -> tuple[dict[str, Tensor], Tensor]:
    """Rough logits choose the tokens and give the tail, where rounding averages out; kept ones are computed exactly."""
    rough_NV = head.rough_logits(hidden_ND)
    _, ids_Nn = top(rough_NV, min(spec.topk, spec.vocab_size))
    kept_Nn, order_Nn = head.logits_at(hidden_ND, ids_Nn).sort(-1, descending=True)
    ids_Nn = ids_Nn.gather(1, order_Nn)
    peak_N1 = kept_Nn[:, :1]
    weights_NV = rough_NV.sub_(peak_N1).exp_()
    tail_N = weights_NV.scatter_(1, ids_Nn, 0.0).sum(-1)
    total_N = tail_N + (kept_Nn - peak_N1).exp().sum(-1)
    logprobs_Nn = (kept_Nn - peak_N1 - total_N.log()[:, None]).clamp_min(_LOWEST)
    encoded = {
        "logits.tail": (tail_N / total_N).log().clamp_min(_LOWEST),
        "logits.ids": ids_Nn.to(torch.int32 if spec.vocab_size > 1 << 16 else torch.uint16),
        "logits.logprobs": logprobs_Nn.to(torch.float16),
    }
    return encoded, torch.isfinite(total_N) & torch.isfinite(peak_N1[:, 0])


def top(values_NV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest per row, descending, with their int64 columns: `torch.topk`, several times faster on a CPU.

    The count largest lie in at most `count` groups of 32 columns, and those groups have the largest maxima, so only
    they are searched.
    """
    rows, width = values_NV.shape
    groups = width // 32
    if values_NV.device.type != "cpu" or groups < 4 * count:
        found = values_NV.topk(count, -1)
        return found.values, found.indices
    grouped = values_NV[:, : groups * 32].unflatten(1, (groups, 32))
    chosen = grouped.amax(-1).topk(count, -1).indices
    columns = (chosen[..., None] * 32 + torch.arange(32)).flatten(1)
    candidates = values_NV.gather(1, columns)
    if width % 32:
        candidates = torch.cat([candidates, values_NV[:, groups * 32 :]], 1)
        columns = torch.cat([columns, torch.arange(groups * 32, width).expand(rows, -1)], 1)
    found = candidates.topk(count, -1)
    return found.values, columns.gather(1, found.indices)


def surrogate(ids_Nn: Tensor, logprobs_Nn: Tensor, tail_N: Tensor, vocab_size: int) -> Tensor:
    """fp32 probabilities [N, V]: the kept ones, and the tail mass exp(tail) spread over the other V - n tokens."""
    rest = max(vocab_size - ids_Nn.shape[1], 1)
    out = (tail_N.float().exp() / rest)[:, None].expand(-1, vocab_size).clone()
    return out.scatter_(1, ids_Nn.long(), logprobs_Nn.float().exp())


def teacher_fields(spec: Spec) -> dict[str, Any]:
    """Names of the `logits.*` tensors a spec stores."""
    return {field.name: field for field in spec.fields() if field.per == "position"}
