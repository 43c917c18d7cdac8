"""The calibrate stage, and the file it writes: bound to what it was made for."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from pipeline.artifact import read_json, sha256_file, write_json
from pipeline.chain import resolve
from pipeline.config import load
from pipeline.corpus.demo import demo_rows
from pipeline.decoding.calibration import calibrate as calibrate_file
from pipeline.decoding.calibration import drift, halves, read_calibration, read_records
from pipeline.decoding.recorded import read_shard
from pipeline.errors import ArtifactError, DataError
from pipeline.runner import run_chain
from pipeline.stages import calibrate, evaluate
from tests.conftest import ROOT
from tests.stages.prepared import context_of, prepare


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    context = context_of(prepare(tmp_path_factory.mktemp("work")), "calibrate")
    calibrate.run(context)
    return context


def test_one_file_per_served_temperature_with_the_serving_keys(calibrated):
    for name, temperature in (("T0", 0.0), ("T1", 1.0)):
        found = read_json(calibrated.artifact.path / f"sts-{name}.json")
        assert found["temperature"] == temperature and len(found["temperatures"]) == 4
        assert all(value > 0 for value in found["temperatures"]) and found["num_samples"] > 0
        assert len(found["ece_before"]) == len(found["ece_after"]) == 4
        assert (calibrated.artifact.path / f"plots/reliability-{name}.png").stat().st_size > 1000
    records, prompt, header = read_records(calibrated.artifact.path / "records-T1.npz")
    assert header["threshold"] == 0.0 and len(header["prompts"]) == 8
    assert len(records) == len(prompt) and int(prompt.max()) == 7
    assert calibrated.artifact.complete


def test_prompt_sets_of_your_own_take_the_place_of_the_split(tmp_path):
    files = [tmp_path / "served.jsonl", tmp_path / "more.jsonl"]
    for file in files:
        file.write_text("".join(json.dumps({"turns": [f"{file.stem} {n}"]}) + "\n" for n in range(2)), encoding="utf-8")
    config = prepare(tmp_path / "work", f"calibrate.prompt_sets=[{', '.join(map(str, files))}]")
    context = context_of(config, "calibrate")
    calibrate.run(context)
    _, _, header = read_records(context.artifact.path / "records-T0.npz")
    domains = [domain for _, domain, _ in header["prompts"]]
    assert sorted(domains) == ["more", "more", "served", "served"]
    before = {name: artifact.path for name, artifact in resolve(config).items()}
    files[0].write_text('{"turns": ["another"]}\n', encoding="utf-8")
    after = {name: artifact.path for name, artifact in resolve(config).items()}
    assert {stage for stage in before if before[stage] != after[stage]} == {"calibrate", "evaluate", "export"}


def test_what_the_prompt_sets_are_and_their_order_are_part_of_the_artifact(tmp_path):
    file, other = tmp_path / "served.jsonl", tmp_path / "other.jsonl"
    file.write_text('{"turns": ["one"]}\n{"turns": ["two"]}\n', encoding="utf-8")
    other.write_text('{"turns": ["three"]}\n', encoding="utf-8")
    orders = ([file], [file, other], [other, file], [other])
    words = [f"calibrate.prompt_sets=[{', '.join(map(str, names))}]" for names in orders]
    paths = {
        resolve(load(ROOT / "configs" / "debug.yaml", [f"work_dir={tmp_path}", word]))["calibrate"].path
        for word in words
    }
    assert len(paths) == len(orders)


@pytest.mark.case("CAL-05")
def test_s25_a_question_asked_twice_is_not_fitted_on_and_reported_on(tmp_path, capsys):
    file = tmp_path / "served.jsonl"
    file.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in "abcab"), encoding="utf-8")
    context = context_of(prepare(tmp_path / "work", f"calibrate.prompt_sets=[{file}]"), "calibrate")
    calibrate.run(context)
    _, _, header = read_records(context.artifact.path / "records-T0.npz")
    assert [name for name, _, _ in header["prompts"]] == ["served-00001", "served-00002", "served-00003"]
    assert "2 of 5 prompts ask what another one asks" in capsys.readouterr().out


def test_s25_fit_and_report_prompts_are_disjoint_and_hold_all_domains():
    fit, report = halves(["a", "b", "a", "a", "b", "c", "b"])
    assert (fit, report) == ([0, 1, 3, 5, 6], [2, 4])
    assert not set(fit) & set(report)


@pytest.mark.case("CAL-02")
@pytest.mark.parametrize("change", [{"threshold": 0.5}, {"policy": "early_stop"}, {"calibrated": True}])
def test_records_made_on_cut_blocks_are_refused(tmp_path, change):
    header = {"threshold": 0.0, "policy": "full", "calibrated": False, "prompts": [], **change}
    path = tmp_path / "records.npz"
    np.savez(
        path, header=np.array(json.dumps(header)), logits=np.zeros((2, 3), np.float32), accepted=np.array([1, 2]),
        stopped=np.array([False, False]), prompt=np.array([0, 1]),
    )  # fmt: skip
    with pytest.raises(DataError, match=next(iter(change))):
        calibrate_file(path, bins=15)


@pytest.mark.case("CAL-05")
def test_a_domain_made_worse_is_named(tmp_path):
    """Two domains with opposite bias: what fits their mixture hurts the one that needed the opposite."""
    generator = torch.Generator().manual_seed(0)
    n = 4000
    z = torch.randn(2 * n, 1, generator=generator) + 0.5
    truth = torch.cat([torch.full((n, 1), 0.4), torch.full((n, 1), 3.0)])
    keep = torch.cat([torch.arange(n), n + torch.arange(n // 10)])
    accepted = (torch.rand(z.shape, generator=generator) < torch.sigmoid(z / truth)).long().sum(1)
    prompts = [[f"p{i}", "math" if i < 40 else "chat", None] for i in range(80)]
    header = {
        "threshold": 0.0, "policy": "full", "calibrated": False, "prompts": prompts, "temperature": 1.0,
        "checkpoint": "c", "block_size": 1, "layout": "next_token",
    }  # fmt: skip
    path = tmp_path / "records.npz"
    np.savez(
        path, header=np.array(json.dumps(header)), logits=z[keep].numpy(), accepted=accepted[keep].numpy(),
        stopped=np.zeros(len(keep), bool), prompt=(torch.arange(2 * n) * 80 // (2 * n))[keep].numpy(),
    )  # fmt: skip
    found = calibrate_file(path, bins=15)
    assert len(found["warnings"]) == 1 and found["warnings"][0].startswith("chat: mean ECE")
    assert found["report"]["math"]["ece_after"][0] < found["report"]["math"]["ece_before"][0]
    assert drift({"x": {"ece_before": [None], "ece_after": [None]}}) == []


@pytest.mark.case("CAL-06")
@pytest.mark.parametrize(
    "change", [{"checkpoint": "other"}, {"block_size": 5}, {"layout": "fill_in"}, {"temperature": 0.7}]
)
def test_a_calibration_of_something_else_is_refused(tmp_path, change):
    data = {
        "checkpoint": "mine", "block_size": 4, "layout": "next_token", "temperature": 1.0,
        "temperatures": [1.0, 1.0, 1.0, 1.0],
    }  # fmt: skip
    path = tmp_path / "sts-T1.json"
    expected = {key: value for key, value in data.items() if key != "temperatures"}
    write_json(path, data)
    assert read_calibration(path, expected)["temperatures"] == [1.0] * 4
    write_json(path, {**data, **change})
    with pytest.raises(ArtifactError, match=next(iter(change))):
        read_calibration(path, expected)


@pytest.mark.case("CAL-06")
def test_evaluation_refuses_the_calibration_of_another_drafter(tmp_path):
    config = prepare(tmp_path / "work", "evaluate.policy=early_stop")
    calibrate.run(context_of(config, "calibrate"))
    context = context_of(config, "evaluate")
    file = context.inputs["calibrate"].path / "sts-T1.json"
    assert read_json(file)["checkpoint"] == sha256_file(context.inputs["train"].path / "draft" / "draft.safetensors")
    write_json(file, {**read_json(file), "checkpoint": "0" * 64})
    with pytest.raises(ArtifactError, match="made for another drafter"):
        evaluate.run(context)


def test_a_drafter_without_a_confidence_head_has_nothing_to_calibrate(tmp_path):
    context = context_of(
        prepare(tmp_path / "work", "draft.kind=dflash", "draft.markov=none", "draft.confidence=false"), "calibrate"
    )
    calibrate.run(context)
    assert context.artifact.manifest()["calibrated"] is False


def test_ranks_share_the_chunks_and_get_the_same_files(calibrated, tmp_path, monkeypatch):
    config = prepare(tmp_path / "work")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        calibrate.run(context_of(config, "calibrate"))
    artifact = context_of(config, "calibrate").artifact
    for fact in calibrated.artifact.manifest()["files"]:
        assert sha256_file(artifact.path / fact["file"]) == fact["sha256"], fact["file"]


def shard(path, n, seed, **extra):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, 4, generator=generator)
    mask = (torch.rand(n, 4, generator=generator) < torch.sigmoid(logits / 2)).long().cumprod(1).bool()
    torch.save({"logits": logits, "prefix_mask": mask, **extra}, path)


def test_shards_recorded_by_sglang_are_fitted(tmp_path):
    for number in range(2):
        shard(tmp_path / f"stem.0.{number}.pt", 3000, number)
    config = prepare(
        tmp_path / "work", f"calibrate.records={tmp_path}/stem.*.pt", "calibrate.temperatures=[1.0]",
    )  # fmt: skip
    context = context_of(config, "calibrate")
    calibrate.run(context)
    found = read_json(context.artifact.path / "sts-T1.json")
    assert found["num_samples"] == 3000 and found["temperatures"][0] == pytest.approx(2.0, rel=0.2)
    assert found["ece_after"][0] < found["ece_before"][0]
    assert found["dataset"] == "recorded by SGLang"


@pytest.mark.case("CAL-02")
@pytest.mark.parametrize(
    ("extra", "message"),
    [({"threshold": 0.5}, "threshold"), ({"threshold": torch.tensor([0.0, 0.5])}, "threshold"),
     ({"prefix_mask": torch.tensor([[0, 1, 0, 0]]).expand(9, 4)}, "after a rejected"),
     ({"logits": torch.zeros(9, 5)}, "block size"), ({"prefix_mask": None}, "not a shard")],
)  # fmt: skip
def test_foreign_or_thresholded_shards_are_refused(tmp_path, extra, message):
    shard(tmp_path / "stem.0.0.pt", 9, 0, **extra)
    with pytest.raises(DataError, match=message):
        read_shard(tmp_path / "stem.0.0.pt", 4)


@pytest.mark.parametrize("content", [b"", b"hello", torch.zeros(3), [1, 2], {"logits": 3}], ids=repr)
def test_a_file_that_is_something_else_is_no_shard(tmp_path, content):
    path = tmp_path / "stem.0.0.pt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(DataError, match="not a shard"):
        read_shard(path, 4)


@pytest.mark.prove
def test_on_report_prompts_the_demo_drafters_scores_are_better_calibrated(proof, tmp_path):
    """S24, S25: with enough records, mean ECE falls on prompts that were neither trained on nor fitted."""
    if not proof.full or not list((ROOT / "work").glob("train/*/manifest.json")):
        pytest.skip(f"decodes 630 prompts with the drafter of `make run` below {ROOT / 'work'}: part of `make prove`")
    prompts = tmp_path / "fresh.jsonl"
    with prompts.open("w", encoding="utf-8") as lines:
        for name, start, count in (("gsm_symbolic", 2000, 230), ("codeio", 300, 200), ("chatterbot", 260, 200)):
            for row in demo_rows(name, start=start, stop=start + count, seed=0):
                turns = [turn["value"] for turn in row["conversations"] if turn["from"] == "human"][:2]
                lines.write(json.dumps({"domain": name, "turns": turns}) + "\n")
    words = [f"calibrate.prompt_sets=[{prompts}]", "calibrate.num_prompts=630", "calibrate.max_new_tokens=96"]
    config = load(ROOT / "configs" / "smollm2.yaml", [*words, "tracking.enabled=false"])
    found = run_chain(config, ["calibrate"])["calibrate"].manifest()["ece"]
    for name, ece in found.items():
        low, high = ece["change_interval"]
        proof.note(f"mean ECE at {name}", f"{ece['before']:.4f} -> {ece['after']:.4f} ({low:+.4f} ... {high:+.4f})")
        assert ece["after"] < ece["before"]
    assert set(found) == {"T0", "T1"}
