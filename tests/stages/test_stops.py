"""Every stage obeys a request to stop, and the same command afterwards ends in the same artifact."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline import stopping
from pipeline.artifact import read_json
from pipeline.chain import resolve
from pipeline.config import load
from pipeline.errors import Stopped
from pipeline.runner import run_stage
from tests.stages import whole_chain

STAGES = ("data", "answers", "tokens", "targets", "calibrate", "profile", "evaluate", "export")  # train: test_train


pytestmark = pytest.mark.usefixtures("own_signals")


@pytest.mark.case("SLM-04")
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_stops_between_its_units_and_goes_on(
    stage: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked when it first looks, then when it looks for the third time, then left alone."""
    work_dir = tmp_path / "work"
    ignored = shutil.ignore_patterns(stage, "mlflow.db*", "mlartifacts")
    shutil.copytree(finished, work_dir, symlinks=True, ignore=ignored)
    config = load(whole_chain.DEBUG, [f"work_dir={work_dir}", *whole_chain.SMALLER, "tracking.enabled=false"])
    artifact, requested = resolve(config)[stage], stopping.requested
    looks, ask_at, stops = 0, 0, 0

    def look() -> str | None:
        nonlocal looks
        looks += 1
        if looks == ask_at:
            stopping.request("asked by the test")
        return requested()

    monkeypatch.setattr(stopping, "requested", look)
    for at in (1, 3, -1):
        stopping.install(())
        looks, ask_at = 0, at
        try:
            run_stage(config, stage, resolve(config))
        except Stopped:
            stops += 1
            assert read_json(artifact.path / "stopped.json")["reason"] == "asked by the test"
            assert not artifact.complete
    assert stops and artifact.complete and not (artifact.path / "stopped.json").exists()
    found, expected = whole_chain.results(work_dir), whole_chain.results(finished)
    mine = [name for name in expected if name.startswith(f"{stage}/")]
    assert {name: found[name] for name in mine} == {name: expected[name] for name in mine}
    assert bool(mine) == (stage != "profile"), "a profile is a measurement: nothing of it is equal twice"
