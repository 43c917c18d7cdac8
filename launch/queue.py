"""What was submitted to Slurm for an experiment, and what the queue says of it now."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from pipeline.artifact import read_json
from pipeline.config import Config


def folder_of(config: Config) -> Path:
    """Where job records, the commands and the jobs' logs of this experiment lie."""
    return config.work_dir / "runs" / config.experiment / "slurm"


def submitted(config: Config) -> dict[str, dict[str, Any]]:
    """Stage -> {job_id, fingerprint, after, tasks, log, command} of its last submission; {} before the first."""
    record = folder_of(config) / "jobs.json"
    return dict(read_json(record)) if record.exists() else {}


def states() -> dict[str, str] | None:
    """Job id (of an array: of the whole) -> "RUNNING", "PENDING (Dependency)", "3 RUNNING, 1 PENDING (Resources)".

    Of the user's jobs that have not ended. None where Slurm is not installed or does not answer.
    """
    words = ["squeue", "-h", "--me", "-o", "%F|%T|%r"]
    try:
        run = subprocess.run(words, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    found: dict[str, Counter[str]] = {}
    for text in run.stdout.splitlines():
        job, state, reason = text.split("|", 2)
        found.setdefault(job, Counter())[f"{state} ({reason})" if state == "PENDING" else state] += 1
    return {job: _told(tasks) for job, tasks in found.items()}


def _told(tasks: Counter[str]) -> str:
    if tasks.total() == 1:
        return next(iter(tasks))
    return ", ".join(f"{count} {state}" for state, count in sorted(tasks.items()))
