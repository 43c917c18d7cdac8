"""Units of work in several processes: signals to all of them, and a worker that dies."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures.process import BrokenProcessPool

import pytest

from pipeline import stopping
from pipeline.corpus.workers import each
from pipeline.errors import Stopped

pytestmark = pytest.mark.usefixtures("own_signals")


def signalled(number: int) -> int:
    """What Slurm does to every process of a job, and a terminal to its foreground ones."""
    for name in stopping.DEFAULT_SIGNALS:
        os.kill(os.getpid(), getattr(signal, name))
    return number


@pytest.mark.case("SLM-02")
@pytest.mark.parametrize("preload", [(), ("json",)], ids=["spawn", "forkserver"])
def test_workers_do_not_hear_stop_signals(preload: tuple[str, ...]) -> None:
    stopping.install()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert sorted(each(signalled, [1, 2, 3], workers=2, preload=preload)) == [1, 2, 3]
    assert stopping.requested() is None and signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask


@pytest.mark.case("DEP-05")
def test_tokenizer_threads_are_off_in_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    assert list(each(os.getenv, ["TOKENIZERS_PARALLELISM"] * 2, workers=2)) == ["false", "false"]


@pytest.mark.case("SLM-02")
def test_the_process_that_started_them_stops_between_units() -> None:
    stopping.install()
    results = each(abs, list(range(100)), workers=2)
    next(results)
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(Stopped, match="SIGUSR1"):
        list(results)


def die_or_wait(number: int) -> None:
    if number == 0:
        os._exit(1)
    time.sleep(600)


def test_a_worker_that_dies_ends_the_others() -> None:
    """Out of memory, for one: an error, not a hang."""
    with pytest.raises(BrokenProcessPool):
        list(each(die_or_wait, [0, 1, 2], workers=2))
