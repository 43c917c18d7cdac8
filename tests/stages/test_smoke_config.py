"""configs/qwen3_0.6b_smoke.yaml: rows of Capybara's form through the whole chain, on a local target."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config import load
from tests.unit.corpus.stage import write_jsonl

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "qwen3_0.6b_smoke.yaml"
SMALLER = (
    "target={tiny: {layers: 6, hidden_size: 64, vocabulary: 512, train_steps: 60}}",
    "draft.mask_token_id=511", "targets.layers=[1, 3]", "targets.dtype=float32", "train.precision=float32",
    "answers.dtype=float32", "answers.max_new_tokens=24", "answers.max_skip_fraction=0.5",
    "tokens.max_skip_fraction=0.5", "train.steps=6", "train.validate_every=3", "train.save_every=3",
    "calibrate.max_new_tokens=16", "evaluate.max_new_tokens=16", "evaluate.bootstrap=20", "profile.max_batch_tokens=8",
    "profile.repeats=2", "profile.context_length=32", "tracking.enabled=false",
)  # fmt: skip


def test_the_shipped_file_says_what_the_smoke_run_is() -> None:
    made = load(CONFIG)
    assert made.draft.block_size == 4
    assert [source.limit for source in made.data.sources] == [32]
    assert made.template.thinking is False


@pytest.mark.slow
def test_its_chain_runs_on_a_local_target_and_local_rows(tmp_path: Path) -> None:
    rows = [
        {
            "source": "x",
            "conversation": [
                {"input": f"Count from {n} to {n + 5}.", "output": "old"},
                {"input": "And on?", "output": "old"},
            ],
        }
        for n in range(40)
    ]
    path = write_jsonl(tmp_path / "capybara.jsonl", rows)
    overrides = [*SMALLER, f"data.sources.0.path={path}", f"work_dir={tmp_path / 'work'}"]
    command = [sys.executable, "-m", "pipeline", "run", "-c", str(CONFIG), *overrides]
    run = subprocess.run(command, cwd=ROOT, env={**os.environ}, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    links = tmp_path / "work" / "runs" / "qwen3-0.6b-smoke"
    manifests = {file.parent.name: json.loads(file.read_text()) for file in links.glob("[a-z]*/manifest.json")}
    assert manifests["data"]["rows"]["in"] == 32
    assert {"data", "answers", "tokens", "targets", "train", "calibrate", "profile", "evaluate", "export"} <= set(
        manifests
    )
