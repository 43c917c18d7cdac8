"""A sign of life every few seconds while a block runs, and what can be told of a process that shows none.

with heartbeat(lambda: os.utime(path), seconds=10.0):
    train()
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from pipeline.errors import StorageError

STALE_SECONDS = 60.0  # without a sign for this long, whoever should give one is taken for dead


@contextlib.contextmanager
def heartbeat(beat: Callable[[], object], *, seconds: float) -> Iterator[None]:
    """Call `beat` every `seconds` in a thread. A disk that refuses costs a beat, nothing else."""
    done = threading.Event()

    def run() -> None:
        while not done.wait(seconds):
            with contextlib.suppress(OSError, StorageError):
                beat()

    thread = threading.Thread(target=run, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def known_dead(host: object, pid: object) -> bool:
    """Whether a process is gone. Of another host, or where there is no /proc, only its heartbeat tells."""
    if host != socket.gethostname() or not isinstance(pid, int):
        return False
    return Path("/proc/self").exists() and not Path(f"/proc/{pid}").exists()
