"""The command that starts a stage on this machine, with as many processes as the configuration asks for."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from launch.shipped import shipped
from pipeline.chain import STAGES
from pipeline.config import Config


def stage_command(config: Config, stage: str, arguments: Sequence[str]) -> list[str]:
    """`python -m pipeline train ...`, or the same under accelerate when `launch.processes_per_node` is above 1.

    `arguments` follow the stage's name. The engine is `train.engine`; several processes without one run under DDP.
    """
    words = ["-m", "pipeline", stage, *arguments]
    processes = config.launch.processes_per_node
    if processes == 1 or STAGES[stage].ranks == "first":
        return [sys.executable, *words]
    engine = (config.train.engine or "ddp") if stage == "train" else "ddp"
    file = shipped(f"configs/accelerate/{engine}.yaml")
    port = str(config.launch.port or 0)  # 0 takes a free one
    accelerate = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", str(file)]
    return [*accelerate, "--num_processes", str(processes), "--main_process_port", port, *words]
