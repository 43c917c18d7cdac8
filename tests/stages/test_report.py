"""What a finished run leaves to look at: pictures on every stage's run, and report.html on the parent's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.__main__ import main
from pipeline.config import load
from pipeline.tracking.places import store_uri
from tests.stages import whole_chain

PICTURES = {
    "targets": ("codec",),
    "train": ("loss", "acceptance_by_slot", "acceptance", "tau", "learning_rate", "throughput"),
    "calibrate": ("reliability-T0", "reliability-T1"),
    "profile": ("sps",),
    "evaluate": ("tau", "acceptance", "thresholds", "lab-T0", "lab-T1"),
}


@pytest.fixture(scope="module")
def stored(finished: Path) -> dict[str, Path]:
    """Stage, or "parent" -> the folder in which MLflow keeps the files of its run in experiment `debug`."""
    tracking: Any = pytest.importorskip("mlflow.tracking")
    client = tracking.MlflowClient(tracking_uri=store_uri(load(whole_chain.DEBUG, [f"work_dir={finished}"])))
    runs = client.search_runs([client.get_experiment_by_name("debug").experiment_id])
    return {run.data.tags.get("stage", "parent"): Path(run.info.artifact_uri.removeprefix("file://")) for run in runs}


@pytest.mark.parametrize("stage", PICTURES)
def test_pictures_lie_on_the_run_of_their_stage(stored: dict[str, Path], stage: str) -> None:
    pictures = {path.stem: path for path in stored[stage].rglob("*.png")}
    assert set(pictures) == set(PICTURES[stage])
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures.values())


def test_run_ends_in_a_report_that_shows_everything(finished: Path, stored: dict[str, Path]) -> None:
    text = (finished / "runs" / "debug" / "report.html").read_text(encoding="utf-8")
    assert "Nothing to show yet" not in text and "Every stage is finished." in text
    assert text.count("data:image/png") == sum(map(len, PICTURES.values()))
    assert (stored["parent"] / "report.html").read_text(encoding="utf-8") == text, "redaction finds nothing to hide"
    assert "runs/debug/report.html" in (finished.parent / "output.txt").read_text(encoding="utf-8")


def test_the_stage_that_completes_the_chain_writes_the_report(finished: Path, tmp_path: Path) -> None:
    """As jobs of `dspark submit` do: each stage is a process of its own."""
    ignored = shutil.ignore_patterns("export", "mlflow.db*", "mlartifacts", "report.html")
    work_dir = shutil.copytree(finished, tmp_path / "work", symlinks=True, ignore=ignored)
    words = ["-c", str(whole_chain.DEBUG), f"work_dir={work_dir}", "tracking.enabled=false", *whole_chain.SMALLER]
    report = work_dir / "runs" / "debug" / "report.html"
    assert main(["evaluate", *words]) == 0
    assert not report.exists(), "export is open"
    assert main(["export", *words]) == 0
    assert "Every stage is finished." in report.read_text(encoding="utf-8")
