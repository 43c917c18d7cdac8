"""A lease with a heartbeat: two runs never write one artifact.

    with lease(artifact.path / "lease.json"):
        train()

The holder touches the file every few seconds. A lease that was not touched for a minute, or whose process on this host
is gone, belongs to a run that was killed, and is taken over. Of a holder on another host only the heartbeat tells, so
it is watched for up to that minute: a job requeued after its node failed starts sooner.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import ArtifactError
from pipeline.heartbeat import STALE_SECONDS, heartbeat, known_dead
from pipeline.progress import say

__all__ = ["HEARTBEAT_SECONDS", "STALE_SECONDS", "lease"]

HEARTBEAT_SECONDS = 10.0


@contextlib.contextmanager
def lease(path: Path, *, every: float = HEARTBEAT_SECONDS, stale: float = STALE_SECONDS) -> Iterator[None]:
    """Hold the lease at `path` while the block runs. Raises ArtifactError naming a live holder."""
    _take(path, stale)
    try:
        with heartbeat(lambda: os.utime(path), seconds=every):
            yield
    finally:
        if _holder(path) == _me():
            path.unlink(missing_ok=True)


def _take(path: Path, stale: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(3):
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump(_me(), file)
            return
        except FileExistsError:
            holder = _holder(path)
            if not _gone(path, holder, stale):
                raise ArtifactError(
                    f"{path}: process {holder.get('pid')} on {holder.get('host')} is writing this artifact; stop that"
                ) from None
            # Renamed first: of two runs that find the same dead lease only one can do that.
            grave = path.with_name(f"{path.name}.{os.getpid()}")
            with contextlib.suppress(FileNotFoundError):
                path.rename(grave)
                grave.unlink()
    raise ArtifactError(f"{path}: another run took the lease at the same moment")


def _gone(path: Path, holder: dict[str, object], stale: float) -> bool:
    """Whether the holder is dead; False as soon as it shows life."""
    touched, deadline = _touched(path), time.monotonic() + stale
    if not _dead(path, holder, stale) and holder.get("host") != socket.gethostname():
        say(f"{path}: held on {holder.get('host')}; waiting up to {stale:.0f} s for a sign of life")
    while not _dead(path, holder, stale):
        if holder.get("host") == socket.gethostname() or _touched(path) != touched:
            return False
        if time.monotonic() > deadline:
            break
        time.sleep(min(1.0, stale / 10))
    return True


def _touched(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _dead(path: Path, holder: dict[str, object], stale: float) -> bool:
    try:
        if time.time() - path.stat().st_mtime > stale:
            return True
    except FileNotFoundError:
        return True
    host, pid = holder.get("host"), holder.get("pid")
    if (host, pid) == (socket.gethostname(), os.getpid()):
        return holder != _me()
    return known_dead(host, pid)


def _holder(path: Path) -> dict[str, object]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _me() -> dict[str, object]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "start": _START}


_START = time.time()
