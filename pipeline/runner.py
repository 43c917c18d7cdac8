"""Runs one stage, or walks the chain: reuse what is finished, go on with what is not, leave a trace of every ending.

A stage whose artifact is complete is not run: its link is renewed and MLflow gets a child run tagged `reused_from`.
A stop asked by signal or time limit ends with exit code 0 and `stopped.json` in the artifact's folder, because
launchers do not pass exit codes on; the same command goes on from there.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline import chain as chain_table
from pipeline import preflight, progress, stopping, usage
from pipeline.artifact import Artifact
from pipeline.chain import STAGES, StageContext
from pipeline.config import Config, dump
from pipeline.errors import ArtifactError, Stopped
from pipeline.lease import lease
from pipeline.progress import say
from pipeline.trace import STOPPED, traced
from pipeline.tracking.redact import redact_text

Start = Callable[[Config, str, dict[str, Artifact]], None]


def run_chain(config: Config, stages: Sequence[str] | None = None, start: Start | None = None) -> dict[str, Artifact]:
    """Run the given stages (default: all active ones) in order, each by `start` (default: `run_stage`).

    Raises ConfigError with everything that can be refused before weights are read.
    """
    artifacts = preflight.accepted(config, stages)
    names = stages or list(artifacts)
    if "targets" in names and config.targets.mode == "streamed" and not artifacts["targets"].complete:
        _check_remote(config)
    for name in names:
        (start or run_stage)(config, name, artifacts)
    return artifacts


def _check_remote(config: Config) -> None:
    """Before hours go into a corpus: is the cache under `targets.url` the one this configuration needs?"""
    from pipeline.shards.remote import Remote, refuse_another

    remote = Remote(str(config.targets.url))
    refuse_another(remote.manifest(), chain_table.finished_cache(config), remote.url)


def run_stage(config: Config, name: str, artifacts: dict[str, Artifact]) -> None:
    """Run one stage unless its artifact is complete.

    Raises ArtifactError when an input is not finished, or another run is training this drafter.
    """
    artifact = artifacts[name]
    inputs = {source: artifacts[source] for source in STAGES[name].inputs(config)}
    unfinished = [source for source, item in inputs.items() if not item.complete]
    if unfinished:
        raise ArtifactError(f"{name} reads {', '.join(unfinished)}, not finished yet: run that first, or `dspark run`")
    if artifact.complete:
        artifact.manifest()
        _link(config, artifact)
        say(f"{name}: reused {artifact.path}")
        _note_reuse(config, name, artifact, inputs)
        return
    _make_target(config, name)
    artifact.create(redact_text(dump(config)))
    _link(config, artifact)
    if STAGES[name].ranks == "first" and progress.rank() > 0:
        _wait_for(artifact)
        return
    started = time.monotonic()
    with (
        _held(artifact),
        progress.logged(artifact.path / "logs" / f"rank-{chain_table.array_share()[0]:03d}.log"),
        _tracked(config, name, artifact, inputs) as tracker,
        traced(artifact),
        usage.recorded(artifact.path, tracker.metrics),
    ):
        say(f"{name}: {artifact.path}")
        stage = importlib.import_module(f"pipeline.stages.{name}")
        stage.run(StageContext(config, artifact, inputs, tracker, artifacts))
    if artifact.complete:
        say(f"{name}: done in {progress.duration(time.monotonic() - started)}")
    elif chain_table.array_share()[1] == 1:
        raise ArtifactError(f"{name}: ended without finishing {artifact.path}")
    else:
        say(f"{name}: this task's share is done; the last task to end writes the manifest")


def _held(artifact: Artifact) -> contextlib.AbstractContextManager[None]:
    """The lease of an artifact that is not made of shards. Taken first: a refused run touches nothing of the other's.

    Raises ArtifactError naming the run that holds it.
    """
    whole = STAGES[artifact.stage].ranks == "all" and progress.rank() == 0
    return lease(artifact.path / "lease.json") if whole else contextlib.nullcontext()


@contextlib.contextmanager
def _tracked(config: Config, name: str, artifact: Artifact, inputs: dict[str, Artifact]) -> Iterator[Any]:
    from pipeline.tracking import open_tracker

    tracker = open_tracker(config, name, artifact, inputs=inputs)
    try:
        yield tracker
    except Stopped:
        tracker.close("KILLED")
        raise
    except BaseException:
        tracker.close("FAILED")
        raise
    if artifact.complete:
        tracker.file(artifact.manifest_path, "")
    tracker.close("FINISHED")


def _note_reuse(config: Config, name: str, artifact: Artifact, inputs: dict[str, Artifact]) -> None:
    from pipeline.tracking import note_reuse

    note_reuse(config, name, artifact, inputs=inputs)


def _make_target(config: Config, name: str) -> None:
    if STAGES[name].target and config.target.tiny is not None:
        from pipeline.tiny import make_tiny_target

        make_tiny_target(config)


def _wait_for(artifact: Artifact) -> None:
    """Ranks without work wait for rank 0, so that a launcher does not take them for finished early."""
    while not artifact.complete:
        stopping.check()
        if (artifact.path / STOPPED).exists():
            raise Stopped("rank 0 stopped")
        time.sleep(0.2)


def _link(config: Config, artifact: Artifact) -> None:
    """`<work_dir>/runs/<experiment>/<stage>` -> the artifact, so that people browse by name."""
    if progress.rank() > 0:
        return
    link = config.work_dir / "runs" / config.experiment / artifact.stage
    link.parent.mkdir(parents=True, exist_ok=True)
    goal = Path(os.path.relpath(artifact.path, link.parent))
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(goal)
    temporary.replace(link)
