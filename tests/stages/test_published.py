"""What a run exports is what it trained, and evaluates the same when it comes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.artifact import read_json
from pipeline.decoding.report import without_timings
from pipeline.draft.io import load_drafter
from pipeline.frozen import load_frozen, text_config
from pipeline.layouts import files, sidefiles
from pipeline.layouts.config_json import Origin
from pipeline.layouts.load import load_published
from pipeline.layouts.publish import Options, publish
from pipeline.stages import calibrate, evaluate
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


@pytest.mark.case("EXP-05")
def test_last_step_is_kept_whatever_the_save_cadence(finished: Path) -> None:
    """EXP-05: seven steps, saved every five: the drafter of step seven is there, and its folder is printed."""
    command = [sys.executable, "-m", "pipeline", "train", "-c", str(whole_chain.DEBUG), f"work_dir={finished}"]
    overrides = [*whole_chain.SMALLER, "train.steps=7", "train.save_every=5"]
    run = subprocess.run(
        [*command, *overrides], cwd=whole_chain.ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    ended = [path.parent for path in finished.glob("train/*/manifest.json") if read_json(path)["steps"] == 7]
    assert len(ended) == 1 and str(ended[0]) in run.stdout
    assert load_drafter(ended[0] / "draft")[1]["steps"] == 7


def _evaluated(work_dir: Path, drafter: Any = None) -> tuple[Path, str, Any]:
    """(folder of the drafter, path of the target, report without timings) of a chain around `drafter`."""
    config = prepare(work_dir, drafter=drafter)
    calibrate.run(context_of(config, "calibrate"))
    context = context_of(config, "evaluate")
    evaluate.run(context)
    report = without_timings(read_json(context.artifact.path / "report.json"))
    return context.inputs["train"].path / "draft", context.target_path, report


def test_export_import_evaluate_gives_the_same_report(tmp_path: Path) -> None:
    """Out in float32 and back: same drafts, so every count, curve and accepted length of the report is the same."""
    folder, target, before = _evaluated(tmp_path / "trained")
    drafter, _ = load_drafter(folder)
    options = Options(dtype="float32")
    publish(
        tmp_path / "out",
        drafter,
        layout="speculators",
        frozen=load_frozen(target),
        origin=Origin(target),
        options=options,
    )
    loaded, _ = load_published(tmp_path / "out", target=text_config(target).to_dict())
    _, _, after = _evaluated(tmp_path / "imported", loaded)
    assert after == before and before["records"][0]["num_rounds"] > 0
