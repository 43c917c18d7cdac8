"""What a run exports is what it trained, and evaluates the same when it comes back."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.artifact import read_json
from pipeline.config import Config
from pipeline.decoding.report import without_timings
from pipeline.draft.build import build_drafter
from pipeline.draft.io import load_drafter, save_drafter
from pipeline.errors import ConfigError
from pipeline.frozen import load_frozen
from pipeline.layouts import files, sidefiles
from pipeline.layouts.config_json import Origin
from pipeline.layouts.load import load_published
from pipeline.layouts.publish import Options, publish
from pipeline.stages import calibrate, evaluate, train
from tests.stages import whole_chain
from tests.stages.prepared import context_of, prepare


def _only(work_dir: Path, stage: str) -> Path:
    (manifest,) = work_dir.glob(f"{stage}/*/manifest.json")
    return manifest.parent


def test_finished_chain_exports_the_drafter_it_trained(finished: Path) -> None:
    trained, _ = load_drafter(_only(finished, "train") / "draft")
    folder = _only(finished, "export") / "speculators"
    assert files.hash_problems(folder, everything=True) == []
    loaded, meta = load_published(folder)
    assert loaded.config == trained.config and meta["steps"] == 20
    for name, tensor in trained.state_dict().items():
        stored = tensor.bfloat16().float() if tensor.is_floating_point() else tensor
        assert torch.equal(loaded.state_dict()[name], stored), name
    sts, sps = (json.loads((folder / name).read_text()) for name in ("sts-T1.json", "sps.json"))
    assert sidefiles.sts_problems(sts, block_size=trained.config.block_size) == []
    assert sidefiles.sps_problems(sps) == []
    card = (folder / "README.md").read_text()
    assert "prompt-lookup" in card and "vllm serve" in card and "ECE before" in card


def test_finished_chain_registers_its_export(finished: Path) -> None:
    """A version of the model named like the experiment: files in the run, card as description, tags back to the run."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{finished}/mlflow.db")
    folder = _only(finished, "export") / "speculators"
    (version,) = client.search_model_versions("name = 'debug'")
    run = client.get_run(version.run_id)
    assert run.data.tags["stage"] == "export" and version.source == f"{run.info.artifact_uri}/speculators"
    assert version.tags["folder"] == str(folder) and version.tags["artifact.train"] == _only(finished, "train").name
    assert version.description.startswith("# DSpark drafter for") and "vllm serve" in version.description
    sent = {Path(item.path).name for item in client.list_artifacts(version.run_id, "speculators")}
    assert sent == {path.name for path in folder.iterdir()}


@pytest.mark.case("EXP-05")
def test_last_step_is_kept_whatever_the_save_cadence(finished: Path, tmp_path: Path) -> None:
    """EXP-05: seven steps, saved every five: the drafter of step seven is there, and its folder is printed."""
    ignored = shutil.ignore_patterns("mlflow.db*", "mlartifacts")
    work_dir = shutil.copytree(finished, tmp_path / "work", symlinks=True, ignore=ignored)
    command = [sys.executable, "-m", "pipeline", "train", "-c", str(whole_chain.DEBUG), f"work_dir={work_dir}"]
    overrides = [*whole_chain.SMALLER, "tracking.enabled=false", "train.steps=7", "train.save_every=5"]
    run = subprocess.run(
        [*command, *overrides], cwd=whole_chain.ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    ended = [path.parent for path in work_dir.glob("train/*/manifest.json") if read_json(path)["steps"] == 7]
    assert len(ended) == 1 and str(ended[0]) in run.stdout
    assert load_drafter(ended[0] / "draft")[1]["steps"] == 7


def _report(config: Config) -> Any:
    """The report of a configuration's evaluation, without timings."""
    calibrate.run(context_of(config, "calibrate"))
    context = context_of(config, "evaluate")
    evaluate.run(context)
    return without_timings(read_json(context.artifact.path / "report.json"))


def _published(config: Config, folder: Path) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update={"published": str(folder)})})


def test_export_import_evaluate_gives_the_same_report(tmp_path: Path) -> None:
    """Out in float32 and back through `train.published`: same drafts, so the whole report is the same."""
    config = prepare(tmp_path / "work")
    before = _report(config)
    trained = context_of(config, "train")
    drafter, meta = load_drafter(trained.artifact.path / "draft")
    target = trained.target_path
    publish(
        tmp_path / "out", drafter, layout="speculators", frozen=load_frozen(target), origin=Origin(target, meta=meta),
        options=Options(dtype="float32"),
    )  # fmt: skip
    imported = _published(config, tmp_path / "out")
    context = context_of(imported, "train")
    assert context.inputs == {} and "tokens" not in context.chain
    train.run(context)
    assert load_drafter(context.artifact.path / "draft")[0].config == drafter.config
    assert context.artifact.manifest()["published"] == str(tmp_path / "out")
    after = _report(imported)
    assert after == before and before["records"][0]["num_rounds"] > 0


def test_checkpoint_of_another_target_is_refused(tmp_path: Path) -> None:
    config = prepare(tmp_path / "work")
    trained = context_of(config, "train")
    drafter, _ = load_drafter(trained.artifact.path / "draft")
    other = tmp_path / "other"
    other.mkdir()
    save_drafter(other, build_drafter(replace(drafter.config, target_vocab_size=310), seed=0), {})
    with pytest.raises(ConfigError, match="target_vocab_size is 310, the target has 300"):
        train.run(context_of(_published(config, other), "train"))
    with pytest.raises(ConfigError, match="no such checkpoint folder"):
        context_of(_published(config, tmp_path / "nowhere"), "train")


def test_checkpoint_of_a_target_of_the_same_shape_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing in its sizes gives it away, and it would only draft worse."""
    config = prepare(tmp_path / "work")
    trained = context_of(config, "train")
    drafter, meta = load_drafter(trained.artifact.path / "draft")
    mine = trained.artifact.request["target"]
    for name, target in (("mine", mine), ("other", {"sha256": "another"})):
        (tmp_path / name).mkdir()
        save_drafter(tmp_path / name, drafter, {**meta, "target": target})
        train.run(context_of(_published(config, tmp_path / name), "train"))
        told = capsys.readouterr()
        assert ("was trained for a target known as" in told.out + told.err) == (name == "other")


def test_another_checkpoint_under_the_same_path_is_another_artifact(tmp_path: Path) -> None:
    config = _published(prepare(tmp_path / "work"), tmp_path / "given")
    drafter, _ = load_drafter(context_of(prepare(tmp_path / "work"), "train").artifact.path / "draft")
    (tmp_path / "given").mkdir()
    found = []
    for seed in (1, 2):
        save_drafter(tmp_path / "given", build_drafter(drafter.config, seed=seed), {})
        found.append(context_of(config, "train").artifact.fingerprint)
    assert found[0] != found[1]
