"""From measured rates to stages, and from what stages recorded to errors: plain arithmetic on plain numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline import usage
from pipeline.artifact import Artifact
from pipeline.config import load
from pipeline.operations import plan
from pipeline.operations.costs import compare, memory
from pipeline.operations.costs.chain import Cost, Setting, price
from pipeline.operations.costs.corpus import assumed
from pipeline.operations.costs.hardware import Device
from pipeline.operations.costs.predict import Predicted, predict
from pipeline.operations.costs.rates import Loading, Rates, Round, round_name
from pipeline.operations.plan import spec_of
from pipeline.shards.plan import Shape
from tests.unit.operations.test_cost_sizes import TARGET, draft_of


def setting(*overrides: str) -> Setting:
    words = ["work_dir=/tmp/nowhere", "data.shard_rows=50", "calibrate.dtype=float32", "answers.dtype=float32"]
    config, shape = load("configs/debug.yaml", [*words, *overrides]), Shape.of(TARGET)
    corpus = assumed(config, 100, 60.0, 0.5, "given")
    return Setting(config, shape, draft_of("dspark"), spec_of(config, shape), corpus, 2.0)


RATES = Rates(
    threads=1, start_bytes=100, base_bytes=400, start_cpu_seconds=5.0,
    loading={"float32": Loading(cpu_seconds=3.0, kept_bytes=100, peak_bytes=1 << 40)},
    prefill_per_token={"float32": 0.5},
    rounds={f"{kind}, T {temperature}": Round(rows=16, cpu_seconds=4.0, fewer_rows=4, fewer_cpu_seconds=1.0)
            for kind in ("answers, plain", "calibrate, drafted", "evaluate, drafted", "evaluate, plain")
            for temperature in ("0", "0.7", "1")},
    read_again={"float32": 1.0},
    targets_per_token=0.25, train_per_step=2.0,
)  # fmt: skip


def test_a_round_costs_something_by_itself_and_something_per_row() -> None:
    assert RATES.rounds["evaluate, plain, T 0"].seconds(1, 16) == pytest.approx(4.0)
    assert RATES.rounds["evaluate, plain, T 0"].seconds(1, 4) == pytest.approx(1.0)
    assert Round(16, 4.0, 4, 2.5).seconds(10, 80) == pytest.approx(10 * 3.0)
    noisy = Round(16, 1.0, 4, 2.0)  # fewer rows cannot cost more: the row's share is then nothing, never negative
    assert noisy.seconds(10, 40) == pytest.approx(10.0)


def test_every_stage_is_its_work_times_the_measured_rate() -> None:
    given = setting("train.steps=40", "train.validation_fraction=0")
    found = {one.stage: one for one in predict(given, RATES)}
    assert found["targets"].cpu_seconds == 3.0 + 0.25 * (6000 + 1024)
    assert found["train"].cpu_seconds == 2.0 * 40
    run = given.decodings["answers"][0]
    rounds = RATES.rounds[round_name("answers", run)].seconds(run.rounds, run.row_rounds)
    assert found["answers"].cpu_seconds == pytest.approx(3.0 + 0.5 * 100 * 30 + rounds)
    # Loading is the largest thing these stages do, so their peak is its peak.
    # What answers finds in the process is what it starts with; the others find what was left behind.
    peaks = [found[stage].peak_memory_bytes for stage in ("answers", "targets", "evaluate")]
    assert peaks == [100 + (1 << 40), 400 + (1 << 40), 400 + (1 << 40)]


def test_a_decoding_stage_holds_what_its_largest_round_was_seen_to_take_beside_the_weights() -> None:
    rounds = {
        name: replace(one, memory_bytes=(2 if "plain" in name else 1) << 40) for name, one in RATES.rounds.items()
    }
    rates = replace(RATES, loading={"float32": Loading(3.0, kept_bytes=100, peak_bytes=200)}, rounds=rounds)
    given = setting()
    found = {one.stage: one.peak_memory_bytes for one in predict(given, rates)}
    (drafted, *_) = given.decodings["calibrate"]
    drafter = memory.decoding_memory(given.config, given.shape, given.draft, drafted)["drafter"]
    assert found["answers"] == 100 + 100 + (2 << 40) and found["evaluate"] == 400 + 100 + (2 << 40)
    assert found["calibrate"] == 400 + 100 + (1 << 40) + drafter


def test_training_holds_what_its_loop_was_seen_to_take_but_no_less_than_it_must() -> None:
    seen = replace(RATES, train_bytes=1 << 40)
    peaks = [
        one.peak_memory_bytes for rates in (RATES, seen) for one in predict(setting(), rates) if one.stage == "train"
    ]
    assert peaks[0] is not None and peaks[0] > RATES.base_bytes
    assert peaks[1] is not None and 1 << 40 < peaks[1] < (1 << 40) + peaks[0]


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
        {"cpu_seconds": 10.0, "peak_memory_bytes": 500, "peak_of": usage.OWN, "whole": False},
        {"cpu_seconds": 30.0, "peak_memory_bytes": 900, "peak_of": usage.OWN, "whole": True},
        {"cpu_seconds": 0.0, "peak_memory_bytes": 9999, "peak_of": "process, resident", "whole": True},
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


def finished(folder: Path, stage: str, **arrays: list[int] | list[bool]) -> Artifact:
    artifact = Artifact(folder, stage, {"stage": stage, "format": 1})
    artifact.create()
    if arrays:
        np.savez(artifact.path / "records-T0.npz", **{name: np.array(values) for name, values in arrays.items()})
    artifact.finish()
    return artifact


def test_tau_is_given_or_measured_by_the_last_stage_that_could_or_assumed(tmp_path: Path) -> None:
    open_chain = {"calibrate": Artifact(tmp_path, "calibrate", {"stage": "calibrate", "format": 1})}
    assert plan.tau_of(open_chain, None) == (2.0, "assumed")
    assert plan.tau_of(open_chain, 3.0) == (3.0, "given")
    # Three rounds of 2, 0 and 4 accepted tokens; the last ended at a stop token and added none of the target's own.
    chain = {"calibrate": finished(tmp_path, "calibrate", accepted=[2, 0, 4], stopped=[False, False, True])}
    assert plan.tau_of(chain, None) == (pytest.approx(8 / 3), "measured")
    chain["evaluate"] = finished(tmp_path, "evaluate")
    records = [{"drafter": "dspark", "domain": None, "tau": 2.5}, {"drafter": "dspark", "domain": "math", "tau": 9.0},
               {"drafter": "prompt-lookup", "domain": None, "tau": 1.2}]  # fmt: skip
    (chain["evaluate"].path / "report.json").write_text(json.dumps({"records": records}), encoding="utf-8")
    assert plan.tau_of(chain, None) == (2.5, "measured")


def test_until_tau_is_known_its_usual_range_is_told() -> None:
    given = setting()
    found = plan.by_tau(given, RATES)
    assert list(found) == ["calibrate", "evaluate"]
    low, high = found["calibrate"].values()
    (planned,) = (one.cpu_seconds for one in predict(given, RATES) if one.stage == "calibrate")
    assert high < planned < low
    assert plan.by_tau(replace(given, tau_source="measured"), RATES) == {}
