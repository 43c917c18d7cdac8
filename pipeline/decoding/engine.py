"""Decode many prompts at once, with or without a drafter.

    generations = decode(target, prompts, temperature=0.7, max_new_tokens=256, stop_ids={2}, batch_size=64, seeds=seeds)

Continuous batching: a finished row's slot is given to the next prompt at once; when the queue is empty the running
rows are moved together, so that the forward shrinks with them. Prompts are taken longest first and prefilled in groups
of similar length. The outcome of a row depends on its prompt, its seed and the numerics only, not on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pipeline.decoding.cache import RaggedCache
from pipeline.decoding.portions import PREFILL
from pipeline.decoding.randoms import uniforms
from pipeline.decoding.rounds import Clock, Engine, FullBlock, Outcome, Policy, Rows
from pipeline.speculative.verify import Drafted, Law, verify


@dataclass
class Round:
    """One verify step of one row. `accepted` stops at a stop token inside it; `bonus` is 0 after such a stop (S23)."""

    scheduled: int
    accepted: int
    bonus: int
    confidence: tuple[float, ...] | None = None


@dataclass
class Generation:
    """`ids` are the new tokens, the stop token included, cut at the length limit. finish_reason: stop or length."""

    prompt_length: int
    ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    rounds: list[Round] = field(default_factory=list)

    def cut(self, limit: int) -> Generation:
        """As if decoded with a smaller limit. The round that crosses it stays, counted before the cut (S23)."""
        if len(self.ids) <= limit:
            return self
        kept, tokens = [], 1
        for step in self.rounds:
            if tokens >= limit:
                break
            kept.append(step)
            tokens += step.accepted + step.bonus
        return Generation(self.prompt_length, self.ids[:limit], "length", kept)


@dataclass
class _Row:
    """A prompt's progress. `anchor` is its last token, at `position`, not yet in the cache."""

    index: int
    prompt: Sequence[int]
    limit: int
    seed: int
    generation: Generation
    anchor: int = 0
    position: int = 0


@torch.inference_mode()
def decode(
    target: Any,
    prompts: Sequence[Sequence[int]],
    *,
    drafter: Any = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    max_new_tokens: int | Sequence[int],
    stop_ids: Collection[int],
    batch_size: int,
    seeds: Sequence[int],
    policy: Policy | None = None,
    clock: Clock | None = None,
    on_finish: Callable[[int, Generation], None] | None = None,
) -> list[Generation]:
    """Generate for every prompt (token ids, not empty); results in the prompts' order.

    `max_new_tokens` is one limit or one per prompt, `seeds` one integer per prompt. With a drafter the output law is
    the same as without (S20, S21); greedy output is the same up to numerical ties (S22).
    """
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    rows = [
        _Row(index, prompt, limit, seed, Generation(len(prompt)))
        for index, (prompt, limit, seed) in enumerate(zip(prompts, limits, seeds, strict=True))
    ]
    if any(len(row.prompt) == 0 or row.limit < 1 for row in rows):
        raise ValueError("every prompt needs at least one token and a limit of at least one new token")
    engine = Engine(
        target, RaggedCache(target.config), Law(temperature, top_p, top_k), drafter=drafter,
        policy=policy or FullBlock(), clock=clock or Clock(),
    )  # fmt: skip
    batch = _Batch(engine, rows, min(batch_size, max(len(rows), 1)), frozenset(stop_ids), on_finish)
    batch.run()
    return [row.generation for row in rows]


class _Batch:
    """The running rows and the queue behind them. Row b of `active` sits in slot b of the cache."""

    def __init__(
        self,
        engine: Engine,
        rows: Sequence[_Row],
        slots: int,
        stop_ids: frozenset[int],
        on_finish: Callable[[int, Generation], None] | None,
    ) -> None:
        self.engine, self.slots, self.stop_ids, self.on_finish = engine, slots, stop_ids, on_finish
        self.device = engine.target.frozen.head_VD.device
        self.queue = sorted(rows, key=lambda row: (len(row.prompt), -row.index))  # popped from the end: longest first
        self.active: list[_Row | None] = []
        if rows:
            engine.start(slots, max(len(row.prompt) + row.limit for row in rows) + engine.block_size + 1)

    def run(self) -> None:
        """Decode until queue and slots are empty."""
        while self.queue or any(self.active):
            self._fill()
            self._close_gaps()
            if self.active:
                self._round()

    # -------------------------------------------------------------------------------------------- slots

    def _fill(self) -> None:
        """Give free slots to waiting prompts, a few at a time, so that their prefill is one forward."""
        self.active += [None] * (min(self.slots, len(self.active) + len(self.queue)) - len(self.active))
        free = [slot for slot, row in enumerate(self.active) if row is None]
        if len(free) < min(len(self.queue), max(1, self.slots // 8)) and len(free) < len(self.active):
            return
        while free and self.queue:
            group: list[tuple[int, _Row]] = []
            widest = len(self.queue[-1].prompt)
            while free and self.queue and (len(group) + 1) * widest <= max(PREFILL, widest):
                group.append((free.pop(0), self.queue.pop()))
            self._prefill(group)
            free += [slot for slot, _ in group if self.active[slot] is None]

    def _close_gaps(self) -> None:
        """Move the last rows into empty slots: the forward runs over the first slots only."""
        while None in self.active:
            last = self.active.pop()
            if last is None:
                continue
            hole = self.active.index(None)
            self.engine.cache.move(len(self.active), hole, last.position)
            if self.engine.drafter is not None:
                self.engine.state.move(len(self.active), hole)
            self.active[hole] = last

    def _prefill(self, group: Sequence[tuple[int, _Row]]) -> None:
        """Read the prompts of a group and draw each row's first token, which no round counts (S23)."""
        engine, rows = self.engine, [row for _, row in group]
        slots_B = torch.tensor([slot for slot, _ in group], device=self.device)
        lengths_B = torch.tensor([len(row.prompt) for row in rows], device=self.device)
        width = int(lengths_B.max())
        ids_BT = torch.tensor([[*row.prompt, *[0] * (width - len(row.prompt))] for row in rows], device=self.device)
        positions_BT = torch.arange(width, device=self.device).expand(len(rows), width)
        with engine.clock.part("prefill"):
            engine.cache.reserve(self.slots, width + 1)
            mask = engine.cache.place(positions_BT, slots_B)
            seen = engine.target.forward(ids_BT, positions_BT=positions_BT, mask=mask, cache=engine.cache)
            index = torch.arange(len(rows), device=self.device)
            logits_BV = engine.target.frozen.logits(seen.last_hidden_BTD[index, lengths_B - 1])
            if engine.drafter is not None:
                engine.state.lengths_B[slots_B] = 0
                engine.drafter.observe(
                    engine.state, seen.taps_BTLD, seen.last_hidden_BTD, ids_BT, positions_BT, lengths_B,
                    rows_B=slots_B, frozen=engine.target.frozen,
                )  # fmt: skip
            seeds_B = torch.tensor([row.seed for row in rows], device=self.device)
            final_B = uniforms(seeds_B, lengths_B - 1, 1)[:, 0]
            nothing = Drafted(ids_BT[:, :0])
            verdict = verify(
                nothing, logits_BV, lengths_B=torch.zeros_like(lengths_B), law=engine.law,
                accept_BK=final_B[:, None], final_B=final_B,
            )  # fmt: skip
        for (slot, row), token in zip(group, verdict.token_B.tolist(), strict=True):
            row.anchor, row.position = token, len(row.prompt)
            self.active[slot] = None if self._extend(row, [token]) else row

    # -------------------------------------------------------------------------------------------- rounds

    def _round(self) -> None:
        rows = [row for row in self.active if row is not None]
        engine, block_size = self.engine, self.engine.block_size
        with engine.clock.part("bookkeeping"):
            state = Rows(*(torch.tensor(column, device=self.device) for column in zip(
                *((row.anchor, row.position, row.seed) for row in rows), strict=True)))  # fmt: skip
            engine.cache.reserve(self.slots, max(row.position for row in rows) + block_size + 1)
        outcome = engine.play(state)
        with engine.clock.part("bookkeeping"):
            self._commit(rows, outcome)

    def _commit(self, rows: Sequence[_Row], outcome: Outcome) -> None:
        tokens_BK, lengths_B, accepted_B, token_B = (
            part.tolist() for part in (outcome.tokens_BK, outcome.lengths_B, outcome.accepted_B, outcome.token_B)
        )
        confidence_BK = None if outcome.confidence_BK is None else outcome.confidence_BK.float().tolist()
        for slot, row in enumerate(rows):
            accepted = accepted_B[slot]
            drafted = tokens_BK[slot][:accepted]
            stop = next((k for k, token in enumerate(drafted) if token in self.stop_ids), None)
            kept = accepted if stop is None else stop + 1
            new = [*drafted[:kept], *([token_B[slot]] if stop is None else [])]
            confidence = None if confidence_BK is None else tuple(confidence_BK[slot])
            row.generation.rounds.append(Round(lengths_B[slot], kept, int(stop is None), confidence))
            row.anchor, row.position = token_B[slot], row.position + accepted + 1
            if self._extend(row, new):
                self.active[slot] = None

    def _extend(self, row: _Row, new: Sequence[int]) -> bool:
        """Append tokens that hold no stop but possibly the last (S22); true when the row has ended."""
        generation = row.generation
        generation.ids += new
        if len(generation.ids) >= row.limit:
            stopped = generation.ids[-1] in self.stop_ids and len(generation.ids) == row.limit
            del generation.ids[row.limit :]
            generation.finish_reason = "stop" if stopped else "length"
        elif generation.ids[-1] in self.stop_ids:
            generation.finish_reason = "stop"
        if generation.finish_reason is None:
            return False
        if self.on_finish is not None:
            self.on_finish(row.index, generation)
        return True
