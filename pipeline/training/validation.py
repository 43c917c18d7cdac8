"""Validation between two steps, which a stop may break off: what is counted so far goes into the checkpoint.

found = validate(run, Begun())             # numbers, or where it stands when some rank was asked to stop
found = validate(run, found)               # after a resume: the numbers of an uninterrupted validation
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeline import stopping
from pipeline.training.batches import Schedule
from pipeline.training.loader import feed
from pipeline.training.metrics import Sums, report

if TYPE_CHECKING:
    from pipeline.training.loop import Run


@dataclass(frozen=True)
class Begun:
    """A validation under way: the next global batch of its rows, and the flat `Sums` of every rank before it."""

    next: int = 0
    sums: Sequence[Sequence[float]] = field(default_factory=list)

    def of(self, rank: int, world: int) -> Tensor | None:
        """A rank's share of what is counted: its own, bit for bit, where the number of ranks is the same."""
        shares = torch.tensor(self.sums[rank::world], dtype=torch.float64)
        return shares.sum(0) if len(shares) else None


@torch.no_grad()
def validate(run: Run, begun: Begun) -> dict[str, float] | Begun:
    """Numbers over the validation rows, each counted once whatever the ranks; anchors are those of epoch 0.

    Ranks agree after every global batch whether one of them was asked to stop; then the rest is left to the next start.
    At least one batch is counted, so that starts shorter than a validation still come to its end.
    """
    ranks, rows = run.engine.ranks, run.validation
    schedule = Schedule(len(rows), run.schedule.global_batch_size, lambda epoch: rows)
    run.engine.module.eval()
    options: dict[str, Any] = {"rank": ranks.rank, "world": ranks.world, "budget": run.budget, "workers": run.workers}
    flat = begun.of(ranks.rank, ranks.world)
    flat = None if flat is None else flat.to(ranks.device)
    left = schedule.steps_per_epoch - begun.next
    for step in feed(schedule, run.reader, start=begun.next, stop=schedule.steps_per_epoch, **options):
        for batch in step.batches:
            _, part = run.engine.forward(batch.to(ranks.device, run.dtype), run.frozen, 0.0, 0.0, last=False)
            flat = part.flat() if flat is None else flat + part.flat()
        left -= 1
        asked = torch.tensor([float(stopping.requested() is not None)], dtype=torch.float64)
        if left and ranks.sum(asked).item() > 0:
            break
    assert flat is not None
    run.engine.settle()
    if left:
        return Begun(schedule.steps_per_epoch - left, ranks.gather(flat.tolist()))
    return report(Sums.of_flat(ranks.sum(flat).cpu()), run.terms)
