"""`dspark run -c FILE`: the whole chain in this process, then one table of what came out."""

from __future__ import annotations

import argparse

from pipeline.config import Config
from pipeline.progress import rank, say
from pipeline.runner import run_chain


def run(config: Config, arguments: argparse.Namespace) -> None:
    artifacts = run_chain(config)
    if rank() == 0:
        from pipeline.operations.summary import summary

        say(summary(config, artifacts))
