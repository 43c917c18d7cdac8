"""What a finished run leaves to look at: pictures on every stage's run, and report.html on the parent's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.__main__ import main
from pipeline.config import load
from pipeline.operations.report import command
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


def test_a_call_that_computes_nothing_draws_the_page_only_where_it_is_missing_or_old(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignored = shutil.ignore_patterns("mlflow.db*", "mlartifacts")
    work_dir = shutil.copytree(finished, tmp_path / "work", symlinks=True, ignore=ignored)
    words = ["-c", str(whole_chain.DEBUG), f"work_dir={work_dir}", "tracking.enabled=false", *whole_chain.SMALLER]
    report, drawn = work_dir / "runs" / "debug" / "report.html", []
    monkeypatch.setattr(command, "write", lambda config, chain: drawn.append(config.experiment))
    assert main(["evaluate", *words]) == main(["run", *words]) == 0 and drawn == []
    next(work_dir.glob("export/*/manifest.json")).touch()
    assert main(["evaluate", *words]) == 0 and len(drawn) == 1, "published after the page was written"
    report.unlink()
    assert main(["evaluate", *words]) == 0 and len(drawn) == 2


def test_an_unfinished_chain_leaves_the_page_of_a_finished_one_of_its_experiment(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ignored = shutil.ignore_patterns("mlflow.db*", "mlartifacts")
    work_dir = shutil.copytree(finished, tmp_path / "work", symlinks=True, ignore=ignored)
    words = ["-c", str(whole_chain.DEBUG), f"work_dir={work_dir}", "tracking.enabled=false", *whole_chain.SMALLER]
    folder = work_dir / "runs" / "debug"
    before = (folder / "report.html").read_bytes()
    other = [*words, "export.license=mit"]
    assert main(["report", *other]) == 0
    shown = capsys.readouterr().out
    (own,) = folder.glob("report-*.html")
    assert str(own) in shown and f"{folder / 'report.html'} stays" in shown
    assert "Not finished: export." in own.read_text(encoding="utf-8")
    assert (folder / "report.html").read_bytes() == before
    assert main(["export", *other]) == 0
    assert b"Every stage is finished." in (folder / "report.html").read_bytes() != before and not own.exists()
    assert main(["export", *words]) == 0
    name = before.partition(b'name="chain" content="')[2].split()[0]
    assert name in (folder / "report.html").read_bytes()[:2000], "the chain that was called last"
