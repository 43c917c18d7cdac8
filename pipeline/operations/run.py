"""`dspark run`: the whole chain, then one table of what came out. `dspark STAGE`: one stage, in this process.

The stage that completes the chain writes report.html, too: by hand, in an array or as the last job of `dspark submit`.
With `launch.processes_per_node` above 1, `run` starts every stage that can use them with that many processes.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from launch import local
from launch.jobs import ranks_per_node
from pipeline.artifact import Artifact
from pipeline.config import Config
from pipeline.operations.report.shown import PAGE, current
from pipeline.progress import rank, say
from pipeline.runner import run_chain, run_stage
from pipeline.tracking import attach


def stage(config: Config, arguments: argparse.Namespace) -> None:
    artifacts = run_chain(config, [arguments.command])
    if rank() == 0 and all(artifact.complete for artifact in artifacts.values()):
        say(f"report: {_report(config, artifacts)}")


def chain(config: Config, arguments: argparse.Namespace) -> None:
    words = ["-c", arguments.config, *(["--debug"] if arguments.debug else []), *arguments.overrides]
    words += ["--quiet"] if arguments.quiet else []
    launched = "WORLD_SIZE" in os.environ

    def start(config: Config, name: str, artifacts: dict[str, Artifact]) -> None:
        if launched or artifacts[name].complete or ranks_per_node(config, name) == 1:
            run_stage(config, name, artifacts)
        else:
            local.run(config, artifacts[name], words)

    if config.launch.nodes > 1 and not launched:
        say("run: this machine only; launch.nodes is what `dspark submit` asks Slurm for", warning=True)
    artifacts = run_chain(config, start=start)
    if rank() == 0:
        from pipeline.operations.summary import summary

        _report(config, artifacts)
        say(summary(config, artifacts), result=True)


def _report(config: Config, artifacts: dict[str, Artifact]) -> Path:
    """Where the page lies. One that shows all there is stays as it is, undrawn."""
    folder = config.work_dir / "runs" / config.experiment
    if current(folder, config.work_dir, artifacts):
        attach(config, [])  # sends what a server that was away did not get
        return folder / PAGE
    from pipeline.operations.report.command import write  # reads every stage's results, with all that draws them

    return write(config, artifacts)
