"""What happens to a rank after a step, by name: see `tests.distributed.training.steps`."""

from __future__ import annotations

import os
import signal
import threading
import time


def signal_rank_1(rank: int, done: int) -> None:
    """SIGUSR1 reaches one rank only, twice."""
    if rank == 1 and done == 4:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)


def raise_on_rank_1(rank: int, done: int) -> None:
    if rank == 1 and done == 3:
        raise RuntimeError("rank 1 failed")


def kill_rank_1(rank: int, done: int) -> None:
    if rank == 1 and done == 7:
        os.kill(os.getpid(), signal.SIGKILL)


def kill_all(rank: int, done: int) -> None:
    """Both at once, right after step 6 was handed to the writer: the save may or may not be whole."""
    if done == 7:
        time.sleep(0.002 * rank)
        os.kill(os.getpid(), signal.SIGKILL)


def kill_at(rank: int, when: str) -> None:
    """`0.31/1`: SIGKILL to rank 1 after 0.31 seconds; `0.31/all`: to every rank."""
    seconds, _, who = when.partition("/")
    if who in ("all", str(rank)):
        threading.Timer(float(seconds), os.kill, (os.getpid(), signal.SIGKILL)).start()
