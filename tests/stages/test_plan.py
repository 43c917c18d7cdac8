"""`dspark plan --calibrate` against reality: disk, CPU-seconds and memory of a finished chain, planned and found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.__main__ import main
from tests.conftest import Proof
from tests.stages import whole_chain

SMOLLM2 = whole_chain.ROOT / "configs" / "smollm2.yaml"
WORK = whole_chain.ROOT / "work"
WITH_TARGET = {"answers", "targets", "train", "calibrate", "profile", "evaluate"}
SECONDS = 10.0  # a stage of fewer CPU-seconds is mostly imports


def plan(config: Path, *words: str, threads: str | None = None) -> dict[str, Any]:
    """The facts `dspark plan --calibrate --json` prints, in a process of its own: its memory is part of them."""
    environment = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    if threads:
        environment["OMP_NUM_THREADS"] = threads
    command = [sys.executable, "-m", "pipeline", "plan", "-c", str(config), *words, "--calibrate", "--json", "--quiet"]
    run = subprocess.run(
        command, cwd=whole_chain.ROOT, env=environment, capture_output=True, text=True, timeout=1200, check=False
    )
    assert run.returncode == 0, run.stderr
    return dict(json.loads(run.stdout))


def errors(facts: dict[str, Any], what: str, proof: Proof) -> dict[str, float]:
    """(planned - found) / found by stage; every figure goes into the proof's table."""
    rows = [row for row in facts["compared"] if row["what"] == what]
    for row in rows:
        proof.note(f"{row['stage']}, {what}", f"{row['predicted']:,.0f} planned, {row['actual']:,.0f} found")
    return {row["stage"]: row["error"] for row in rows}


def test_rows_that_are_given_are_not_held_against_those_that_are_finished(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "-c", str(whole_chain.DEBUG), f"work_dir={finished}", *whole_chain.SMALLER, "--json"]
    for more, compared in (([], {"targets", "train", "export"}), (["--rows", "1000"], set())):
        capsys.readouterr()
        assert main([*words, *more]) == 0
        assert {row["stage"] for row in json.loads(capsys.readouterr().out)["compared"]} == compared


@pytest.mark.prove
def test_a_finished_debug_chain(finished: Path, proof: Proof) -> None:
    """Stages of seconds on a toy: the cache's bytes are held tightly, peaks (mostly libraries) to a half, CPU-seconds
    to a factor of three."""
    facts = plan(whole_chain.DEBUG, f"work_dir={finished}", *whole_chain.SMALLER, threads="1")
    assert abs(errors(facts, "bytes", proof)["targets"]) < 0.03
    peaks = errors(facts, "peak_memory_bytes", proof)
    assert set(peaks) == WITH_TARGET
    # One process runs all stages: until training starts, parts of what the plan counts as imported are not yet.
    assert all(abs(peaks[stage]) < 0.5 for stage in ("train", "calibrate", "evaluate")), peaks
    errors(facts, "cpu_seconds", proof)
    spent = sum(row["actual"] for row in facts["compared"] if row["what"] == "cpu_seconds")
    planned = sum(row["cpu_seconds"] for row in facts["calibration"]["stages"])
    planned += facts["calibration"]["rates"]["start_cpu_seconds"]
    assert 1 / 3 < planned / spent < 3
    assert facts["tau_source"] == "measured" and not facts["calibration"]["by_tau"]


@pytest.mark.prove
def test_a_finished_smollm2_run(proof: Proof) -> None:
    """The run of `make run`, when its stages recorded what they cost: 3 % of bytes, 25 % of memory, 30 % of CPU."""
    if not proof.full or not list(WORK.glob("evaluate/*/usage.jsonl")):
        pytest.skip(f"no finished run with usage records below {WORK}: make run")
    facts = plan(SMOLLM2)
    for stage, error in errors(facts, "bytes", proof).items():
        assert abs(error) < 0.03, stage
    peaks = errors(facts, "peak_memory_bytes", proof)
    assert set(peaks) == WITH_TARGET
    assert all(abs(error) < 0.25 for error in peaks.values()), peaks
    large = [row for row in facts["compared"] if row["what"] == "cpu_seconds" and row["actual"] > SECONDS]
    found = errors(facts, "cpu_seconds", proof)
    assert large
    assert all(abs(found[row["stage"]]) < 0.30 for row in large), found
