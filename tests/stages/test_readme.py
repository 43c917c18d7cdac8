"""Every command printed in README.md is executed here, word for word but for the configuration file and rank counts."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from pipeline.__main__ import main, parse
from pipeline.artifact import read_json
from pipeline.config import dump, load
from tests.stages import whole_chain

ROOT = whole_chain.ROOT
BIN = Path(sys.executable).parent


def commands(text: str) -> list[str]:
    """The command lines of a Markdown text's bash blocks, comments taken off."""
    blocks = re.findall(r"^```(?:bash|sh|shell|console)?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    shell = [block for block in blocks if not block.startswith("pipeline/\n")]  # the folder tree is no command
    lines = [shlex.join(shlex.split(line, comments=True)) for block in shell for line in block.splitlines()]
    return [line for line in dict.fromkeys(lines) if line]


README = commands((ROOT / "README.md").read_text(encoding="utf-8"))
LAUNCHED = [line for line in README if "-m pipeline" in line]
OWN = [line for line in README if line.startswith("dspark ") and "FILE" not in line]
ON_A_FILE = [line for line in README if line.startswith("dspark ") and "FILE" in line]
BY_HAND = [line for line in README if line.startswith("sbatch ")]  # executed by tests/slurm/test_chain.py
MADE = {"make run": "dspark run", "make test": "pytest", "make ui": "mlflow server"}


def test_no_command_of_the_readme_is_left_out() -> None:
    assert len(README) > 10
    assert set(README) == {*LAUNCHED, *OWN, *ON_A_FILE, *BY_HAND, *MADE}, "no test here executes what differs"


# ------------------------------------------------------------------------------------------------ dspark


def configured(work_dir: Path) -> Path:
    """A file that says what `whole_chain.run` says on its command line, with another work directory and no tracking."""
    path = work_dir.parent / "debug.yaml"
    settings = [f"work_dir={work_dir}", "tracking.enabled=false", *whole_chain.SMALLER]
    path.write_text(dump(load(whole_chain.DEBUG, settings)), encoding="utf-8")
    return path


def copied(finished: Path, folder: Path, *without: str) -> Path:
    ignored = shutil.ignore_patterns(*without, "mlflow.db", "mlartifacts")
    return Path(shutil.copytree(finished, folder / "work", symlinks=True, ignore=ignored))


@pytest.fixture(scope="module")
def file(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration whose chain is finished: `dspark run -c configs/debug.yaml` made it as a process of its own."""
    return configured(copied(finished, tmp_path_factory.mktemp("readme")))


@pytest.mark.parametrize("line", OWN)
def test_commands_on_the_debug_configuration(line: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(line.replace("configs/debug.yaml", str(file)))
    assert str(file) in words
    assert main(words[1:]) == 0
    assert capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ training, submitting


def losses(work_dir: Path) -> list[dict[str, float]]:
    """Loss terms of every step of the one train artifact below `work_dir`."""
    (path,) = work_dir.glob("train/*/metrics.jsonl")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in line.items() if "loss" in key or key == "step"} for line in lines]


@pytest.mark.parametrize("line", ON_A_FILE)
def test_commands_on_any_file(line: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One finished chain without its drafter: `train` trains it, `submit` has jobs to show."""
    work_dir = copied(finished, tmp_path, "train")
    words = shlex.split(line.replace("FILE", str(configured(work_dir))))
    assert main(words[1:]) == 0
    if words[1] == "train":
        assert losses(work_dir) == losses(finished)
    else:
        assert "sbatch" in capsys.readouterr().out


def launched(line: str, work_dir: Path) -> list[str]:
    """A launcher's line as it runs here: 2 ranks where the README says 8, and a port that is free."""
    words = shlex.split(line.replace("FILE", str(configured(work_dir))).replace("per_node 8", "per_node 2"))
    free_port = {"torchrun": ["--standalone"], "accelerate": ["launch", "--main_process_port", "0"]}[words[0]]
    return [str(BIN / words[0]), *free_port, *(words[2:] if words[0] == "accelerate" else words[1:])]


@pytest.mark.case("CFG-06")
@pytest.mark.parametrize("line", LAUNCHED)
def test_two_real_ranks_give_the_losses_of_one(line: str, finished: Path, tmp_path: Path) -> None:
    """Started by their launcher as processes."""
    work_dir = copied(finished, tmp_path, "train")
    done = subprocess.run(
        launched(line, work_dir), cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on 2 rank(s)" in done.stdout
    alone, together = losses(finished), losses(work_dir)
    assert len(alone) >= 20
    assert [line["step"] for line in alone] == [line["step"] for line in together]
    for one, two in zip(alone, together, strict=True):
        assert two == pytest.approx(one, rel=1e-5, abs=1e-5)
    (path,) = work_dir.glob("train/*/manifest.json")
    assert read_json(path)["fingerprint"] == next(finished.glob("train/*/manifest.json")).parent.name


# ------------------------------------------------------------------------------------------------ make


@pytest.mark.parametrize("line", MADE)
def test_make_targets_start_what_they_promise(line: str) -> None:
    """What make would do, without doing it: this test is part of the one, and the other takes most of an hour."""
    shown = subprocess.run([*line.split(), "-n"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (started,) = [text for text in shown.splitlines() if MADE[line] in text]
    if line == "make run":
        arguments = parse(shlex.split(started)[1:])
        assert (ROOT / arguments.config).is_file() and load(ROOT / arguments.config).target.model
    elif line == "make test":
        words = [*shlex.split(started)[2:], "--collect-only", "-q", "tests/unit/test_cases.py"]
        subprocess.run([sys.executable, *words[1:]], cwd=ROOT, capture_output=True, check=True)


def test_make_ui_shows_the_finished_experiment(finished: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = [f"WORK={finished}", f"PORT={port}", f"VENV={sys.prefix}"]
    server = subprocess.Popen(
        ["make", "ui", "-o", f"{sys.prefix}/ready", *settings], cwd=ROOT, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        found = _experiments(port, server)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.communicate()
    assert "debug" in found


def _experiments(port: int, server: subprocess.Popen[str]) -> list[str]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/api/2.0/mlflow/experiments/search",
        data=b'{"max_results": 10}', headers={"Content-Type": "application/json"},
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return [item["name"] for item in json.load(answer)["experiments"]]
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
    raise AssertionError(f"make ui does not answer: exit code {server.poll()}")
