"""Checkpoints written in parts: from engine to engine, damaged, and on a full disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.errors import ArtifactError, StorageError
from pipeline.training import checkpoint
from pipeline.training.state import MOMENTS
from tests.distributed.test_train_engines import NEEDS, close
from tests.distributed.training import STEPS, steps
from tests.ranks import run_ranks


def _run(engine: str, folder: str, stop: int, sharded: bool, hook: str = "") -> Any:
    return steps(engine, folder, stop, hook=hook, sharded_checkpoints=sharded)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


# (engine, ranks, last step, sharded): every form is read by an engine that writes another one, on other ranks.
RELAY = [
    ("fsdp2", 2, 2, True), ("single", 1, 4, True), ("ddp", 2, 6, True), ("zero3", 2, 8, False), ("fsdp2", 2, 10, True),
    ("zero2", 2, 11, False), ("fsdp2", 1, STEPS, True),
]  # fmt: skip


@pytest.mark.case("DST-10")
def test_a_run_is_handed_on_in_parts_and_whole(tmp_path: Path) -> None:
    lines, weights = run_ranks(_run, 1, "single", str(tmp_path / "alone"), STEPS, False, needs=NEEDS)[0]
    found: list[dict[str, float]] = []
    for engine, world, stop, sharded in RELAY:
        found += run_ranks(_run, world, engine, str(tmp_path), stop, sharded, needs=NEEDS)[0][0]
        folder = tmp_path / "checkpoints" / f"step-{stop:06d}"
        assert (folder / "sharded").is_dir() is sharded
    close(found, lines, 1e-4)
    last = checkpoint.load(folder).weights
    assert all((last[name] - value).norm() <= 1e-4 * value.norm() for name, value in weights.items())
    assert names(tmp_path / "checkpoints") == [".tmp", "best", "latest", "step-000011", "step-000012"]


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks' parts."""
    folder = tmp_path_factory.mktemp("spread")
    run_ranks(_run, 2, "fsdp2", str(folder), 1, True, needs=NEEDS)
    return folder / "checkpoints" / "step-000001"


DAMAGE = {
    "a lost part": (lambda parts: (parts / "__1_0.distcp").unlink(), "__1_0.distcp"),
    "a cut part": (lambda parts: (parts / "__0_0.distcp").write_bytes(b"cut"), "cannot be read"),
    "no metadata": (lambda parts: (parts / ".metadata").unlink(), "cannot be read"),
    "cut metadata": (lambda parts: (parts / ".metadata").write_bytes(b"cut"), "cannot be read"),
}


@pytest.mark.case("DST-08")
@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_parts_are_named(what: str, spread: Path, tmp_path: Path) -> None:
    damage, message = DAMAGE[what]
    folder = tmp_path / spread.name
    shutil.copytree(spread, folder)
    damage(folder / "sharded")
    with pytest.raises(ArtifactError, match=f"{folder / 'sharded'}.*{message}.*remove this one and `latest`"):
        checkpoint.load(folder)


@pytest.mark.case("DST-08")
def test_parts_of_other_shapes_are_refused(spread: Path, tmp_path: Path) -> None:
    folder = tmp_path / spread.name
    shutil.copytree(spread, folder)
    state = json.loads((folder / "state.json").read_text())
    first, second, *_ = state["shapes"]
    state["shapes"] |= {first: [3, 3], "new": [1]}
    del state["shapes"][second]
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(ArtifactError) as error:
        checkpoint.load(folder)
    for text in (f"{first}: shape", "expected [3, 3]", "new: missing", f"{second}: unexpected"):
        assert text in str(error.value)


@pytest.mark.case("DST-03")
@pytest.mark.parametrize("hook", ["fill_disk:1", "fill_disk_in_a_part:1"])
def test_a_disk_that_is_full_for_one_rank_ends_all_and_keeps_the_save_before(hook: str, tmp_path: Path) -> None:
    results = run_ranks(_run, 2, "fsdp2", str(tmp_path), STEPS, True, hook, needs=NEEDS, catch=True)
    assert [type(result) for result in results] == [StorageError, StorageError]
    assert "rank 1" in str(results[0]) and "No space left" in str(results[0])
    found = checkpoint.latest(tmp_path / "checkpoints")
    assert found is not None and checkpoint.load(found).step == 3
    lines = run_ranks(_run, 2, "fsdp2", str(tmp_path), 6, True, needs=NEEDS)[0][0]
    assert len(lines) == 3 and names(tmp_path / "checkpoints")[-2:] == ["step-000003", "step-000006"]


def test_training_goes_on_while_parts_are_written(tmp_path: Path) -> None:
    """Held back until two steps later, a save still is that of its own step, and `latest` names the one before."""
    for name, sharded, hook in (("whole", False, ""), ("parts", True, "hold_parts:5")):
        run_ranks(_run, 2, "fsdp2", str(tmp_path / name), 6, sharded, hook, needs=NEEDS)
    whole, parts = (checkpoint.load(tmp_path / name / "checkpoints" / "step-000003") for name in ("whole", "parts"))
    for found, wanted in ((parts.weights, whole.weights), *((parts.moments[k], whole.moments[k]) for k in MOMENTS)):
        assert all(torch.equal(value, found[name]) for name, value in wanted.items())


def test_a_left_part_of_a_killed_save_is_removed(spread: Path, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    shutil.copytree(spread.parent, root)
    half = root / ".tmp" / "elsewhere.7.step-000002"
    shutil.copytree(spread, half)
    lines = run_ranks(_run, 1, "single", str(tmp_path), 2, True, needs=NEEDS)[0][0]
    assert len(lines) == 1 and not half.exists() and torch.isfinite(torch.tensor(lines[0]["loss"]))
