"""The training loop: batches, losses, step, log, validate, save.

A step is its global batch (S14): every rank runs its share of micro-batches, sums are added, and the learning rate, the
stop flag and what is saved depend on the step's number alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from pipeline import stopping
from pipeline.distributed import Engine
from pipeline.errors import DataError, Stopped
from pipeline.training.batches import Schedule
from pipeline.training.loader import Reader, Step, feed
from pipeline.training.metrics import Sums, report
from pipeline.training.objective import FrozenTensors
from pipeline.training.optimizer import LearningRate
from pipeline.training.terms import Terms
from pipeline.training.validation import Begun, validate


class Events(Protocol):
    """What happens around the steps. Every rank calls these; who acts is theirs to decide."""

    def stepped(self, done: int, numbers: dict[str, float], timing: dict[str, float]) -> None: ...

    def validated(self, done: int, numbers: dict[str, float]) -> None: ...

    def save(self, done: int, begun: Begun | None = None) -> None:
        """`begun` is the validation of this step, where it is left to the next start."""
        ...

    def flush(self) -> None:
        """Until what was saved is on disk; raises what a save met."""
        ...


@dataclass
class Run:
    """Everything the loop needs. Steps `start` ... `stop` - 1 are run; `done` counts finished steps.

    `begun` is what the last start has left of the validation after step `start`.
    """

    engine: Engine
    frozen: FrozenTensors
    schedule: Schedule
    reader: Reader
    validation: Sequence[int]
    terms: Terms
    rate: LearningRate
    events: Events
    start: int
    stop: int
    first: int = 0
    dtype: torch.dtype = torch.float32
    budget: int = 8192
    workers: int = 1
    validate_every: int = 500
    save_every: int = 500
    begun: Begun | None = None
    _trail: list[tuple[tuple[str, ...], torch.Tensor]] = field(default_factory=list)


def train(run: Run) -> None:
    """Run the steps. The last one is always validated and saved.

    Raises:
        Stopped: some rank was asked to stop; all ranks have saved the same step, and it is on disk.
        DataError: a loss or gradient is not finite; names the samples.
    """
    ranks = run.engine.ranks
    if run.begun is not None:
        _end_step(run, run.start, run.begun, None)
    options = {"rank": ranks.rank, "world": ranks.world, "budget": run.budget, "workers": run.workers}
    for step in feed(run.schedule, run.reader, start=run.start, stop=run.stop, **options):
        done = step.number + 1
        numbers, timing, reason = take(run, step)
        run.events.stepped(done, numbers, timing)
        due = bool(run.validation) and (done % run.validate_every == 0 or done == run.stop)
        _end_step(run, done, Begun() if due else None, reason)


def _end_step(run: Run, done: int, begun: Begun | None, reason: str | None) -> None:
    """Validate, save and stop where these are due. A stop leaves what it can of a validation to the next start."""
    if begun is not None and reason is None:
        found = validate(run, begun)
        if isinstance(found, Begun):
            begun, reason = found, _agree(run)
        else:
            begun = None
            run.events.validated(done, found)
    if done in (run.start, run.stop) or reason is not None or done % run.save_every == 0:
        run.events.save(done, begun)
    if reason is not None and (done < run.stop or begun is not None):
        run.engine.ranks.together(run.events.flush)  # without its save, no rank has stopped cleanly
        run.engine.ranks.barrier()  # leaving at once can abort a rank that is still sending
        raise Stopped(reason)


def take(run: Run, step: Step) -> tuple[dict[str, float], dict[str, float], str | None]:
    """One optimizer step: (reported numbers, timings, why to stop afterwards)."""
    ranks, began = run.engine.ranks, time.perf_counter()
    weight, ce_weight = ranks.sum(step.weight_sums).tolist()
    scale, ce_scale = (ranks.world / total if total > 0 else 0.0 for total in (weight, ce_weight))
    run.engine.module.train()
    run._trail.clear()
    sums: Sums | None = None
    for index, batch in enumerate(step.batches):
        last = index == step.count - 1
        moved = batch.to(ranks.device, run.dtype)
        loss, part = run.engine.forward(moved, run.frozen, scale, ce_scale, last=last)
        run.engine.backward(loss, last=last)
        run._trail.append((batch.keys, part.flat()))
        sums = part if sums is None else sums.plus(part)
    assert sums is not None
    rate = run.rate(step.number - run.first)
    norm = run.engine.update(rate)
    flags = torch.tensor([float(stopping.requested() is not None)], dtype=torch.float64, device=sums.totals_N.device)
    total = ranks.sum(torch.cat([sums.flat(), flags]))
    summed = Sums.of_flat(total[:-1].cpu())
    _guard(run, summed, norm, step.number)
    reason = _agree(run) if total[-1] > 0 else None
    seconds = time.perf_counter() - began
    numbers = {**report(summed, run.terms), "learning_rate": rate, "grad_norm": norm, "epoch": float(step.epoch)}
    return numbers, {"seconds": seconds, "tokens_per_second": summed.total("tokens") / seconds}, reason


def _agree(run: Run) -> str:
    """The reason to stop, the same on every rank: at least one of them has one."""
    reasons = [reason for reason in run.engine.ranks.gather(stopping.requested()) if reason]
    return str(reasons[0])


def _guard(run: Run, sums: Sums, norm: float, number: int) -> None:
    """Stop before a loss or gradient that is not finite reaches a checkpoint, and name the samples."""
    if bool(sums.flat().isfinite().all()) and norm - norm == 0.0:
        return
    bad = [key for keys, flat in run._trail if not bool(flat.isfinite().all()) for key in keys]
    named = [key for keys in run.engine.ranks.gather(bad) for key in keys]
    every = [key for keys in run.engine.ranks.gather([key for keys, _ in run._trail for key in keys]) for key in keys]
    what = "the loss" if named else "a gradient (its losses are finite)"
    samples = ", ".join(sorted(named or every)[:20])
    raise DataError(
        f"step {number + 1}: {what} is not finite. Samples of the micro-batches concerned: {samples}. Nothing of this "
        "step was saved; check these rows with `dspark doctor`, or lower train.learning_rate"
    )
