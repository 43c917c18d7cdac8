"""What a stage run leaves in its folder while it works and when it ends badly, for people and `dspark status`.

    running.json    host, process, Slurm job, how far it is; its mtime is a heartbeat
    stopped.json    asked to stop (signal, time limit): batch scripts requeue on it
    failed.json     the error that came first, and its exit code

All three are gone once the stage finishes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.artifact import Artifact, read_json, write_json
from pipeline.errors import ArtifactError, DsparkError, Stopped
from pipeline.heartbeat import STALE_SECONDS, heartbeat, known_dead
from pipeline.progress import current, rank, say

HEARTBEAT_SECONDS = 5.0
RUNNING, STOPPED, FAILED = "running.json", "stopped.json", "failed.json"


@contextlib.contextmanager
def traced(artifact: Artifact) -> Iterator[None]:
    """Keep the traces of one stage run. Endings of any rank are written; the heartbeat is rank 0's."""
    for name in (STOPPED, FAILED):
        (artifact.path / name).unlink(missing_ok=True)
    with _running(artifact.path / RUNNING) if rank() == 0 else contextlib.nullcontext():
        try:
            yield
        except Stopped as stop:
            write_json(artifact.path / STOPPED, {**_who(), "stage": artifact.stage, "reason": str(stop)})
            _tell_batch_script(str(stop))
            raise
        except BaseException as error:
            with contextlib.suppress(Exception):  # the disk may be the reason
                note_failure(artifact, error)
            raise


@contextlib.contextmanager
def shared(artifact: Artifact) -> Iterator[None]:
    """Around what ranks do together, inside `traced` and before the group is left: whoever fails says why first.

    Raises DsparkError with another rank's message and exit code where this one only lost it, in a collective.
    """
    try:
        yield
    except Stopped:
        raise
    except Exception as error:
        failed = _failure(artifact)
        if isinstance(error, RuntimeError) and failed.get("rank", rank()) != rank():
            elsewhere = DsparkError(f"rank {failed['rank']}: {failed['error']}")
            elsewhere.exit_code = failed["exit_code"]
            raise elsewhere from error
        with contextlib.suppress(Exception):  # the disk may be the reason
            note_failure(artifact, error)
        raise


def _failure(artifact: Artifact) -> dict[str, Any]:
    with contextlib.suppress(OSError, ArtifactError):
        return dict(read_json(artifact.path / FAILED))
    return {}


def note_failure(artifact: Artifact, error: BaseException) -> None:
    """Write failed.json. Only the first: where one rank fails, the others soon fail for want of it."""
    path = artifact.path / FAILED
    if not path.exists():
        text, code = f"{type(error).__name__}: {error}", getattr(error, "exit_code", 1)
        write_json(path, {**_who(), "stage": artifact.stage, "error": text, "exit_code": code})
        if rank() > 0:
            say(f"rank {rank()}: {text}", error=True, any_rank=True)  # rank 0 will only miss its peer


def _tell_batch_script(reason: str) -> None:
    """Exit code 0 is all that launchers pass on, so a batch script names a file: when it is there, this job stopped."""
    note = os.environ.get("DSPARK_STOP_NOTE")
    if note and rank() == 0:
        Path(note).write_text(f"{reason}\n", encoding="utf-8")


def _who() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "rank": rank(),
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
        "time": time.time(),
    }


@contextlib.contextmanager
def _running(path: Path) -> Iterator[None]:
    who = _who()
    write_json(path, who)
    try:
        with heartbeat(lambda: write_json(path, {**who, "progress": current()}), seconds=HEARTBEAT_SECONDS):
            yield
    finally:
        path.unlink(missing_ok=True)


def alive(folder: Path) -> bool:
    """Whether a run works in this folder: a heartbeat in the last minute, and not from a process known to be gone."""
    path = folder / RUNNING
    try:
        fresh = time.time() - path.stat().st_mtime < STALE_SECONDS
        who = read_json(path)
    except (OSError, ArtifactError):
        return False
    return fresh and not known_dead(who.get("host"), who.get("pid"))
