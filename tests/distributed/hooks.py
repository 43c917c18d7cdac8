"""What happens to a rank around its steps, by name: see `tests.distributed.training.steps`."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem

from pipeline.training import sharded, validation

_FILE_OPERATIONS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")
_seen = time.monotonic()


def signal_rank_1(rank: int, done: int, _: str) -> None:
    """SIGUSR1 reaches one rank only, twice."""
    if rank == 1 and done == 4:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)


def raise_on_rank_1(rank: int, done: int, _: str) -> None:
    if rank == 1 and done == 3:
        raise RuntimeError("rank 1 failed")


def kill_rank_1(rank: int, done: int, _: str) -> None:
    if rank == 1 and done == 7:
        os.kill(os.getpid(), signal.SIGKILL)


def kill_all(rank: int, done: int, _: str) -> None:
    """Both at once, right after step 6 was handed to the writer: the save may or may not be whole."""
    if done == 7:
        time.sleep(0.002 * rank)
        os.kill(os.getpid(), signal.SIGKILL)


def kill_at_step(rank: int, done: int, step: str) -> None:
    """`8`: every rank dies once step 8 is done."""
    if done == int(step):
        os.kill(os.getpid(), signal.SIGKILL)


def kill_in_step(rank: int, done: int, when: str) -> None:
    """`4+0.31/1`: SIGKILL to rank 1 in the step after step 4, about 0.31 of a step in; `/all`: to every rank."""
    global _seen
    began, _seen = _seen, time.monotonic()
    moment, _, who = when.partition("/")
    after, _, share = moment.partition("+")
    if done == int(after) and who in ("all", str(rank)):
        threading.Timer(float(share) * (_seen - began), os.kill, (os.getpid(), signal.SIGKILL)).start()


def kill_at_file(rank: int, done: int, when: str) -> None:
    """`17/1`: SIGKILL to rank 1 when rank 0 begins the 17th operation on files of checkpoints; `/all`: to every rank.

    What a killed process has opened, written or renamed until then stays, so every way to cut a save occurs.
    """
    number, _, who = when.partition("/")
    if not _first_call(kill_at_file):
        return
    ranks: list[int] = [0] * int(os.environ["WORLD_SIZE"])
    dist.all_gather_object(ranks, os.getpid()) if dist.is_initialized() else ranks.append(os.getpid())
    if rank != 0:
        return
    victims = ranks[::-1] if who == "all" else [ranks[int(who)]]  # rank 0, which kills, last
    count = itertools.count(1)

    def operation(event: str, arguments: tuple[object, ...]) -> None:
        if event in _FILE_OPERATIONS and "/checkpoints" in str(arguments[0]) and next(count) == int(number):
            for victim in victims:
                os.kill(victim, signal.SIGKILL)

    sys.addaudithook(operation)


def fill_disk(rank: int, done: int, who: str) -> None:
    """`1`: nothing of a save after step 4 that rank 1 writes reaches the disk; one before it may still be under way."""
    if rank == int(who) and done == 4:
        fsync = os.fsync

        def full(handle: int) -> None:
            name = str(Path(f"/proc/self/fd/{handle}").readlink())
            if "step-" in name and "step-000003" not in name:
                raise OSError(28, "No space left on device")
            fsync(handle)

        os.fsync = full  # type: ignore[assignment]


def fill_disk_in_a_part(rank: int, done: int, who: str) -> None:
    """The same, met while torch writes the tensors of a sharded checkpoint: it holds the first 500 bytes."""
    if rank == int(who) and done == 4:
        opened = FileSystem.create_stream

        @contextlib.contextmanager
        def full(self: FileSystem, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
            with opened(self, path, mode) if "step-000003" in str(path) else _FullFile(path, "w") as stream:
                yield stream

        FileSystem.create_stream = full  # type: ignore[method-assign]


class _FullFile(io.FileIO):
    def write(self, data: Any) -> int:
        if self.tell() > 500:
            raise OSError(28, "No space left on device")
        return super().write(data)


def stop_on_a_full_disk(rank: int, done: int, who: str) -> None:
    """`0`: rank 1 is asked to stop, and what rank 0 saves does not reach the disk."""
    signal_in_step(rank, done, "5/1")
    fill_disk(rank, done, who)


def hold_parts(rank: int, done: int, until: str) -> None:
    """`5`: no part of a sharded checkpoint is written before step 5 is done."""
    if _first_call(hold_parts):
        write = sharded.write_parts

        def held(*arguments: Any, **options: Any) -> Any:
            assert _reached.wait(20), "training waits for the save"
            return write(*arguments, **options)

        sharded.write_parts = held
    if done == int(until):
        _reached.set()


def signal_in_step(rank: int, done: int, when: str) -> None:
    """`6/1`: SIGUSR1 reaches rank 1 in step 6."""
    step, _, who = when.partition("/")
    if rank == int(who) and done == int(step) - 1:
        os.kill(os.getpid(), signal.SIGUSR1)


def signal_in_validation(rank: int, done: int, when: str) -> None:
    """`6+2/1`: SIGUSR1 reaches rank 1 at the 2nd global batch of the validation after step 6."""
    _in_validation(rank, done, when, signal.SIGUSR1)


def kill_in_validation(rank: int, done: int, when: str) -> None:
    """The same with SIGKILL; `/all`: to every rank."""
    _in_validation(rank, done, when, signal.SIGKILL)


def _in_validation(rank: int, done: int, when: str, number: int) -> None:
    moment, _, who = when.partition("/")
    step, _, batch = moment.partition("+")
    _last[0] = done
    if not _first_call(_in_validation):
        return
    feed = validation.feed

    def watched(*arguments: Any, **options: Any) -> Iterator[Any]:
        for found in feed(*arguments, **options):
            if (_last[0], found.number + 1) == (int(step), int(batch)) and who in ("all", str(rank)):
                os.kill(os.getpid(), number)
            yield found

    validation.feed = watched


_reached, _last = threading.Event(), [0]
_called: set[object] = set()


def _first_call(hook: object) -> bool:
    first = hook not in _called
    _called.add(hook)
    return first
