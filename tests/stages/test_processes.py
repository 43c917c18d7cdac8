"""`dspark run` with `launch.processes_per_node` above 1, as a person starts it: real ranks, Ctrl-C, one exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.trace import STOPPED
from tests.stages import whole_chain
from tests.stages.test_readme import LAUNCHED, copied, launched, losses

TWO = ("launch.processes_per_node=2", "tracking.enabled=false")


def started(work_dir: Path, *overrides: str) -> str:
    return whole_chain.run(work_dir, *TWO, *overrides)


def test_run_starts_a_stage_with_real_ranks_and_goes_on_alone(finished: Path, tmp_path: Path) -> None:
    """Only the drafter is missing: two ranks train it to the losses of one, everything else is reused."""
    work_dir = copied(finished, tmp_path, "train")
    output = started(work_dir)
    assert "on 2 rank(s)" in output and output.count(": reused ") == len(whole_chain.stages_of()) - 1
    (folder,) = (path.parent for path in work_dir.glob("train/*/manifest.json"))
    for log in ("rank-000.log", "rank-001.log"):
        assert "on 2 rank(s)" in (folder / "logs" / log).read_text() and "train: 20/20 steps" in output
    for one, two in zip(losses(finished), losses(work_dir), strict=True):
        assert two == pytest.approx(one, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("line", LAUNCHED)
def test_a_signalled_launcher_exits_with_1_and_leaves_stopped_json(line: str, finished: Path, tmp_path: Path) -> None:
    """What torchrun and accelerate do with a clean stop of their ranks; the same command goes on from there."""
    work_dir = copied(finished, tmp_path, "train")
    more = ["train.steps=100000", "train.save_every=100000"]
    process = subprocess.Popen(
        [*launched(line, work_dir), *more], cwd=whole_chain.ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    with underway(process, work_dir) as folder:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 1 and "The same command goes on from here" in output, output
    assert json.loads((folder / STOPPED).read_text())["reason"] == "signal SIGTERM"
    latest = (folder / "checkpoints" / "latest").read_text().strip()
    assert int(latest.rpartition("-")[2]) == losses(work_dir)[-1]["step"]
    assert not (folder / "failed.json").exists() and not (folder / "lease.json").exists()


@contextmanager
def training(work_dir: Path, *overrides: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run of many steps, once it has taken three of them; its process and its artifact's folder."""
    process = whole_chain.start(work_dir, "train.steps=100000", "tracking.enabled=false", *overrides)
    with underway(process, work_dir) as folder:
        yield process, folder


@contextmanager
def underway(process: subprocess.Popen[str], work_dir: Path) -> Iterator[Path]:
    """The train artifact's folder once three steps are taken; kills what is left of the process afterwards."""
    deadline = time.monotonic() + 300
    try:
        while not (found := [path.parent for path in work_dir.glob("train/*/running.json") if _steps(path.parent) > 2]):
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
            time.sleep(0.1)
        yield found[0]
    finally:
        process.kill()
        process.communicate()


def _steps(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def test_ctrl_c_once_stops_all_ranks_well(finished: Path, tmp_path: Path) -> None:
    work_dir = copied(finished, tmp_path, "train")
    with training(work_dir, *TWO) as (process, folder):
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "Ctrl-C again ends at once" in output and "The same command goes on from here" in output
    assert json.loads((folder / STOPPED).read_text())["reason"].startswith("signal")
    latest = (folder / "checkpoints" / "latest").read_text().strip()
    assert int(latest.rpartition("-")[2]) == losses(work_dir)[-1]["step"]
    assert not (folder / "lease.json").exists() and not (folder / "running.json").exists()
