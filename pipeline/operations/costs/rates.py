"""What a calibration found out about a machine. Plain numbers: `measure` makes them, `predict` uses them."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.operations.costs.work import Decoding


@dataclass(frozen=True)
class Loading:
    """Loading the target once: CPU-seconds, memory it keeps, and memory at its highest meanwhile (all anonymous)."""

    cpu_seconds: float
    kept_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Round:
    """CPU-seconds of a decoding round with all rows, and with a quarter of them. `memory_bytes` is what all rows take
    beside the weights, their cache at its longest.
    """

    rows: int
    cpu_seconds: float
    fewer_rows: int
    fewer_cpu_seconds: float
    memory_bytes: int = 0

    def seconds(self, rounds: float, row_rounds: float) -> float:
        """A round costs something by itself and something per row: the line through both measured sizes."""
        if self.rows == self.fewer_rows:
            return rounds * self.cpu_seconds
        slope = (self.cpu_seconds - self.fewer_cpu_seconds) / (self.rows - self.fewer_rows)
        slope = max(slope, 0.0)
        return rounds * max(self.cpu_seconds - slope * self.rows, 0.0) + row_rounds * slope


@dataclass(frozen=True)
class Rates:
    """What was measured with so many threads.

    `start_bytes` is what a process holds before any work, `base_bytes` what it keeps after work of all kinds, all
    freed; `matmul` FLOPs per CPU-second by dtype, in products of the target's MLP; `read_again` CPU-seconds of answers
    that evaluate reads once more (S23), by dtype.
    """

    threads: int
    start_bytes: int
    base_bytes: int
    start_cpu_seconds: float
    seconds: float = 0.0
    matmul: dict[str, float] = field(default_factory=dict)
    loading: dict[str, Loading] = field(default_factory=dict)
    prefill_per_token: dict[str, float] = field(default_factory=dict)
    rounds: dict[str, Round] = field(default_factory=dict)
    read_again: dict[str, float] = field(default_factory=dict)
    render_per_row: float = 0.0
    targets_per_token: float | None = None
    train_per_step: float | None = None
    train_bytes: int = 0


def round_name(stage: str, run: Decoding) -> str:
    """Under which a kind of round is kept."""
    return f"{stage}, {'drafted' if run.drafted else 'plain'}, T {run.temperature:g}"
