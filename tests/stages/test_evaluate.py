"""The evaluate stage: report, errors, chat modes, resume, splits of the work."""

from __future__ import annotations

import json
import time

import pytest

from pipeline.artifact import read_json
from pipeline.chain import share
from pipeline.decoding.report import without_timings
from pipeline.errors import ConfigError
from pipeline.stages import calibrate, evaluate
from tests.ranks import run_ranks
from tests.stages.prepared import context_of, prepare


def finish(config):
    if not context_of(config, "calibrate").artifact.complete:
        calibrate.run(context_of(config, "calibrate"))
    context = context_of(config, "evaluate")
    evaluate.run(context)
    return context


def record_of(report, **wanted):
    (found,) = [r for r in report["records"] if all(r[key] == value for key, value in wanted.items())]
    return found


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """One work directory: evaluations that differ in evaluate settings only share everything before."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def evaluated(work):
    return finish(prepare(work))


def test_report_has_one_record_per_drafter_prompt_set_and_temperature(evaluated):
    report = read_json(evaluated.artifact.path / "report.json")
    for temperature in (0.0, 1.0):
        pooled = record_of(report, drafter="dspark", domain=None, temperature=temperature)
        parts = [
            record_of(report, drafter="dspark", domain=domain, temperature=temperature)
            for domain in ("apples", "counting")
        ]
        assert pooled["num_rounds"] == sum(part["num_rounds"] for part in parts)
        tokens = sum(part["tau"] * part["num_rounds"] for part in parts)
        assert pooled["tau"] == pytest.approx(tokens / pooled["num_rounds"]), "pooled, not a mean of means"
        assert pooled["num_prompts"] == 6 and pooled["error_rate"] == 0
        assert pooled["tokens_per_second"] > 0 and pooled["vanilla_tokens_per_second"] > 0
        assert record_of(report, drafter="prompt-lookup", domain=None, temperature=temperature)["num_rounds"] > 0
    lossless = record_of(report, drafter="dspark", domain=None, temperature=0.0)["lossless"]
    assert lossless["compared"] == 6 and lossless["faults"] == []
    assert (evaluated.artifact.path / "report.md").read_text().count("| dspark |") >= 6
    assert evaluated.artifact.complete


@pytest.mark.case("EVA-05")
def test_the_report_states_its_definition_and_prints_both_lengths(evaluated):
    report = read_json(evaluated.artifact.path / "report.json")
    assert "1 bonus" in report["definitions"]["tau"]
    record = record_of(report, drafter="dspark", domain=None, temperature=1.0)
    assert record["tau"] == pytest.approx(record["tau_draft_only"] + 1, abs=0.06)


def test_resumed_and_split_runs_give_the_same_report(evaluated, tmp_path, monkeypatch):
    config = prepare(tmp_path)
    calibrate.run(context_of(config, "calibrate"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        evaluate.run(context_of(config, "evaluate"))
    context = context_of(config, "evaluate")
    assert context.artifact.complete
    first, second = (read_json(one.artifact.path / "report.json") for one in (evaluated, context))
    assert without_timings(first) == without_timings(second)


def both_stages(folder):
    """What a rank of a launched job does; returns how many units it decoded itself."""
    config = prepare(folder)
    calibrate.run(context_of(config, "calibrate"))
    while not context_of(config, "calibrate").artifact.complete:
        time.sleep(0.1)
    context = context_of(config, "evaluate")
    evaluate.run(context)
    mine = share([unit["file"] for unit in context.artifact.manifest()["shards"]] if context.artifact.complete else [])
    return len(mine)


def test_two_real_ranks_share_the_units_and_count_each_prompt_once(evaluated, tmp_path):
    prepare(tmp_path)
    counts = run_ranks(both_stages, 2, tmp_path, timeout=120, needs=["pipeline.stages.evaluate"])
    artifact = context_of(prepare(tmp_path), "evaluate").artifact
    assert artifact.complete and max(counts) == 1, "two units, one each"
    first, second = (read_json(path / "report.json") for path in (evaluated.artifact.path, artifact.path))
    assert without_timings(first) == without_timings(second)


@pytest.mark.case("DAT-16")
@pytest.mark.case("EVA-06")
def test_another_chat_mode_is_refused_with_both_values(evaluated, work):
    config = prepare(work, "evaluate.bootstrap=51")
    changed = config.model_copy(update={"template": config.template.model_copy(update={"system_prompt": "Be brief."})})
    context = context_of(config, "evaluate")
    other = type(context)(changed, context.artifact, context.inputs, context.tracker, context.chain)
    with pytest.raises(ConfigError, match="system_prompt: None then, 'Be brief.' now"):
        evaluate.run(other)


@pytest.mark.case("EVA-09")
def test_a_failing_prompt_is_counted_not_dropped(work, tmp_path):
    lines = [{"turns": ["Count from 1 to 6."]}, {"turns": ["Hi " * 3000]}, {"turns": ["Count from 3 to 8."]}]
    file = tmp_path / "mixed.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    context = finish(prepare(work, f"evaluate.prompt_sets=[{file}]"))
    record = record_of(read_json(context.artifact.path / "report.json"), drafter="dspark", temperature=1.0)
    assert record["num_prompts"] == 3 and record["error_rate"] == pytest.approx(1 / 3)
    assert "prompt_too_long" in record["errors"][0]["error"]
    assert record["stop_rate"] + record["truncated_rate"] == pytest.approx(1.0)


@pytest.mark.case("EVA-10")
def test_several_prompt_sets_are_reported_apart_and_together(work, tmp_path):
    files = []
    for name in ("first", "second"):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"turns": [f"Count from {n} to 9.", "Go on."]}) + "\n" for n in range(3)))
        files.append(str(file))
    context = finish(prepare(work, f"evaluate.prompt_sets=[{', '.join(files)}]"))
    report = read_json(context.artifact.path / "report.json")
    parts = [record_of(report, drafter="dspark", prompts=file, temperature=0.0) for file in files]
    whole = record_of(report, drafter="dspark", prompts="all", domain=None, temperature=0.0)
    assert whole["num_prompts"] == 6 and whole["num_rounds"] == sum(part["num_rounds"] for part in parts)
    assert whole["num_answers"] == 12, "both turns are played"


@pytest.mark.case("CAL-05")
def test_prompts_that_were_calibrated_on_are_counted_and_stay(tmp_path, capsys):
    """The same questions under another name: the configuration cannot see that."""
    for name, texts in (("served", "abcd"), ("asked", "xaby")):
        lines = "".join(json.dumps({"turns": [f"Say {text}."]}) + "\n" for text in texts)
        (tmp_path / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    sets = [f"calibrate.prompt_sets=[{tmp_path}/served.jsonl]", f"evaluate.prompt_sets=[{tmp_path}/asked.jsonl]"]
    context = finish(prepare(tmp_path / "work", *sets, "evaluate.temperatures=[0]", "calibrate.temperatures=[0]"))
    shown = capsys.readouterr()
    assert f"2 of 4 prompts of {tmp_path}/asked.jsonl ask what calibrate asked, too" in shown.out + shown.err
    report = read_json(context.artifact.path / "report.json")
    assert record_of(report, drafter="dspark")["num_prompts"] == 4


def test_teacher_forced_acceptance_has_data_at_every_slot(evaluated):
    report = read_json(evaluated.artifact.path / "report.json")
    record = record_of(report, drafter="dspark", domain=None, temperature=1.0)
    assert min(record["teacher_forced_acceptance_n"]) > 0
    assert all(0 <= value <= 1 for value in record["teacher_forced_acceptance"])


def test_the_lab_names_its_table_and_leaves_its_figures(evaluated):
    lab = read_json(evaluated.artifact.path / "lab.json")
    assert lab["sps_source"] == "synthetic: sqrt" and set(lab["temperatures"]) == {"T0", "T1"}
    policies = {row["policy"] for row in lab["temperatures"]["T1"]["rows"]}
    assert {"static_0", "static_4", "early_stop", "lagged_global"} <= policies
    for name in ("acceptance", "lab-T0", "lab-T1", "thresholds"):
        assert (evaluated.artifact.path / f"plots/{name}.png").stat().st_size > 1000
    assert "synthetic: sqrt" in (evaluated.artifact.path / "report.md").read_text()


@pytest.mark.parametrize("policy", ["early_stop", "lagged_global", "static_length", "static_threshold"])
def test_every_policy_runs_live_and_keeps_greedy_outputs(work, policy):
    config = prepare(
        work, f"evaluate.policy={policy}", "evaluate.policy_length=2", "evaluate.policy_threshold=0.3",
        "evaluate.temperatures=[0.0]", "evaluate.lookup=false",
    )  # fmt: skip
    report = read_json(finish(config).artifact.path / "report.json")
    record = record_of(report, drafter="dspark", domain=None)
    assert record["policy"] == policy and record["scheduled_per_round"] < 4
    assert record["lossless"]["faults"] == [] and record["lossless"]["compared"] == 6
    assert report.get("sps_source") == ("synthetic: sqrt" if policy in ("early_stop", "lagged_global") else None)
