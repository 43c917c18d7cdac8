"""Starting a stage's processes here: a taken port, how they end, and Ctrl-C twice. (Once: tests/stages.)"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest

from launch import local
from pipeline import stopping
from pipeline.artifact import Artifact, write_json
from pipeline.chain import resolve
from pipeline.config import Config, load
from pipeline.errors import ConfigError, DsparkError, Stopped

DEBUG = Path(__file__).resolve().parents[3] / "configs" / "debug.yaml"


pytestmark = pytest.mark.usefixtures("own_signals")


@pytest.fixture
def config(work_dir: Path) -> Config:
    return load(DEBUG, [f"work_dir={work_dir}", "launch.processes_per_node=2"])


@pytest.fixture
def artifact(config: Config) -> Artifact:
    made = resolve(config)["train"]
    made.create()
    return made


def plays(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """A Python program stands in for the launcher and its ranks."""
    monkeypatch.setattr(local, "stage_command", lambda *_: [sys.executable, "-c", program])


def leaving(path: Path, code: int, **facts: object) -> str:
    """A program that writes a file, as ranks do, and ends with `code`, as their launcher does."""
    return f"open({str(path)!r}, 'w').write({json.dumps(facts)!r}); raise SystemExit({code})"


def test_a_taken_port_is_named_before_anything_starts(
    config: Config, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    plays(monkeypatch, "raise SystemExit('started')")
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        asked = config.model_copy(update={"launch": config.launch.model_copy(update={"port": port})})
        with pytest.raises(ConfigError, match=f"launch.port: {port} is already in use"):
            local.run(asked, artifact, [])


def test_the_ranks_own_error_and_exit_code_come_back(
    config: Config, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher ends with 1 whatever happened."""
    write_json(artifact.path / "failed.json", {"error": "of an earlier attempt"})
    plays(monkeypatch, "raise SystemExit(1)")
    with pytest.raises(DsparkError, match="exit code 1 without finishing"):
        local.run(config, artifact, [])
    row = {"error": "DataError: nothing left", "exit_code": 3}
    plays(
        monkeypatch,
        f"open({str(artifact.path / 'failed.json')!r}, 'w').write({json.dumps(row)!r}); raise SystemExit(1)",
    )
    with pytest.raises(DsparkError, match="train: DataError: nothing left") as ending:
        local.run(config, artifact, [])
    assert ending.value.exit_code == 3


def test_a_clean_stop_of_the_ranks_is_one(config: Config, artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    plays(
        monkeypatch,
        f"open({str(artifact.path / 'stopped.json')!r}, 'w').write({json.dumps({'reason': 'preempted'})!r})",
    )
    with pytest.raises(Stopped, match="preempted"):
        local.run(config, artifact, [])


def test_ctrl_c_twice_ends_all_processes_at_once(
    config: Config, artifact: Artifact, monkeypatch: pytest.MonkeyPatch, work_dir: Path
) -> None:
    note = work_dir / "pid"
    plays(monkeypatch, f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(60)")
    stopping.install()

    def interrupt() -> None:
        while not note.exists() or not note.read_text():
            pass
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait(0.3)

    sender = threading.Thread(target=interrupt)
    sender.start()
    with pytest.raises(KeyboardInterrupt):
        local.run(config, artifact, [])
    sender.join()
    assert not Path(f"/proc/{note.read_text()}").exists()
