"""Checkpoints of drafters too large to gather: every rank writes its own part (`train.sharded_checkpoints`).

The same folder, `latest` and facts as a gathered checkpoint, with the tensors in torch.distributed.checkpoint's form
below `sharded/`. `checkpoint.load` reads either, whole, on any engine and number of ranks. The step waits for a copy of
this rank's part in its CPU's memory, and training goes on while that is written; all ranks need to see one file system.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load as read_parts
from torch.distributed.checkpoint.state_dict_saver import save as write_parts

from pipeline.artifact import atomic_path
from pipeline.distributed import Engine
from pipeline.errors import ArtifactError, StorageError
from pipeline.training.checkpoint import Saver, Writer, unreadable
from pipeline.training.state import MOMENTS, check, torch_state

FOLDER = "sharded"


class PartsWriter:
    """Writes this rank's parts in a thread, together with those of the other ranks. Every rank has one.

    On rank 0 the thread is the saver's: what was given to that before is whole first.
    """

    def __init__(self, engine: Engine, saver: Saver | None) -> None:
        """A collective: the threads talk in a process group of their own. `saver` is rank 0's."""
        self.engine, self.saver = engine, saver
        self._writer = Writer() if saver is None else saver
        self._group = dist.new_group(backend="gloo") if engine.ranks.world > 1 else None

    def submit(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Start writing `folder`. It appears by rename, after every rank has written its part; then `latest` names it.

        Raises ArtifactError for tensors that are not those of `facts["shapes"]`, and on every rank what any rank met
        in the save before: StorageError for a full disk.
        """
        self.wait()
        state = torch_state(self.engine)
        for kind, tensors in state.items():
            check(tensors, facts["shapes"], f"step {facts['step']}, {kind}, before saving")
        self._writer.start(partial(self._write, folder, BlockingAsyncStager().stage(state), facts))

    def wait(self) -> None:
        """Until nothing is being written; raises what the last save raised."""
        self._writer.wait()

    def close(self) -> None:
        """Finish writing; raises what the last save raised."""
        self._writer.close()

    def _write(self, folder: Path, state: Any, facts: Mapping[str, Any]) -> None:
        with nullcontext() if self.saver is None else atomic_path(folder) as own:
            where = [str(own)]
            if self._group is not None:
                dist.broadcast_object_list(where, group=self._group)
            try:
                write_parts(
                    state,
                    storage_writer=_PartWriter(f"{where[0]}/{FOLDER}"),
                    process_group=self._group,
                    no_dist=self._group is None,
                )
            except CheckpointException as error:
                raise _readable(folder, error) from error
            if own is not None:
                (own / "state.json").write_text(json.dumps(dict(facts), sort_keys=True), encoding="utf-8")
        if self.saver is not None:
            self.saver.point_at(folder)


class _PartWriter(FileSystemWriter):
    """torch's own, which raises what the disk said: its zip writer, closing a cut file, hides that under a mismatch."""

    def write_data(self, *arguments: Any) -> Any:
        try:
            return super().write_data(*arguments)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


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
