"""The same train command under python, torchrun and accelerate: real ranks, the same losses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.artifact import read_json
from tests.stages import whole_chain

ROOT = whole_chain.ROOT
BIN = Path(sys.executable).parent
TORCHRUN = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2", "-m", "pipeline"]
ACCELERATE = [
    str(BIN / "accelerate"), "launch", "--config_file", "configs/accelerate/ddp.yaml", "--num_processes", "2",
    "--main_process_port", "0", "-m", "pipeline",
]  # fmt: skip


def losses(work_dir: Path) -> list[dict[str, float]]:
    """Loss terms of every step of the one train artifact below `work_dir`."""
    (path,) = work_dir.glob("train/*/metrics.jsonl")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in line.items() if "loss" in key or key == "step"} for line in lines]


@pytest.mark.case("CFG-06")
@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate"])
def test_two_real_ranks_give_the_losses_of_one(finished: Path, tmp_path: Path, launcher: list[str]) -> None:
    work_dir = tmp_path / "work"
    shutil.copytree(
        finished, work_dir, symlinks=True, ignore=shutil.ignore_patterns("train", "mlflow.db", "mlartifacts")
    )
    words = ["train", "-c", str(whole_chain.DEBUG), f"work_dir={work_dir}", *whole_chain.SMALLER]
    done = subprocess.run(
        [*launcher, *words], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=300, check=False,
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
