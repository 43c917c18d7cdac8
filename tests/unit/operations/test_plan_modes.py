"""`plan` prices the target forward once for a cache, once per epoch where nothing (or little) is kept."""

from __future__ import annotations

import argparse
import json

import pytest

from pipeline.config import load
from pipeline.operations.plan import plan

ASKED = argparse.Namespace(
    rows=1000, tokens_per_row=100.0, supervised_share=0.5, device_tflops=None, device_bandwidth=None, tau=None,
    calibrate=False, json=True,
)  # fmt: skip


def facts(capsys: pytest.CaptureFixture[str], *overrides: str) -> dict[str, object]:
    plan(load("configs/debug.yaml", ["work_dir=/tmp/nowhere", *overrides]), ASKED)
    return dict(json.loads(capsys.readouterr().out))


def test_forward_passes_and_disk_by_mode(capsys: pytest.CaptureFixture[str]) -> None:
    cached = facts(capsys)
    rolling = facts(
        capsys, "targets.mode=rolling", "targets.max_bytes=5000000", "train.steps=250", "train.global_batch_size=8"
    )
    streamed = facts(capsys, "targets.mode=streamed", "targets.max_bytes=5000000", "targets.url=http://nowhere")
    live = facts(capsys, "targets.mode=live", "train.steps=null", "train.epochs=3")
    assert (cached["target_passes"], rolling["target_passes"], live["target_passes"]) == (1, 2, 3)
    assert rolling["target_flops"] == 2 * cached["target_flops"]  # type: ignore[operator]
    assert cached["disk_bytes"] == cached["cache_bytes"] == live["cache_bytes"]
    assert (rolling["disk_bytes"], live["disk_bytes"]) == (5_000_000, 0)
    assert (streamed["target_passes"], streamed["target_flops"], streamed["disk_bytes"]) == (0, 0, 5_000_000)


def test_where_the_chain_cannot_be_resolved_nothing_exists_to_compare_with(capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(capsys, "data.sources=[{path: /nowhere/rows.jsonl}]")
    assert found["disk_bytes"] == facts(capsys)["disk_bytes"]
    assert (found["exists"], found["compared"]) == ([], [])
