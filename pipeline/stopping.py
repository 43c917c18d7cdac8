"""Stopping well: a signal or a time limit sets a flag, the stage finishes or drops its unit of work and leaves.

    install(obeyed("SIGUSR1"), stop_after_seconds=3600)
    for unit in units:
        check()                                    # raises Stopped with the reason

The first signal asks; a second Ctrl-C ends the process at once. Other repeated signals change nothing, so a save in
progress is not broken. Handlers act only in the process that installed them: forked data workers ignore the signals,
and those started in a `shielded` block never get them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from multiprocessing.resource_tracker import ensure_running
from types import FrameType

from pipeline.errors import Stopped
from pipeline.progress import rank

DEFAULT_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT")


# Set by the batch scripts to the signal they pass on, without SIG, whatever the configuration says.
BATCH_SIGNAL = "DSPARK_STOP_SIGNAL"


class _State:
    reason: str | None = None
    deadline: float | None = None
    pid: int = 0


def obeyed(configured: str | None) -> tuple[str, ...]:
    """The signals a run stops on: SIGTERM, Ctrl-C, and `launch.stop_signal`; SIGUSR1 and SIGUSR2 where it is null.

    A signal that is not named here is left alone: the site may use it for something else (SLM-07).
    """
    users = ("SIGUSR1", "SIGUSR2") if configured is None else (configured,)
    batch = os.environ.get(BATCH_SIGNAL)
    return tuple(dict.fromkeys(("SIGTERM", "SIGINT", *users, *([f"SIG{batch}"] if batch else []))))


def install(signals: Iterable[str] = DEFAULT_SIGNALS, stop_after_seconds: float | None = None) -> None:
    """Handle `signals` (names) from now on, and stop by ourselves after `stop_after_seconds`."""
    _State.reason, _State.pid = None, os.getpid()
    _State.deadline = None if stop_after_seconds is None else time.monotonic() + stop_after_seconds
    for name in signals:
        signal.signal(getattr(signal, name), _handle)


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """Processes started inside never see a stop signal: they inherit that it is blocked. Ours waits until the end."""
    signals = {getattr(signal, name) for name in DEFAULT_SIGNALS}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        ensure_running()  # multiprocessing's own helper process, whose start unblocks some of them
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _handle(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _State.pid:
        return
    name = signal.Signals(number).name
    if number == signal.SIGINT:
        if _State.reason is not None:
            raise KeyboardInterrupt
        if rank() == 0:  # no print: one may be in progress
            os.write(2, b"\nstopping at the next border; Ctrl-C again ends at once\n")
    _State.reason = _State.reason or f"signal {name}"


def requested() -> str | None:
    """Why this process should stop, or None. Ranks agree on it at a step border (see `training.loop`)."""
    if _State.reason is None and _State.deadline is not None and time.monotonic() >= _State.deadline:
        _State.reason = "time limit (--stop-after)"
    return _State.reason


def request(reason: str) -> None:
    """Ask from inside, as a signal would."""
    _State.reason = _State.reason or reason


def check() -> None:
    """Raise `Stopped` when a stop was requested. Call it between units of work."""
    reason = requested()
    if reason is not None:
        raise Stopped(reason)
