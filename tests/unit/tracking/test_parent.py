"""Files of a whole experiment: on the parent run, once the store takes them."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Config, load
from pipeline.tracking import attach, parent
from pipeline.tracking.places import store_uri

tracking = pytest.importorskip("mlflow.tracking")
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent, "_PATIENCE_SECONDS", 300.0)


def make_config(work_dir: Path, *overrides: str) -> Config:
    return load(ROOT / "configs" / "debug.yaml", [f"work_dir={work_dir}", *overrides])


def runs(config: Config) -> list[Any]:
    client = tracking.MlflowClient(tracking_uri=store_uri(config))
    return list(client.search_runs([client.get_experiment_by_name(config.experiment).experiment_id]))


def stored(run: Any, name: str) -> str:
    return (Path(run.info.artifact_uri.removeprefix("file://")) / name).read_text()


def test_a_store_that_is_away_gets_the_files_of_all_calls_later(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = work_dir / "first.html", work_dir / "second.html"
    first.write_text("one")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        away = f"tracking.uri=http://127.0.0.1:{nobody.getsockname()[1]}"
    attach(make_config(work_dir, away), [first])
    assert "the next report sends what waits" in capsys.readouterr().out

    second.write_text("two")
    config = make_config(work_dir)
    attach(config, [second], "studies")
    (run,) = runs(config)
    assert run.data.tags["dspark.kind"] == "parent", "no child run is made for it"
    assert stored(run, "first.html") == "one" and stored(run, "studies/second.html") == "two"

    first.write_text("changed, but nobody said so")
    attach(config, [])
    assert stored(run, "first.html") == "one", "nothing waits, nothing is sent"
    attach(config, [first])
    assert [run.info.run_id for run in runs(config)] == [run.info.run_id]
    assert stored(run, "first.html") == "changed, but nobody said so"
