"""Which rows make up a step, and how they are dealt to ranks and micro-batches. No tensors here.

The rows of step n are a pure function of (seed, n) over the order of the data set: ranks and micro-batches are only a
way to compute them. So a run resumes on any number of ranks with the same batches, and its only cursor is the step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Order = Callable[[int], Any]  # epoch -> permutation of the rows, a sequence or array of int


@dataclass
class Schedule:
    """Steps cut from an endless stream of shuffled epochs.

    An epoch has ceil(rows / global_batch_size) steps, of which the last may be smaller: nothing is dropped or repeated,
    before a resume or after it. Step 0 is the first.
    """

    rows: int
    global_batch_size: int
    order: Order
    _epoch: int = field(default=-1, repr=False)
    _permutation: Any = field(default=(), repr=False)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.rows // self.global_batch_size)

    def epoch(self, step: int) -> int:
        return step // self.steps_per_epoch

    def batch(self, step: int) -> list[int]:
        """Rows of step `step`, in order."""
        if self.epoch(step) != self._epoch:
            self._epoch = self.epoch(step)
            self._permutation = self.order(self._epoch)
        first = step % self.steps_per_epoch * self.global_batch_size
        return [int(row) for row in self._permutation[first : first + self.global_batch_size]]


def deal(lengths: Sequence[int], *, world: int, budget: int) -> list[list[list[int]]]:
    """Positions of a batch's rows as [rank][micro-batch][row], every rank with the same number of micro-batches.

    Longest rows first, each to the bin with the fewest tokens, with as few bins as keep every bin within `budget`
    tokens (a row longer than that gets a bin of its own) and a multiple of `world`. Bins left empty are the
    zero-weight micro-batches that keep the ranks in step.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    bins = _fewest(lengths, world=world, budget=budget)
    while True:
        filled: list[list[int]] = [[] for _ in range(bins)]
        tokens = [0] * bins
        for row in order:
            lightest = min(range(bins), key=lambda index: (tokens[index], index))
            filled[lightest].append(row)
            tokens[lightest] += lengths[row]
        if all(total <= budget or len(rows) == 1 for total, rows in zip(tokens, filled, strict=True)):
            return [filled[rank::world] for rank in range(world)]
        bins += world


def _fewest(lengths: Sequence[int], *, world: int, budget: int) -> int:
    wanted = max(1, -(-sum(min(length, budget) for length in lengths) // budget))
    return -(-wanted // world) * world


def held_out(ids: Iterable[str], fraction: float) -> list[bool]:
    """True for validation rows, decided by a hash of the conversation's id: all turns of one fall on one side."""
    limit = int(fraction * 2**64)
    return [int.from_bytes(hashlib.sha256(f"validation/{name}".encode()).digest()[:8], "big") < limit for name in ids]
