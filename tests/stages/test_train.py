"""The train stage: what it goes on from, what it refuses, what it leaves."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline import stopping
from pipeline.artifact import Artifact
from pipeline.chain import resolve
from pipeline.config import Config
from pipeline.errors import ArtifactError, ConfigError, DataError, Stopped
from pipeline.runner import run_stage
from pipeline.training import checkpoint
from pipeline.training.journal import read
from pipeline.training.recentre import BIAS, bias_step
from tests.stages.token_rows import prepare

RECIPE = (
    "train.steps=6", "train.global_batch_size=4", "train.num_anchors=8", "train.validate_every=3", "train.save_every=2",
    "draft.init=random", "draft.markov_rank=4", "tracking.enabled=false",
)  # fmt: skip

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Artifact]:
    """A work directory with targets and one finished run."""
    work_dir = tmp_path_factory.mktemp("train")
    return work_dir, trained(prepare(work_dir, *RECIPE))


def trained(config: Config) -> Artifact:
    for stage in ("targets", "train"):
        run_stage(config, stage, resolve(config))
    return resolve(config)["train"]


def weights(artifact: Artifact) -> dict[str, torch.Tensor]:
    return load_file(artifact.path / "draft" / "draft.safetensors")


def losses(artifact: Artifact, split: str = "train") -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read(artifact.path / "metrics.jsonl") if line["split"] == split}


def test_a_finished_run_is_whole_and_never_trained_again(base: tuple[Path, Artifact]) -> None:
    work_dir, artifact = base
    manifest = artifact.manifest()
    assert artifact.verify() == [] and manifest["steps"] == 6 and not (artifact.path / "lease.json").exists()
    assert {fact["file"] for fact in manifest["files"]} >= {"draft/draft.safetensors", "draft/draft.json"}
    assert list(losses(artifact)) == [1, 2, 3, 4, 5, 6] and list(losses(artifact, "validation")) == [3, 6]
    assert (artifact.path / "plots" / "loss.png").stat().st_size > 1000
    before = (artifact.path / "draft" / "draft.safetensors").stat().st_mtime_ns
    assert trained(prepare(work_dir, *RECIPE, "train.save_every=1")).path == artifact.path
    assert (artifact.path / "draft" / "draft.safetensors").stat().st_mtime_ns == before


def test_the_published_confidence_is_centred_on_the_held_out_rows_and_nothing_else_moves(
    base: tuple[Path, Artifact],
) -> None:
    """Training rows flatter a drafter: its head's bias moves by one Newton step on rows it has not seen (S19)."""
    work_dir, artifact = base
    plain = trained(prepare(work_dir, *RECIPE, "train.recentre_confidence=false"))
    (last,) = [
        line for line in read(plain.path / "metrics.jsonl") if (line["step"], line["split"]) == (6, "validation")
    ]
    step = -last["confidence_gap"] / last["confidence_spread"]
    assert abs(step) < 1
    before, after = weights(plain), weights(artifact)
    assert abs(step) > 1e-3 and artifact.manifest()["confidence_moved"] == pytest.approx(step)
    moved = after.pop(BIAS) - before.pop(BIAS)
    assert float(moved) == pytest.approx(step, rel=1e-4)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_without_held_out_rows_or_a_confidence_head_no_bias_moves(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = [
        {"step": 3, "split": "validation", "confidence_gap": 0.1, "confidence_spread": 0.2},
        {"step": 6, "split": "train", "confidence_gap": 0.1, "confidence_spread": 0.2},
        {"step": 8, "split": "validation", "loss": 1.0},
        {"step": 9, "split": "validation", "confidence_gap": -0.9, "confidence_spread": 1e-6},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert [bias_step(file, step) for step in (3, 6, 8, 9)] == [-0.5, 0.0, 0.0, 1.0]


@pytest.mark.case("DST-05")
def test_a_stopped_run_ends_in_the_same_weights(base: tuple[Path, Artifact], tmp_path: Path) -> None:
    """A time limit stops it after each step, before its validation; the same command again, until it is done."""
    config = prepare(tmp_path, *RECIPE)
    run_stage(config, "targets", resolve(config))
    stops = 0
    while True:
        try:
            stopping.install((), stop_after_seconds=0)
            artifact = trained(config)
            break
        except Stopped as stop:
            stops += 1
            found = resolve(config)["train"].path
            assert "time limit" in str(stop)
            assert json.loads((found / "stopped.json").read_text())["reason"] == str(stop)
        finally:
            stopping.install(())
    assert stops == 6, "also before the validation of the last step"
    assert all(torch.equal(value, weights(artifact)[name]) for name, value in weights(base[1]).items())
    assert (artifact.path / "metrics.jsonl").read_text() == (base[1].path / "metrics.jsonl").read_text()


def test_more_steps_extend_a_finished_run(base: tuple[Path, Artifact]) -> None:
    """`continue_from`: weights, moments, step and data order go on; the learning rate warms up and decays anew."""
    work_dir, first = base
    longer = ("train.steps=10", f"train.continue_from={first.fingerprint}", "train.warmup_fraction=0.5")
    artifact = trained(prepare(work_dir, *RECIPE, *longer))
    assert artifact.path != first.path and list(losses(artifact)) == [7, 8, 9, 10]
    rates = [line["learning_rate"] for line in read(artifact.path / "metrics.jsonl") if line["split"] == "train"]
    assert rates == pytest.approx([2e-3, 4e-3, 2e-3, 0.0])
    start = checkpoint.load(first.path / "checkpoints" / "step-000006")
    moved = checkpoint.load(artifact.path / "checkpoints" / "step-000010")
    assert moved.step == 10 and not torch.equal(
        start.moments["exp_avg"]["fc.weight"], moved.moments["exp_avg"]["fc.weight"]
    )
    with pytest.raises(ConfigError, match="not a finished train artifact"):
        trained(prepare(work_dir, *RECIPE, "train.steps=10", "train.continue_from=nowhere"))
    with pytest.raises(ConfigError, match=r"train.steps is 5.*step 6"):
        trained(prepare(work_dir, *RECIPE, "train.steps=5", f"train.continue_from={first.path}"))


def test_a_run_may_start_from_another_ones_weights(base: tuple[Path, Artifact]) -> None:
    """`init_from`: weights only; step, moments and schedule begin anew."""
    work_dir, first = base
    artifact = trained(prepare(work_dir, *RECIPE, "train.steps=1", f"train.init_from={first.path / 'draft'}"))
    assert losses(artifact)[1] < losses(first)[1] and list(losses(artifact)) == [1]


def interrupted(work_dir: Path, *overrides: str) -> tuple[Config, Path]:
    """A run with a checkpoint after its first step, stopped there; its state.json."""
    config = prepare(work_dir, *RECIPE, *overrides)
    run_stage(config, "targets", resolve(config))
    try:
        stopping.install((), stop_after_seconds=0)
        with pytest.raises(Stopped):
            trained(config)
    finally:
        stopping.install(())
    return config, resolve(config)["train"].path / "checkpoints" / "step-000001" / "state.json"


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.case("DST-07")
def test_a_checkpoint_of_another_run_or_another_target_is_refused(base: tuple[Path, Artifact], tmp_path: Path) -> None:
    config, state = interrupted(tmp_path)
    frozen = json.loads(state.read_text())["frozen"]
    edit(state, frozen="0" * 16)
    with pytest.raises(ArtifactError, match="embedding or head changed"):
        trained(config)
    edit(state, frozen=frozen, fingerprint="other")
    with pytest.raises(ArtifactError, match="belongs to run other"):
        trained(config)


@pytest.mark.case("TOK-09")
def test_the_checkpoints_vocabulary_wins_after_a_resume(tmp_path: Path) -> None:
    """S30: labels and tables follow the map the weights were trained with, not one counted anew."""
    config, state = interrupted(tmp_path, "draft.vocabulary=40")
    ids = json.loads(state.read_text())["token_ids"]
    other = sorted({*ids[:-1], next(token for token in range(319, 0, -1) if token not in ids)})
    edit(state, token_ids=other)
    found = weights(trained(config))
    assert (found["d2t"] + torch.arange(40)).tolist() == other != ids


def test_two_runs_never_write_one_artifact(base: tuple[Path, Artifact], tmp_path: Path) -> None:
    config, state = interrupted(tmp_path)
    lease = resolve(config)["train"].path / "lease.json"
    assert not lease.exists()
    lease.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getppid(), "start": 0}))
    with pytest.raises(ArtifactError, match=f"process {os.getppid()} on "):
        trained(config)
    lease.write_text(json.dumps({"host": socket.gethostname(), "pid": 2**22 + 3, "start": 0}))
    assert trained(config).complete


@pytest.mark.case("LDR-12")
def test_nothing_to_train_on_is_said_before_the_first_step(base: tuple[Path, Artifact]) -> None:
    with pytest.raises(DataError, match="0 usable samples of 24: 24 are held out by train.validation_fraction"):
        trained(prepare(base[0], *RECIPE, "train.validation_fraction=0.9999999"))


@pytest.mark.case("DEP-02")
def test_training_on_one_device_imports_no_deepspeed(base: tuple[Path, Artifact]) -> None:
    program = f"from tests.stages.test_train import _modules; assert _modules({str(base[0])!r}) == []"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _modules(work_dir: str) -> list[str]:
    trained(prepare(Path(work_dir), *RECIPE, "train.steps=2"))
    return [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]
