"""`dspark status`: for each stage of a configuration, what exists, what runs, how far it is, and why it stopped."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch import queue
from pipeline.artifact import Artifact, read_json
from pipeline.chain import STAGES, resolve
from pipeline.config import Config
from pipeline.differences import differences
from pipeline.errors import ArtifactError
from pipeline.progress import duration, say
from pipeline.trace import FAILED, RUNNING, STOPPED, alive


def status(config: Config, arguments: argparse.Namespace) -> None:
    jobs = queue.submitted(config)
    states = queue.states() if jobs else None
    rows = [describe(artifact, _job(jobs, states, artifact)) for artifact in resolve(config).values()]
    if arguments.json:
        say(json.dumps(rows, indent=1), result=True)
        return
    for row in rows:
        say(f"{row['stage']:10s} {row['state']:9s} {row['note']}", result=True)
        say(f"{'':20s} {row['path']}", result=True)
        if job := row["slurm"]:
            say(f"{'':20s} Slurm job {job['job_id']}: {job['state']}; {job['log']}", result=True)


def describe(artifact: Artifact, job: dict[str, Any] | None = None) -> dict[str, Any]:
    """State (done, running, stopped, failed, partial, absent, damaged), a note in words, and the facts behind it.

    `progress` is what a running process said of itself in the last seconds, `error` the last attempt's first error,
    `slurm` the job submitted for this artifact.
    """
    facts: dict[str, Any] = {
        "stage": artifact.stage,
        "fingerprint": artifact.fingerprint,
        "path": str(artifact.path),
        "published": len(list((artifact.path / "rows").glob("*.json"))),
        "bytes": sum(path.stat().st_size for path in artifact.path.rglob("*") if path.is_file()),
        "progress": None,
        "error": None,
        "slurm": job,
    }
    if artifact.complete:
        return {**facts, **_done(artifact, facts["bytes"])}
    trace = {name: _trace(artifact.path / name) for name in (RUNNING, STOPPED, FAILED)}
    progress = _progress(artifact, facts["published"])
    if trace[RUNNING] and alive(artifact.path):
        return {**facts, **_running(trace[RUNNING], progress)}
    if trace[FAILED]:
        error = trace[FAILED]["error"]
        return {**facts, "state": "failed", "note": f"{progress}; {error.splitlines()[0]}", "error": error}
    if trace[STOPPED]:
        return {**facts, "state": "stopped", "note": f"{progress}; {trace[STOPPED]['reason']}"}
    if artifact.path.exists():
        return {**facts, "state": "partial", "note": f"{progress}; killed or never finished: the same command goes on"}
    return {**facts, "state": "absent", "note": "; ".join(_nearest(artifact)) or "nothing of this stage yet"}


def _done(artifact: Artifact, size: int) -> dict[str, Any]:
    try:
        manifest = artifact.manifest()
    except ArtifactError as error:
        return {"state": "damaged", "note": str(error), "error": str(error)}
    samples = sum(row.get("samples", 0) for row in manifest["shards"])
    skipped = sum(manifest["skipped"].values())
    note = f"{samples} samples, {skipped} skipped, " if manifest["shards"] else ""
    return {"state": "done", "note": f"{note}{size / 1e6:.1f} MB"}


def _running(who: dict[str, Any], progress: str) -> dict[str, Any]:
    told = who.get("progress")
    if told:
        left = f", {duration(told['seconds_left'])} left" if told["seconds_left"] is not None else ""
        progress = f"{told['what']}: {told['done']}/{told['total']} {told['unit']}{left}"
    job = f", Slurm job {who['slurm_job_id']}" if who.get("slurm_job_id") else ""
    since = duration(time.time() - who["time"])
    note = f"{progress}; {who['host']} pid {who['pid']}{job}, for {since}"
    return {"state": "running", "note": note, "progress": told}


def _job(jobs: dict[str, dict[str, Any]], states: dict[str, str] | None, artifact: Artifact) -> dict[str, Any] | None:
    """The job submitted for exactly this artifact, and its state in the queue."""
    job = jobs.get(artifact.stage)
    if job is None or job.get("fingerprint") != artifact.fingerprint:
        return None
    state = "unknown, squeue does not answer here" if states is None else states.get(job["job_id"], "ended")
    return {"job_id": job["job_id"], "state": state, "log": job["log"]}


def _trace(path: Path) -> dict[str, Any]:
    try:
        return dict(read_json(path))
    except ArtifactError:
        return {}


def _progress(artifact: Artifact, published: int) -> str:
    """From what lies on disk; without the total where it depends on more than the configuration."""
    metrics = artifact.path / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines() if metrics.exists() else []
    if lines:
        steps = artifact.request["config"]["train"]["steps"]
        try:
            return f"step {json.loads(lines[-1]).get('step')}" + (f" of {steps}" if steps else "")
        except ValueError:
            return f"{len(lines)} lines of metrics"
    if artifact.stage == "export":
        layouts = artifact.request["config"]["export"]["layouts"]
        return f"{sum((artifact.path / name).is_dir() for name in layouts)} of {len(layouts)} layouts written"
    return f"{published} shards published" if STAGES[artifact.stage].ranks == "shards" else "nothing published yet"


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
