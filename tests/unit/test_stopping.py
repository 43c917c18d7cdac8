"""Signals and time limits set a flag; only the process that asked for them reacts."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from pipeline import stopping
from pipeline.__main__ import main
from pipeline.errors import Stopped

DEBUG = str(Path(__file__).resolve().parents[2] / "configs" / "debug.yaml")


pytestmark = pytest.mark.usefixtures("own_signals")


@pytest.mark.case("SLM-07")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2"])
def test_a_signal_asks_and_names_itself(name: str) -> None:
    stopping.install()
    stopping.check()
    os.kill(os.getpid(), getattr(signal, name))
    with pytest.raises(Stopped, match=name):
        stopping.check()
    os.kill(os.getpid(), getattr(signal, name))  # a second one changes nothing
    assert stopping.requested() == f"signal {name}"


def test_time_limit() -> None:
    stopping.install(stop_after_seconds=0.0)
    with pytest.raises(Stopped, match="time limit"):
        stopping.check()


def test_second_interrupt_ends_at_once() -> None:
    stopping.install()
    os.kill(os.getpid(), signal.SIGINT)
    assert stopping.requested() == "signal SIGINT"
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.case("SLM-02")
def test_forked_workers_ignore_the_signal() -> None:
    stopping.install()
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0 if stopping.requested() is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.case("SLM-07")
def test_only_the_configured_signal_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The site may use the other one; what the batch script passes on counts whatever the configuration says."""
    users = {"SIGUSR1", "SIGUSR2"}
    assert users <= set(stopping.obeyed(None))
    assert users & set(stopping.obeyed("SIGUSR2")) == {"SIGUSR2"}
    assert set(stopping.obeyed("SIGTERM")) == {"SIGTERM", "SIGINT"}
    monkeypatch.setenv(stopping.BATCH_SIGNAL, "USR1")
    assert users <= set(stopping.obeyed("SIGUSR2"))


@pytest.mark.case("SLM-07")
def test_the_command_line_leaves_the_other_signal_alone(tmp_path: Path) -> None:
    seen: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    assert main(["repair", "-c", DEBUG, f"work_dir={tmp_path}", "launch.stop_signal=SIGUSR2"]) == 0
    os.kill(os.getpid(), signal.SIGUSR1)
    assert seen == [signal.SIGUSR1] and stopping.requested() is None
    os.kill(os.getpid(), signal.SIGUSR2)
    assert stopping.requested() == "signal SIGUSR2"
