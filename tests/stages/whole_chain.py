"""The debug chain as a real process, and what must be equal between two runs of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pipeline.artifact import read_json
from pipeline.config import load

ROOT = Path(__file__).resolve().parents[2]
DEBUG = ROOT / "configs" / "debug.yaml"
SMALLER = (
    "target.tiny.train_steps=30",
    "data.sources.0.limit=40",
    "data.sources.1.limit=40",
    "data.shard_rows=16",
    "answers.max_new_tokens=24",
    "train.steps=20",
    "train.save_every=5",
    "train.validate_every=10",
    "calibrate.num_prompts=12",
    "calibrate.max_new_tokens=16",
    "evaluate.num_prompts=8",
    "evaluate.max_new_tokens=16",
    "profile.max_batch_tokens=4",
)
TIMED_FILES = ("sps.json", "lab.json", "export_manifest.json")  # measured, or made from measurements
TIMED = ("second", "speed", "latency", "overhead", "time")


def command(work_dir: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "pipeline", "run", "-c", str(DEBUG), f"work_dir={work_dir}", *SMALLER, *overrides]


def start(work_dir: Path, *overrides: str) -> subprocess.Popen[str]:
    """Its own process group, so that a kill takes what it started along."""
    return subprocess.Popen(
        command(work_dir, *overrides), cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def run(work_dir: Path, *overrides: str) -> str:
    """Run to the end; returns what it printed."""
    process = start(work_dir, *overrides)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return output


def results(work_dir: Path) -> dict[str, Any]:
    """Everything two runs of one configuration must agree on: hashes of shards and weights, reports without timings."""
    found: dict[str, Any] = {}
    for path in sorted(work_dir.glob("*/*/manifest.json")):
        manifest = read_json(path)
        stage, folder = manifest["stage"], path.parent
        if stage == "profile":
            continue  # a measurement of the machine
        found[f"{stage}/rows"] = [{k: row[k] for k in ("file", "samples", "sha256")} for row in manifest["shards"]]
        found[f"{stage}/skipped"] = manifest["skipped"]
        for fact in manifest["files"]:
            name = fact["file"]
            if Path(name).suffix in (".png", ".md") or Path(name).name in TIMED_FILES:
                continue  # drawn from, or holding, timings
            content = _content(folder / name, work_dir)
            found[f"{stage}/{name}"] = fact["sha256"] if content is None else content
        if stage == "evaluate":
            found[f"{stage}/rows"] = [row["file"] for row in manifest["shards"]]  # their lines hold seconds
    return found


def _content(path: Path, work_dir: Path) -> Any:
    """Parsed, without timings and without the work directory's own name; None for what is compared by hash."""
    if path.suffix not in (".json", ".jsonl"):
        return None
    text = path.read_text(encoding="utf-8").replace(str(work_dir.resolve()), "WORK")
    documents = [text] if path.suffix == ".json" else text.splitlines()
    return [_without_timings(json.loads(document)) for document in documents]


def _without_timings(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_timings(item) for key, item in value.items() if not any(part in key for part in TIMED)}
    if isinstance(value, list):
        return [_without_timings(item) for item in value]
    return value


def stages_of(overrides: tuple[str, ...] = ()) -> list[str]:
    from pipeline.chain import active

    return active(load(DEBUG, [*SMALLER, *overrides]))
