"""From measured rates to stages, and from what stages recorded to errors: plain arithmetic on plain numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline import usage
from pipeline.artifact import Artifact
from pipeline.config import load
from pipeline.operations.costs import compare
from pipeline.operations.costs.chain import Cost, Setting, price
from pipeline.operations.costs.corpus import assumed
from pipeline.operations.costs.hardware import Device
from pipeline.operations.costs.predict import Predicted, predict
from pipeline.operations.costs.rates import Loading, Rates, Round
from pipeline.operations.plan import spec_of
from pipeline.shards.plan import Shape
from tests.unit.operations.test_cost_sizes import TARGET, draft_of


def setting(*overrides: str) -> Setting:
    words = ["work_dir=/tmp/nowhere", "data.shard_rows=50", "calibrate.dtype=float32", "answers.dtype=float32"]
    config, shape = load("configs/debug.yaml", [*words, *overrides]), Shape.of(TARGET)
    corpus = assumed(config, 100, 60.0, 0.5, "given")
    return Setting(config, shape, draft_of("dspark"), spec_of(config, shape), corpus, 2.0)


RATES = Rates(
    seconds=20.0, base_bytes=400, start_cpu_seconds=5.0,
    loading={"float32": Loading(cpu_seconds=3.0, kept_bytes=100, peak_bytes=1 << 40)},
    prefill_per_token={"float32": 0.5},
    rounds=dict.fromkeys(("answers, plain", "calibrate, drafted", "evaluate, drafted", "evaluate, plain"),
                         Round(rows=16, cpu_seconds=4.0, fewer_rows=4, fewer_cpu_seconds=1.0)),
    targets_per_token=0.25, train_per_step=2.0,
)  # fmt: skip


def test_a_round_costs_something_by_itself_and_something_per_row() -> None:
    assert RATES.rounds["evaluate, plain"].seconds(1, 16) == pytest.approx(4.0)
    assert RATES.rounds["evaluate, plain"].seconds(1, 4) == pytest.approx(1.0)
    assert Round(16, 4.0, 4, 2.5).seconds(10, 80) == pytest.approx(10 * 3.0)
    noisy = Round(16, 1.0, 4, 2.0)  # fewer rows cannot cost more: the row's share is then nothing, never negative
    assert noisy.seconds(10, 40) == pytest.approx(10.0)


def test_every_stage_is_its_work_times_the_measured_rate() -> None:
    given = setting("train.steps=40", "train.validation_fraction=0")
    found = {one.stage: one for one in predict(given, RATES)}
    assert found["targets"].cpu_seconds == 3.0 + 0.25 * 6000
    assert found["train"].cpu_seconds == 2.0 * 40
    run = given.decodings["answers"][0]
    rounds = RATES.rounds["answers, plain"].seconds(run.rounds, run.row_rounds)
    assert found["answers"].cpu_seconds == pytest.approx(3.0 + 0.5 * 100 * 30 + rounds)
    # Loading is the largest thing these stages do, so their peak is its peak.
    assert {found[stage].peak_memory_bytes for stage in ("answers", "targets", "evaluate")} == {400 + (1 << 40)}


def test_every_active_stage_is_priced_and_only_rolling_or_live_move_the_target() -> None:
    device = Device(1e12, 1e11)
    cached = {cost.stage: cost for cost in price(setting("train.steps=250"), device)}
    live = {cost.stage: cost for cost in price(setting("train.steps=250", "targets.mode=live"), device)}
    assert set(cached) - set(live) == {"targets"}
    assert live["train"].flops > cached["train"].flops + 19 * cached["targets"].flops  # 2,000 rows seen, 100 in a pass
    assert live["train"].memory["target"] > 0
    assert cached["train"].disk_bytes == live["train"].disk_bytes
    assert all(cost.wall_seconds == cost.device_seconds for cost in cached.values())


def test_found_figures_come_from_all_attempts_and_the_highest_peak(tmp_path: Path) -> None:
    artifact = Artifact(tmp_path, "targets", {"stage": "targets", "format": 1})
    artifact.create()
    assert compare.disk([Cost("targets", 100.0, exact=True)], {"targets": artifact}) == []  # not finished
    lines = [
        {"cpu_seconds": 10.0, "peak_memory_bytes": 500, "peak_of": "stage", "whole": False},
        {"cpu_seconds": 30.0, "peak_memory_bytes": 900, "peak_of": "stage", "whole": True},
        {"cpu_seconds": 0.0, "peak_memory_bytes": 9999, "peak_of": "process", "whole": True},
    ]
    (artifact.path / usage.FILE).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (artifact.path / "shard").write_bytes(b"x" * 5000)
    artifact.finish(files=["shard"])
    predicted = [Predicted("targets", 50.0, 810.0)]
    cpu, peak = compare.usage_of(predicted, {"targets": artifact})
    assert (cpu.actual, peak.actual) == (40.0, 900)
    assert cpu.error == pytest.approx(0.25)
    assert peak.error == pytest.approx(-0.1)
    (stored,) = compare.disk([Cost("targets", 5000.0, exact=True), Cost("data", 10.0)], {"targets": artifact})
    assert stored.actual > 5000
