"""A device's rates, and how many devices a stage runs on."""

from __future__ import annotations

from dataclasses import dataclass

from launch import jobs
from pipeline.config import Config

UTILISATION = 0.4  # of either peak; a dense training step on large matrices reaches it


@dataclass(frozen=True)
class Device:
    """Peak dense FLOP/s and bytes/s of one device, and the share of both that is reached."""

    flops: float
    bandwidth: float
    utilisation: float = UTILISATION

    def seconds(self, flops: float, moved_bytes: float = 0.0) -> float:
        """Time of work on one device: whichever of the two it is bound by. Starting kernels is not counted."""
        return max(flops / self.flops, moved_bytes / self.bandwidth) / self.utilisation


def devices(config: Config, stage: str) -> int:
    """How many work on a stage at a time by the `launch` section: nodes times ranks, or array tasks times ranks."""
    for job in jobs.plan(config, ()):
        if job.stage == stage:
            return max(job.tasks, 1) * job.nodes * job.ranks_per_node
    return 1


def engine_of(config: Config) -> str:
    """The engine training is configured for; what a launcher decides counts as ddp."""
    return config.train.engine or ("ddp" if devices(config, "train") > 1 else "single")
