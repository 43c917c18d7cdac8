"""Checkpoints: whole or not there, checked at save and load."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.errors import ArtifactError
from pipeline.training import checkpoint
from pipeline.training.checkpoint import Saver, random_state, restore_random
from pipeline.training.state import MOMENTS, Snapshot

SHAPES = {"a": [3, 2], "b": [1]}


def snapshot(step: int, **shapes: list[int]) -> Snapshot:
    def tensors(offset: float) -> dict[str, torch.Tensor]:
        return {name: torch.full(shape, offset + step) for name, shape in {**SHAPES, **shapes}.items()}

    return Snapshot(tensors(0), {kind: tensors(0.5) for kind in MOMENTS}, {"step": step})


def saved(root: Path, *steps: int, keep: int = 2) -> None:
    saver = Saver(root, keep, SHAPES)
    for step in steps:
        saver.submit(snapshot(step))
    saver.close()


def test_what_was_saved_comes_back_and_old_ones_go(tmp_path: Path) -> None:
    saved(tmp_path, 5, 10, 15)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000010", "step-000015"]
    folder = checkpoint.latest(tmp_path)
    assert folder is not None and folder.name == "step-000015"
    found = checkpoint.load(folder)
    assert found.step == 15 and torch.equal(found.moments["exp_avg"]["a"], snapshot(15).moments["exp_avg"]["a"])


@pytest.mark.case("DST-03")
def test_a_cut_save_is_ignored_and_cleaned(tmp_path: Path) -> None:
    """What a kill leaves behind is a temporary folder, or a whole one that `latest` does not name yet."""
    saved(tmp_path, 5)
    half = tmp_path / ".tmp" / "host.1.step-000010"
    half.mkdir(parents=True)
    (half / "weights.safetensors").write_bytes(b"cut")
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000005"
    saved(tmp_path, 10)
    assert not half.exists() and checkpoint.latest(tmp_path) == tmp_path / "step-000010"


@pytest.mark.case("DST-03")
def test_a_save_that_fails_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 5)

    def broken(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    saver = Saver(tmp_path, 2, SHAPES)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", broken)
        saver.submit(snapshot(10))
        with pytest.raises(Exception, match="cannot be written"):
            saver.close()
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000005"


@pytest.mark.case("DST-07")
@pytest.mark.case("DST-08")
def test_empty_or_wrong_tensors_are_refused_before_saving_and_at_loading(tmp_path: Path) -> None:
    """Sharded engines hand out tensors of size 0 when nothing is gathered."""
    saver = Saver(tmp_path, 2, SHAPES)
    with pytest.raises(ArtifactError, match=r"a: shape \[0\], expected \[3, 2\]"):
        saver.submit(snapshot(5, a=[0]))
    saver.close()
    saved(tmp_path, 5)
    state = tmp_path / "step-000005" / "state.json"
    facts = json.loads(state.read_text())
    state.write_text(json.dumps({**facts, "shapes": {**SHAPES, "c": [1]}}))
    with pytest.raises(ArtifactError, match="c: missing"):
        checkpoint.load(tmp_path / "step-000005")
    (tmp_path / "step-000005" / "exp_avg.safetensors").write_bytes(b"\0" * 20)
    state.write_text(json.dumps(facts))
    with pytest.raises(ArtifactError, match="exp_avg.safetensors: cannot be read"):
        checkpoint.load(tmp_path / "step-000005")


@pytest.mark.case("DST-06")
def test_every_random_generator_comes_back() -> None:
    torch.manual_seed(3)
    random.seed(4)
    np.random.seed(5)

    def draw() -> list[float]:
        return [torch.rand(1).item(), random.random(), float(np.random.rand()), random.gauss(0, 1)]

    draw()
    state = json.loads(json.dumps(random_state()))
    first = draw()
    draw()
    restore_random(state)
    assert draw() == first


@pytest.mark.case("DST-03")
def test_without_latest_the_newest_whole_one_counts(tmp_path: Path) -> None:
    """Copied by hand, or killed between the rename and `latest`: nothing that is whole is thrown away."""
    saved(tmp_path, 5, 10)
    (tmp_path / "latest").unlink()
    (tmp_path / "step-000015").mkdir()
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000010"
    (tmp_path / "latest").write_text("step-000007\n")
    with pytest.raises(ArtifactError, match=r"'step-000007', which is not there; point it at one of .*step-000010"):
        checkpoint.latest(tmp_path)
    assert checkpoint.latest(tmp_path / "nowhere") is None


def test_retention_never_removes_what_latest_names(tmp_path: Path) -> None:
    """Somebody went back to step 5; what came after it is gone once step 6 is in force."""
    saved(tmp_path, 5, 10, 999_999, 1_000_000, keep=4)
    (tmp_path / "latest").write_text("step-000005\n")
    saved(tmp_path, 6, keep=1)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000006"
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000006"]
