"""`dspark submit`: the whole chain to Slurm, each job after the one before it.

Submitting the same line again is the restart: finished stages are left out, jobs that still wait or run are kept, the
rest is submitted anew. The exact commands are printed and kept in `<work_dir>/runs/<experiment>/slurm/`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
from pathlib import Path

from launch import queue
from launch.jobs import Job, command, line, log_name, node_lines, plan
from launch.queue import folder_of, submitted
from pipeline import preflight, stopping
from pipeline.artifact import write_json
from pipeline.config import Config
from pipeline.errors import ConfigError, DsparkError
from pipeline.progress import say


def submit(config: Config, arguments: argparse.Namespace) -> None:
    """Submit what is missing. With `arguments.dry_run`, print the commands and what each node would run instead."""
    artifacts = preflight.accepted(config, elsewhere=True)
    finished = [name for name, artifact in artifacts.items() if artifact.complete]
    words = ["-c", arguments.config, *(["--debug"] if arguments.debug else []), *arguments.overrides]
    jobs = plan(config, words, finished)
    for name in finished:
        say(f"{name}: done")
    if config.launch.site_file is not None and not Path(config.launch.site_file).is_file():
        raise ConfigError(f"launch.site_file: {config.launch.site_file}: no such file")
    if arguments.dry_run:
        _show(jobs, config.launch.site_file)
        return
    _submit(config, jobs, {name: artifact.fingerprint for name, artifact in artifacts.items()})


def _show(jobs: list[Job], site_file: str | None) -> None:
    if site_file is not None:
        say(f". {shlex.quote(site_file)}")
    previous = None
    for job in jobs:
        say(f"{job.stage}=$({line(job, previous)})")
        for text in node_lines(job):
            say(f"    # {text}")
        previous = f"${job.stage}"


def _submit(config: Config, jobs: list[Job], fingerprints: dict[str, str]) -> None:
    folder, known, states = folder_of(config), submitted(config), queue.states()
    if states is None:
        raise DsparkError("squeue is missing or does not answer: submit from a login node, or look at --dry-run")
    folder.mkdir(parents=True, exist_ok=True)
    previous = None
    for job in jobs:
        stopping.check()
        old = known.get(job.stage, {})
        same = old.get("fingerprint") == fingerprints[job.stage]
        if same and old["job_id"] in states:
            say(f"{job.stage}: job {old['job_id']} is {states[old['job_id']]}, kept")
            previous = old["job_id"]
            continue
        job_id = _call(config.launch.site_file, job, previous)
        text = line(job, previous)
        known[job.stage] = {
            "job_id": job_id, "fingerprint": fingerprints[job.stage], "after": previous, "tasks": job.tasks,
            "log": str(folder / log_name(config, job.stage, job_id, array=bool(job.tasks))), "command": text,
        }  # fmt: skip
        write_json(folder / "jobs.json", known)
        with (folder / "submitted.sh").open("a", encoding="utf-8") as file:
            file.write(f"{text} # {job_id}\n")
        say(f"{job.stage}: job {job_id}\n    {text}")
        previous = job_id


def _call(site_file: str | None, job: Job, after: str | None) -> str:
    """Run sbatch with the site's SBATCH_* defaults; the job id. Raises DsparkError with what sbatch said."""
    words = command(job, after)
    if site_file is not None:
        words = ["bash", "-c", '. "$0" && exec "$@"', str(Path(site_file).resolve()), *words]
    try:
        run = subprocess.run(
            words, env={**os.environ, **dict(job.settings)}, capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        raise DsparkError("sbatch is not on PATH: submit from a login node, or look at --dry-run") from error
    if run.returncode != 0:
        raise DsparkError(f"{job.stage}: sbatch refused ({run.stderr.strip()})\n    {line(job, after)}")
    return run.stdout.strip().splitlines()[-1].partition(";")[0]
