"""`targets.mode: live`: no cache, the same training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.chain import active, resolve
from pipeline.config import Config
from pipeline.runner import run_stage
from tests.stages.token_rows import prepare

RECIPE = (
    "targets.taps=bf16", "targets.logits=last_hidden", "train.steps=6", "train.global_batch_size=4",
    "train.num_anchors=8", "train.validate_every=3", "train.save_every=100", "draft.init=random", "draft.markov_rank=4",
    "tracking.enabled=false",
)  # fmt: skip
OTHER = ("second", "time", "grad_norm")  # not losses; the gradient's norm feels the bf16 rounding of the cached taps


def losses(config: Config) -> list[dict[str, Any]]:
    lines = (resolve(config)["train"].path / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_live_losses_equal_those_from_a_bf16_cache(work_dir: Path) -> None:
    cached = prepare(work_dir, *RECIPE)
    live = prepare(work_dir, *RECIPE, "targets.mode=live")
    assert "targets" not in active(live)
    for config, stages in ((cached, ("targets", "train")), (live, ("train",))):
        for stage in stages:
            run_stage(config, stage, resolve(config))
    ours, theirs = losses(live), losses(cached)
    assert len(ours) == len(theirs) >= 6
    compared = 0
    for mine, other in zip(ours, theirs, strict=True):
        for name, value in mine.items():
            if isinstance(value, float) and name in other and not any(word in name for word in OTHER):
                assert value == pytest.approx(other[name], rel=1e-3, abs=1e-3), name
                compared += 1
    assert compared >= 18
    assert "targets" not in resolve(live)["train"].manifest()["inputs"]
