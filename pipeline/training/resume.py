"""Where a run goes on from: its own last checkpoint, or the finished run it extends."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.artifact import Artifact
from pipeline.config import Config
from pipeline.distributed import Ranks
from pipeline.errors import ArtifactError, ConfigError
from pipeline.training import checkpoint
from pipeline.training.state import Snapshot
from pipeline.training.validation import Begun


@dataclass(frozen=True)
class Point:
    """`start`: the next step. `first`: the step the learning rate counts from, 0 unless the run extends another."""

    snapshot: Snapshot | None = None
    start: int = 0
    first: int = 0
    folder: Path | None = None

    @property
    def updates(self) -> int:
        """Optimizer steps the moments have seen."""
        return self.start

    def fact(self, name: str) -> Any:
        """What the checkpoint's state.json says, None without one."""
        return None if self.snapshot is None else self.snapshot.facts.get(name)

    @property
    def begun(self) -> Begun | None:
        """What a stop has left of this run's validation after step `start`."""
        found = self.fact("validation") if self.start > self.first else None
        return None if found is None else Begun(**found)

    @property
    def token_ids(self) -> Tensor | None:
        """The draft vocabulary the weights were trained with: it wins over one counted anew (S30)."""
        ids = self.fact("token_ids")
        return None if ids is None else torch.tensor(ids, dtype=torch.long)


def find(artifact: Artifact, config: Config, ranks: Ranks) -> Point:
    """The newest checkpoint of this run, else the end of the run named by `train.continue_from`, else the beginning.

    Rank 0 chooses: another node may still see an older `latest`.
    Raises ArtifactError for a checkpoint of another run, ConfigError for a run that cannot be extended.
    """
    folder = ranks.first(checkpoint.latest(artifact.path / "checkpoints"))
    if folder is not None:
        snapshot = checkpoint.load(folder)
        if snapshot.facts.get("fingerprint") != artifact.fingerprint:
            raise ArtifactError(f"{folder}: belongs to run {snapshot.facts.get('fingerprint')}; remove the folder")
        return Point(snapshot, snapshot.step, int(snapshot.facts["first"]), folder)
    if config.train.continue_from is None:
        return Point()
    folder = _finished(config)
    snapshot = checkpoint.load(folder)
    if config.train.steps is not None and config.train.steps <= snapshot.step:
        raise ConfigError(
            f"train.continue_from: train.steps is {config.train.steps}, the run already ended at step {snapshot.step}; "
            "name the new total"
        )
    return Point(snapshot, snapshot.step, snapshot.step, folder)


def _finished(config: Config) -> Path:
    named = str(config.train.continue_from)
    where = Path(named) if Path(named).is_dir() else config.work_dir / "train" / named
    if not (where / "manifest.json").exists():
        raise ConfigError(f"train.continue_from: {where} is not a finished train artifact (no manifest.json)")
    folder = checkpoint.latest(where / "checkpoints")
    if folder is None:
        raise ConfigError(f"train.continue_from: {where} has no checkpoint left to go on from")
    return folder


def check_frozen(point: Point, digest: str) -> None:
    """Raise ArtifactError where the frozen parts read now are not those the weights were trained with (DST-07)."""
    if point.snapshot is None:
        return
    found = point.snapshot.facts.get("frozen")
    if found != digest:
        raise ArtifactError(
            f"{point.folder}: was trained with frozen target parts {found}, those read now are {digest}: "
            "the target's embedding or head changed"
        )
