"""A plan held against what finished stages left: bytes on disk, CPU-seconds and peak memory from `usage.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline import usage
from pipeline.artifact import Artifact
from pipeline.operations.costs.chain import Cost
from pipeline.operations.costs.disk import counted
from pipeline.operations.costs.predict import Predicted


@dataclass(frozen=True)
class Compared:
    """One figure of one stage. `what` is bytes, cpu_seconds or peak_memory_bytes."""

    stage: str
    what: str
    predicted: float
    actual: float

    @property
    def error(self) -> float:
        """(predicted - actual) / actual."""
        return self.predicted / self.actual - 1.0


def disk(costs: Sequence[Cost], chain: Mapping[str, Artifact]) -> list[Compared]:
    """Finished artifacts whose size follows from tensor shapes. Stages that `chain` lacks are left out."""
    return [
        Compared(cost.stage, "bytes", cost.disk_bytes, actual)
        for cost in costs
        if cost.exact and cost.disk_bytes and cost.stage in chain and (actual := counted(chain[cost.stage]))
    ]


def usage_of(predicted: Sequence[Predicted], chain: Mapping[str, Artifact]) -> list[Compared]:
    """Stages that recorded what they cost: CPU-seconds of all attempts and ranks together, the highest peak of any.

    A peak of the whole process, where the system cannot tell the stage's own, says nothing about the stage: left out.
    """
    found = []
    for one in predicted:
        lines = usage.read(chain[one.stage].path) if one.stage in chain else []
        if not lines:
            continue
        spent = sum(line["cpu_seconds"] for line in lines)
        found.append(Compared(one.stage, "cpu_seconds", one.cpu_seconds, spent))
        peaks = [line["peak_memory_bytes"] for line in lines if line["peak_of"] == usage.OWN]
        if peaks and one.peak_memory_bytes is not None:
            found.append(Compared(one.stage, "peak_memory_bytes", one.peak_memory_bytes, max(peaks)))
    return found
