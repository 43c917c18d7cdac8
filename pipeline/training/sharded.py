"""Checkpoints of drafters too large to gather: every rank writes its own part (`train.sharded_checkpoints`).

The same folder, `latest` and facts as a gathered checkpoint, with the tensors in torch.distributed.checkpoint's form
below `sharded/`. `checkpoint.load` reads either, whole, on any engine and number of ranks. The step waits for the save,
because the parts are written from the tensors that train; all ranks need to see one file system.
"""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as read_parts
from torch.distributed.checkpoint.state_dict_saver import save as write_parts

from pipeline.artifact import atomic_path
from pipeline.distributed import Engine
from pipeline.errors import ArtifactError, StorageError
from pipeline.training.checkpoint import unreadable
from pipeline.training.state import MOMENTS, check, torch_state

FOLDER = "sharded"


def save(engine: Engine, folder: Path, facts: Mapping[str, Any]) -> None:
    """Write `folder`; a collective. It appears by rename, after every rank has written its part.

    Raises on every rank what any rank met: StorageError for a full disk, ArtifactError for tensors that are not those
    of `facts["shapes"]`.
    """
    ranks, state = engine.ranks, torch_state(engine)
    for kind, tensors in state.items():
        check(tensors, facts["shapes"], f"step {facts['step']}, {kind}, before saving")
    with atomic_path(folder) if ranks.rank == 0 else contextlib.nullcontext() as own:
        temporary = Path(ranks.first(str(own)))
        try:
            write_parts(state, checkpoint_id=str(temporary / FOLDER), no_dist=ranks.world == 1)
        except CheckpointException as error:
            raise _readable(folder, error) from error
        if own is not None:
            (own / "state.json").write_text(json.dumps(dict(facts), sort_keys=True), encoding="utf-8")


def _first(error: CheckpointException) -> tuple[int, BaseException]:
    """(rank, what it met): torch's own error is no Exception, and prints pages."""
    rank, (cause, _) = next(iter(error.failures.items()))
    return rank, cause


def _readable(folder: Path, error: CheckpointException) -> Exception:
    rank, cause = _first(error)
    if "No space left" in str(cause) or getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(
            f"{folder}: cannot be written (rank {rank}: {cause}). The checkpoint before is intact: free space and run "
            "the same command again."
        )
    return ArtifactError(f"{folder}: cannot be written (rank {rank}: {cause})")


def load(folder: Path, shapes: Mapping[str, list[int]]) -> dict[str, dict[str, Tensor]]:
    """Whole fp32 tensors by kind and name, without a process group. Raises ArtifactError for parts that do not fit."""
    kinds = ("weights", *MOMENTS)
    try:
        saved = FileSystemReader(folder).read_metadata().state_dict_metadata
        for kind in kinds:
            check(_outlines(saved, f"{kind}."), shapes, f"{folder}, {kind}")
        wanted = {kind: {name: torch.empty(shape) for name, shape in shapes.items()} for kind in kinds}
        read_parts(wanted, checkpoint_id=str(folder), no_dist=True)
    except ArtifactError:
        raise
    except CheckpointException as error:
        raise unreadable(folder, _first(error)[1]) from error
    except Exception as error:  # torch's reader raises whatever it meets
        raise unreadable(folder, error) from error
    return wanted


def _outlines(saved: Mapping[str, Any], prefix: str) -> dict[str, Tensor]:
    """Tensors without data, as large as those saved under names that begin with `prefix`."""
    return {
        name.removeprefix(prefix): torch.empty(facts.size, device="meta")
        for name, facts in saved.items()
        if name.startswith(prefix)
    }
