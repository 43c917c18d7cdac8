"""Ten things people get wrong: each ends in one clear message and its exit code, and damages nothing."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.__main__ import main
from pipeline.artifact import sha256_file
from pipeline.preflight import has_gpu
from tests.stages import whole_chain
from tests.stages.test_processes import training
from tests.stages.test_readme import configured, copied

NEW = "train.learning_rate=0.5"  # a drafter that is not there yet


def _can_mount() -> bool:
    words = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return bool(shutil.which("unshare")) and subprocess.run(words, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def work(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(finished, tmp_path_factory.mktemp("misuse"))


def hashes(work_dir: Path) -> dict[str, str]:
    """Content of everything in finished artifacts."""
    folders = [path.parent for path in work_dir.glob("*/*/manifest.json")]
    return {str(file): sha256_file(file) for folder in folders for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def refused(work: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[object]:
    """`refused(code, command, override ...)` is the one message; what was finished before is as it was."""
    before = hashes(work)

    def run(code: int, command: str, *overrides: str) -> str:
        capsys.readouterr()
        assert main([command, "-c", str(configured(work)), *overrides]) == code
        message = capsys.readouterr().err
        assert message.count("error: ") == 1 and "Traceback" not in message
        return message

    yield run
    assert hashes(work) == before


def test_a_wrong_key(refused) -> None:
    assert "train.stepz: unknown key; did you mean train.steps?" in refused(2, "run", "train.stepz=3")


def test_a_wrong_type(refused) -> None:
    message = refused(2, "run", "train.steps=many", "data.sources.7.limit=3")
    assert "train.steps: a whole number is expected, found 'many'" in message
    assert "data.sources has 2 entries, numbered 0 to 1; '7' is not one" in message


def test_a_missing_file(refused, tmp_path: Path) -> None:
    absent = tmp_path / "absent.jsonl"
    assert f"{absent}: no such file" in refused(2, "run", f"data.sources=[{{path: {absent}}}]")


def test_an_unknown_stage_and_one_that_is_off(refused) -> None:
    assert "command 'trian': unknown; did you mean train?" in refused(2, "trian")
    assert "stage targets is off in this configuration" in refused(2, "targets", "targets.mode=live")


@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU")
def test_a_gpu_configuration_on_a_machine_without_one(refused) -> None:
    message = refused(2, "run", NEW, "target.attention=flash_attention_2", "target.device_map=cuda:0")
    assert "target.attention: flash_attention_2 needs a GPU, this machine has none; use auto" in message
    assert "target.device_map: cuda:0" in message


def test_a_port_in_use(refused, finished: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        message = refused(2, "run", NEW, "launch.processes_per_node=2", f"launch.port={port}")
        assert f"launch.port: {port} is already in use on this machine" in message
        settings = [f"PORT={port}", f"WORK={finished}", f"VENV={sys.prefix}"]
        command = ["make", "ui", "-o", f"{sys.prefix}/ready", *settings]
        ui = subprocess.run(command, cwd=whole_chain.ROOT, capture_output=True, text=True, check=False)
    assert ui.returncode == 2 and f"port {port} is in use: make ui PORT=another" in ui.stdout


@contextmanager
def replaced(path: Path, content: bytes | None) -> Iterator[None]:
    """Another content (None: no file) while the block runs."""
    good = path.read_bytes()
    try:
        path.unlink() if content is None else path.write_bytes(content)
        yield
    finally:
        path.write_bytes(good)


@pytest.mark.parametrize("damage", ["cut", "gone", "scrambled"])
def test_an_unreadable_shard(refused, work: Path, damage: str) -> None:
    shard = next(work.glob("targets/*/train-00000.tar"))
    good = shard.read_bytes()
    content = {"cut": good[:1000], "gone": None, "scrambled": good[::-1]}[damage]
    with replaced(shard, content):
        message = refused(4, "train", NEW)
    assert str(shard) in message and "dspark repair" in message


def test_two_trainings_of_one_artifact(refused, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second is refused with the first one's process; the first does not notice."""
    steps = "train.steps=100000"
    with training(work) as (process, folder):
        message = refused(4, "train", steps)
        assert f"process {process.pid} on {socket.gethostname()} is writing this artifact" in message
        assert (folder / "running.json").exists() and not (folder / "failed.json").exists()
        assert process.poll() is None
    shutil.rmtree(folder)


@pytest.mark.skipif(not _can_mount(), reason="no small file system can be mounted here")
def test_a_full_disk(finished: Path, tmp_path: Path) -> None:
    """A file system of its own, with the finished chain on it and 100 kB of room: an export needs more."""
    place, before = tmp_path / "disk", hashes(finished)
    place.mkdir()
    file = configured(place / "work")
    script = """
        place=$1; shift
        mount -t tmpfs -o size=256m none "$place" && cp -a "$1" "$place/work" && rm -f "$place/work/mlflow.db"; shift
        head -c $(($(df --output=avail -B1 "$place" | tail -n 1) - 102400)) /dev/zero > "$place/filler"
        "$@"; code=$?
        cp -a "$place/work" "$PWD/after"
        exit $code
    """
    overrides = ["export.dtype=float32", "export.layouts=[deepspec]", "tracking.enabled=true"]
    words = [sys.executable, "-m", "pipeline", "run", "-c", str(tmp_path / "debug.yaml"), *overrides]
    file.rename(tmp_path / "debug.yaml")
    done = subprocess.run(
        ["unshare", "-rm", "bash", "-c", script, "bash", str(place), str(finished), *words],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(whole_chain.ROOT)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 5, done.stdout + done.stderr
    assert done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr and "INSERT" not in done.stderr
    assert "No space left on device" in done.stderr and "free space and run the same command again" in done.stderr
    after = hashes(tmp_path / "after")
    assert {name: after.get(name.replace(str(finished), str(tmp_path / "after"))) for name in before} == before


OLD_PYTHON = """
import runpy, sys
sys.version_info = (3, 9, 2, "final", 0)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_wrong_python(tmp_path: Path) -> None:
    """`make` with an interpreter that says it is 3.9."""
    old, venv = tmp_path / "python3.9", tmp_path / "venv"
    (tmp_path / "old.py").write_text(OLD_PYTHON)
    old.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path / "old.py"} "$@"\n')
    old.chmod(0o755)
    words = ["make", "run", f"PYTHON={old}", f"VENV={venv}"]
    made = subprocess.run(words, cwd=whole_chain.ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 2
    assert "setup: Python 3.11 or newer is needed" in made.stderr and "is 3.9" in made.stderr
    assert "Traceback" not in made.stderr and not venv.exists()
