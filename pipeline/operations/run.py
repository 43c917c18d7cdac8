"""`dspark run`: the whole chain in this process, then one table of what came out. `dspark STAGE`: one stage."""

from __future__ import annotations

import argparse

from pipeline.config import Config
from pipeline.progress import rank, say
from pipeline.runner import run_chain


def stage(config: Config, arguments: argparse.Namespace) -> None:
    run_chain(config, [arguments.command])


def chain(config: Config, arguments: argparse.Namespace) -> None:
    artifacts = run_chain(config)
    if rank() == 0:
        from pipeline.operations.report.command import write
        from pipeline.operations.summary import summary

        write(config, artifacts)
        say(summary(config, artifacts), result=True)
