"""From the schedule to micro-batches on this rank, read ahead by threads.

    for step in feed(schedule, rows, recipe, rank=0, world=2, budget=8192, start=120, stop=1000):
        step.weight_sums                       # known before anything heavy is read
        for batch in step.batches: ...         # exactly step.count, on every rank

Threads, not processes: samples are views of mapped files, decoding releases the interpreter lock, and a signal that
stops the run reaches no extra process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeline.speculative.teacher import Head
from pipeline.training.batches import Schedule, deal
from pipeline.training.microbatch import MicroBatch, Recipe, RowPlan, Sample, filler, pack, plan_row
from pipeline.training.teacher import join

Task = Callable[[], Any]


class Rows(Protocol):
    """Where samples come from: a cache of targets, or a live target (see `pipeline.training.rows`)."""

    lengths: Sequence[int]
    num_taps: int
    hidden_size: int
    kept: int | None

    def tokens(self, row: int) -> tuple[str, Tensor, Tensor]:
        """(key, ids, mask) without the hidden states; the key is unique and stable: it seeds the anchors (S8)."""
        ...

    def read(self, rows: Sequence[int]) -> list[Sample]: ...


@dataclass
class Step:
    """One optimizer step on this rank. `weight_sums` covers this rank's rows: reduce it before the first forward."""

    number: int
    epoch: int
    weight_sums: Tensor
    count: int
    batches: Iterator[MicroBatch]


@dataclass(frozen=True)
class Reader:
    """Turns row numbers into plans and micro-batches."""

    rows: Rows
    recipe: Recipe
    head: Head

    def plans(self, numbers: Sequence[int], epoch: int, samples: Sequence[Sample] | None = None) -> list[RowPlan]:
        """Plans of rows from their tokens; with `ce_label: argmax` the labels need the target's distributions too."""
        if self.recipe.ce_label == "data":
            return [plan_row(*self.rows.tokens(number), self.recipe, epoch) for number in numbers]
        found = samples or [self.rows.read([number])[0] for number in numbers]
        best = [best_tokens(sample, self.recipe.vocab_size, self.head) for sample in found]
        return [plan_row(*self.rows.tokens(n), self.recipe, epoch, b) for n, b in zip(numbers, best, strict=True)]

    def weight_sums(self, numbers: Sequence[int], epoch: int) -> Tensor:
        """(sum of w, sum of w over labels inside the draft vocabulary) of some rows, float64 [2]."""
        sums = torch.zeros(2, dtype=torch.float64)
        for plan in self.plans(numbers, epoch):
            sums += plan.weight_sums(self.recipe.weights_K)
        return sums

    def micro_batch(self, numbers: Sequence[int], epoch: int) -> MicroBatch:
        """The packed rows; a filler where none of them has an anchor."""
        samples = self.rows.read(numbers)
        plans = self.plans(numbers, epoch, samples)
        kept = [index for index, plan in enumerate(plans) if plan.anchors_A.numel()]
        if not kept:
            rows = self.rows
            return filler(self.recipe, num_taps=rows.num_taps, hidden_size=rows.hidden_size, kept=rows.kept)
        return pack([plans[index] for index in kept], [samples[index] for index in kept], self.recipe)


def best_tokens(sample: Sample, vocab_size: int, head: Head) -> Tensor:
    """The target's most likely next token at every position with a distribution, 0 elsewhere; int64 [T]."""
    best_T = torch.zeros(sample.ids_T.numel(), dtype=torch.long)
    teacher = join([sample.teacher], vocab_size)
    best_T[sample.teacher.positions_P.cpu().long()] = teacher.argmax(head).cpu()
    return best_T


def feed(
    schedule: Schedule, reader: Reader, *, rank: int, world: int, budget: int, start: int, stop: int, workers: int = 1
) -> Iterator[Step]:
    """Steps `start` ... `stop` - 1 as this rank sees them. A step's micro-batches must be used up before the next.

    `workers` threads work ahead, each on one micro-batch; 0 reads in the calling thread.
    """

    def tasks() -> Iterator[Task]:
        for number in range(start, stop):
            yield from _step_tasks(schedule, reader, number, rank=rank, world=world, budget=budget)

    stream = read_ahead(tasks(), workers)
    for number, epoch, sums, count in stream:
        yield Step(number, epoch, sums, count, (next(stream) for _ in range(count)))


def _step_tasks(
    schedule: Schedule, reader: Reader, number: int, *, rank: int, world: int, budget: int
) -> Iterator[Task]:
    epoch, batch = schedule.epoch(number), schedule.batch(number)
    bins = deal([reader.rows.lengths[row] for row in batch], world=world, budget=budget)[rank]
    mine = [[batch[index] for index in indices] for indices in bins]
    flat = [row for rows in mine for row in rows]
    yield lambda: (number, epoch, reader.weight_sums(flat, epoch), len(mine))
    for rows in mine:
        yield lambda rows=rows: reader.micro_batch(rows, epoch)  # type: ignore[misc]


def read_ahead(tasks: Iterator[Task], workers: int) -> Iterator[Any]:
    """Results of `tasks` in their order, with up to workers + 1 of them in work; errors are raised in their place."""
    if workers == 0:
        yield from (task() for task in tasks)
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="reader") as pool:
        pending: deque[Future[Any]] = deque()
        try:
            while True:
                while len(pending) <= workers and (task := next(tasks, None)) is not None:
                    pending.append(pool.submit(task))
                if not pending:
                    return
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
