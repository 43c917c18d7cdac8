"""Which step is kept as the best one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.training import recorder
from pipeline.training.journal import METRICS, Journal, read
from pipeline.training.recorder import Recorder
from pipeline.training.state import MOMENTS, Snapshot


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One rank whose only weight is what `engine.value` says."""
    ranks = SimpleNamespace(rank=0, engine="single", gather=lambda value: [value], first=lambda value: value)
    made = SimpleNamespace(ranks=ranks, value=0.0)

    def gather(engine: Any, kinds: Any) -> Snapshot:
        weight = {"w": torch.tensor([engine.value])}
        return Snapshot(weight, {kind: dict(weight) for kind in MOMENTS})

    monkeypatch.setattr(recorder, "gather", gather)
    return made


def validated(engine: Any, folder: Path, start: int, losses: dict[int, float]) -> dict[str, Any]:
    """What a run from `start` on calls its best after these validations."""
    made = Recorder(engine, folder, start=start, keep=2, shapes={"w": [1]})
    for step, loss in losses.items():
        engine.value = float(step)
        made.validated(step, {"loss": loss})
    made.close()
    return made.best


def test_the_lowest_validation_loss_is_kept_the_earlier_of_equals(engine: Any, tmp_path: Path) -> None:
    best = validated(engine, tmp_path, 0, {3: 2.0, 6: 1.0, 9: 1.5, 12: 1.0, 15: float("nan")})
    assert best == {"step": 6, "loss": 1.0}
    folder = tmp_path / "checkpoints" / "best"
    assert json.loads((folder / "best.json").read_text()) == best
    assert load_file(folder / "weights.safetensors")["w"].item() == 6.0


def test_a_validation_that_a_stop_has_left_is_recorded_once(tmp_path: Path) -> None:
    """A kill may fall between its row and the checkpoint that says it is done: it is done again."""
    journal = Journal(tmp_path, 0)
    for step, split in ((3, "train"), (3, "validation"), (6, "train"), (6, "validation"), (7, "train")):
        journal.write(METRICS, {"step": step, "split": split})
    journal.close()
    for validated, count in ((True, 4), (False, 3)):
        Journal(tmp_path, 6, validated=validated).close()
        assert len(list(read(tmp_path / METRICS))) == count


def test_a_resumed_run_knows_the_best_before_it_and_forgets_one_after_it(engine: Any, tmp_path: Path) -> None:
    validated(engine, tmp_path, 0, {3: 2.0, 6: 1.0})
    assert validated(engine, tmp_path, 7, {9: 1.5}) == {"step": 6, "loss": 1.0}
    assert validated(engine, tmp_path, 4, {6: 1.2}) == {"step": 6, "loss": 1.2}
