"""`dspark feed`: build (or, streamed, fetch) a rolling cache's shards on a machine of its own, beside training.

Start it before `dspark train`: training finds it by its lease and starts no builder itself. It ends when the drafter is
trained, or when it is stopped; started again, it goes on from the shards on disk.
"""

from __future__ import annotations

import argparse

from pipeline.chain import STAGES, StageContext, resolve
from pipeline.config import Config
from pipeline.errors import ArtifactError, ConfigError
from pipeline.lease import lease
from pipeline.progress import say
from pipeline.target import pick_device
from pipeline.tracking import NullTracker
from pipeline.training.feeding import LEASE, feed, make_feeder


def run(config: Config, arguments: argparse.Namespace) -> None:
    """Raises ConfigError where the cache does not roll, ArtifactError when its stage has not run or somebody feeds."""
    if config.targets.mode not in ("rolling", "streamed"):
        raise ConfigError(f"feed: targets.mode is {config.targets.mode}; only a rolling or streamed cache is fed")
    artifacts = resolve(config)
    if not artifacts["targets"].complete:
        raise ArtifactError("feed: run `dspark targets` first")
    inputs = {name: artifacts[name] for name in STAGES["train"].inputs(config)}
    context = StageContext(config, artifacts["train"], inputs, NullTracker(), artifacts)
    with lease(artifacts["targets"].path / LEASE):
        feeder = make_feeder(context, pick_device())
        say(f"feed: {artifacts['targets'].path}, for {artifacts['train'].path}")
        feed(feeder, lambda: artifacts["train"].complete)
