"""The decoding pieces of a calibration: a round of every kind, a prefill, and an answer read once more.

    measure(setting, "bfloat16", target, drafter, rates)      # fills in what rates knows of this dtype

A round's memory is part of it: the batch starts with the longest prompt and its cache grows to the longest answer, as
`decode` lets it grow, so that what the allocator keeps of smaller blocks is in the figure.
"""

from __future__ import annotations

from typing import Any

import torch

from pipeline import usage
from pipeline.decoding.cache import RaggedCache
from pipeline.decoding.engine import decode
from pipeline.decoding.portions import GROWTH
from pipeline.decoding.rounds import Engine
from pipeline.decoding.teacher_forced import acceptance_sums
from pipeline.draft.interface import Drafter
from pipeline.operations.costs.chain import Setting
from pipeline.operations.costs.rates import Rates, Round, round_name
from pipeline.operations.costs.work import Decoding
from pipeline.speculative.verify import Law
from pipeline.target import Target

_PREFILL_TOKENS = 640
_ROUNDS = 3  # after one to warm up
_FEWER = 4  # a second batch size: a quarter of the first


def measure(setting: Setting, dtype: str, target: Target, drafter: Drafter, rates: Rates) -> None:
    """Every kind of round this dtype decodes with, at the stage's batch and a quarter of it; a prefill; and an answer
    read once more, as evaluate does.
    """
    drafter = drafter.to(getattr(torch, dtype)).eval()
    for stage, runs in setting.decodings.items():
        for run in {round_name(stage, run): run for run in runs if run.dtype == dtype}.values():
            rates.rounds[round_name(stage, run)] = _round(setting, target, drafter if run.drafted else None, run)
    length = max(2, round(setting.corpus.prompt_tokens))
    prompts = _ids(setting, max(1, _PREFILL_TOKENS // length), length).tolist()
    options: dict[str, Any] = {"max_new_tokens": 1, "stop_ids": (), "batch_size": len(prompts)}
    prefill = usage.cpu_of(lambda: decode(target, prompts, seeds=range(len(prompts)), **options))
    rates.prefill_per_token[dtype] = prefill / (len(prompts) * length)
    evaluate = setting.config.evaluate
    if dtype == evaluate.dtype:
        answer = max(2, min(round(setting.corpus.answer_tokens), evaluate.max_new_tokens))
        output, law = _ids(setting, 1, answer)[0].tolist(), Law(1.0, 1.0, 0)
        rates.read_again[dtype] = usage.cpu_of(lambda: acceptance_sums(target, drafter, prompts[0], output, law))


def _round(setting: Setting, target: Target, drafter: Drafter | None, run: Decoding) -> Round:
    usage.give_back_memory()
    before, peak = usage.anonymous_bytes(), usage.Peak()
    with peak.watched():
        full = _round_cpu(setting, target, drafter, run, run.rows)
    fewer = max(1, run.rows // _FEWER)
    return Round(run.rows, full, fewer, _round_cpu(setting, target, drafter, run, fewer), peak.bytes - before)


@torch.inference_mode()
def _round_cpu(setting: Setting, target: Target, drafter: Drafter | None, run: Decoding, rows: int) -> float:
    """Rounds as `decode` plays them: draft, verify, accept, observe, for rows all over their prompts and answers."""
    engine = Engine(target, RaggedCache(target.config), Law(run.temperature, 1.0, 0), drafter=drafter)
    ahead = (_ROUNDS + 2) * run.step_tokens
    room = max(run.longest, ahead + 1)
    prompt = min(setting.corpus.longest_prompt, room - ahead)
    positions_B, ids_B = _positions(setting, run, rows).clamp(max=room - ahead), _ids(setting, 1, rows)[0]
    engine.start(rows, room)
    engine.cache.reserve(rows, prompt + run.step_tokens)
    engine.play(engine.midway(ids_B, positions_B.clamp(max=prompt)))  # allocates the cache of every layer
    for length in (*range(prompt + GROWTH, room, GROWTH), room):
        engine.cache.reserve(rows, length)
    state = engine.midway(ids_B, positions_B)

    def play() -> None:
        outcome = engine.play(state)
        state.anchors_B, state.positions_B = outcome.token_B, state.positions_B + outcome.accepted_B + 1

    play()
    return usage.cpu_of(play, _ROUNDS)


def _positions(setting: Setting, run: Decoding, rows: int) -> torch.Tensor:
    """Where the rows of a running batch stand: after prompts of the corpus' lengths, in every part of an answer."""
    lengths, answer = setting.corpus.prompt_lengths, 2 * (run.context - run.prompt_tokens)
    prompts = [lengths[(2 * row + 1) * len(lengths) // (2 * rows)] for row in range(rows)]
    parts = torch.linspace(0, 1, rows)[torch.randperm(rows)] if rows > 1 else torch.tensor([0.5])
    return torch.tensor(prompts) + (parts * answer).long()


def _ids(setting: Setting, rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, setting.shape.vocab_size, (rows, length))
