"""`dspark status`: for each stage of a configuration, what exists, what runs, how far it is, and why it stopped."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.artifact import Artifact, read_json
from pipeline.chain import resolve
from pipeline.config import Config
from pipeline.errors import ArtifactError
from pipeline.progress import duration, say
from pipeline.trace import FAILED, RUNNING, STOPPED, alive


def status(config: Config, arguments: argparse.Namespace) -> None:
    rows = [describe(artifact) for artifact in resolve(config).values()]
    if arguments.json:
        say(json.dumps(rows, indent=1), result=True)
        return
    for row in rows:
        say(f"{row['stage']:10s} {row['state']:9s} {row['note']}")
        say(f"{'':20s} {row['path']}")


def describe(artifact: Artifact) -> dict[str, Any]:
    """State (done, running, stopped, failed, partial, absent), a note in words, and the facts behind it."""
    facts: dict[str, Any] = {
        "stage": artifact.stage,
        "fingerprint": artifact.fingerprint,
        "path": str(artifact.path),
        "published": len(list((artifact.path / "rows").glob("*.json"))),
        "bytes": sum(path.stat().st_size for path in artifact.path.rglob("*") if path.is_file()),
    }
    trace = {name: _trace(artifact.path / name) for name in (RUNNING, STOPPED, FAILED)}
    if artifact.complete:
        try:
            manifest = artifact.manifest()
        except ArtifactError as error:
            return {**facts, "state": "damaged", "note": str(error)}
        samples = sum(row.get("samples", 0) for row in manifest["shards"])
        skipped = sum(manifest["skipped"].values())
        note = f"{samples} samples, {skipped} skipped, " if manifest["shards"] else ""
        return {**facts, "state": "done", "note": f"{note}{facts['bytes'] / 1e6:.1f} MB"}
    progress = _progress(artifact.path, facts["published"])
    if trace[RUNNING] and alive(artifact.path):
        who = trace[RUNNING]
        job = f", Slurm job {who['slurm_job_id']}" if who.get("slurm_job_id") else ""
        since = duration(time.time() - who["time"])
        return {**facts, "state": "running", "note": f"{progress}; {who['host']} pid {who['pid']}{job}, for {since}"}
    if trace[FAILED]:
        return {**facts, "state": "failed", "note": f"{progress}; {trace[FAILED]['error'].splitlines()[0]}"}
    if trace[STOPPED]:
        return {**facts, "state": "stopped", "note": f"{progress}; {trace[STOPPED]['reason']}"}
    if artifact.path.exists():
        return {**facts, "state": "partial", "note": f"{progress}; killed or never finished: the same command goes on"}
    return {**facts, "state": "absent", "note": "; ".join(_nearest(artifact)) or "nothing of this stage yet"}


def _trace(path: Path) -> dict[str, Any]:
    try:
        return dict(read_json(path))
    except ArtifactError:
        return {}


def _progress(folder: Path, published: int) -> str:
    metrics = folder / "metrics.jsonl"
    if metrics.exists():
        lines = metrics.read_bytes().splitlines()
        if lines:
            try:
                return f"step {json.loads(lines[-1]).get('step')}"
            except ValueError:
                return f"{len(lines)} lines of metrics"
    return f"{published} shards published"


def _nearest(artifact: Artifact) -> Iterator[str]:
    """Where an artifact of the same stage exists for another request: which fields differ (fewest first)."""
    best: list[str] | None = None
    for other in artifact.path.parent.glob("*/request.json"):
        try:
            found = differences(read_json(other), dict(artifact.request))
        except ArtifactError:
            continue
        if best is None or len(found) < len(best):
            best = [f"{other.parent.name} differs in {item}" for item in found]
    yield from (best or [])[:4]


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """Dotted names of the fields in which two requests differ, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        found: list[str] = []
        for key in sorted({*old, *new}):
            inside = key if not where or where == "config" else f"{where}.{key}"
            found += differences(old.get(key), new.get(key), inside)
        return found
    return [] if old == new else [f"{where} ({_short(old)} there, {_short(new)} here)"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
