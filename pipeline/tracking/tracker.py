"""What stages hold: a tracker that takes params, metrics, files and tags, and never raises or waits."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.artifact import Artifact, digest, git_revision, read_json
from pipeline.chain import STAGES, array_share
from pipeline.config import Config, Section
from pipeline.progress import say
from pipeline.tracking.delivery import Delivery, Place
from pipeline.tracking.journal import Journal, Sent
from pipeline.tracking.places import artifact_location, parent_folder, reuse_folder, store_uri
from pipeline.tracking.redact import redact, redact_text
from pipeline.tracking.system import SystemMetrics

_CLOSE_SECONDS = 30.0
_KEY_LENGTH = 250
ALWAYS_SHOWN = ("seed", "target", "template", "launch")


class Tracker:
    """The interface, and what it does when tracking is off or this is not rank 0: nothing."""

    def params(self, values: Mapping[str, Any]) -> None:
        """Settings and facts known at the start; nested mappings become dotted keys. Changed ones become tags."""

    def metrics(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Numbers, as a curve over `step` or (without) as single values. NaN and infinities are counted, not sent."""

    def file(self, path: Path | str, folder: str = "") -> None:
        """Attach a file, under `folder`. It is read when it is sent, so it should be final."""

    def model(self, name: str, folder: Path, description: str, tags: Mapping[str, str]) -> None:
        """Register a folder's files as a version of model `name`. They are read when they are sent."""

    def tags(self, values: Mapping[str, Any]) -> None:
        """Notes on the run."""

    def close(self, status: str = "FINISHED") -> None:
        """`FINISHED`, `FAILED`, or `KILLED` for a stop by signal or time limit. Later calls do nothing."""


class NullTracker(Tracker):
    """Tracks nothing."""


def _quietly(method: Callable[..., None]) -> Callable[..., None]:
    """Nothing that goes wrong in tracking stops a run. Closed trackers and a forked worker's copies are mute."""

    @functools.wraps(method)
    def guarded(self: MlflowTracker, *args: Any, **kwargs: Any) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            if method.__name__ not in self._warned:
                self._warned.add(method.__name__)
                what = redact_text(repr(error))[:300]
                say(f"tracking: {method.__name__} not recorded ({what}). The run goes on", warning=True)

    return guarded


class MlflowTracker(Tracker):
    def __init__(self, artifact: Artifact, journal: Journal, delivery: Delivery) -> None:
        self._artifact, self._journal, self._delivery = artifact, journal, delivery
        self._pid, self._closed = os.getpid(), False
        self._warned: set[str] = set()
        self._not_finite: dict[str, int] = {}
        self._system = SystemMetrics(journal)

    @_quietly
    def params(self, values: Mapping[str, Any]) -> None:
        self._journal.parameters({key: str(value) for key, value in flat(redact(values)).items()})

    @_quietly
    def metrics(self, values: Mapping[str, Any], step: int | None = None) -> None:
        numbers = {key_name(key): float(value) for key, value in values.items()}
        for key in [key for key, value in numbers.items() if not math.isfinite(value)]:
            del numbers[key]
            self._not_finite[key] = self._not_finite.get(key, 0) + 1
            numbers[f"{key}.not_finite"] = float(self._not_finite[key])
        self._journal.metrics(numbers, step)
        self._system.maybe_sample()

    @_quietly
    def file(self, path: Path | str, folder: str = "") -> None:
        path = Path(path)
        home = self._journal.folder.parent  # of a reused artifact's journal: not the artifact
        name = path.relative_to(home) if path.is_relative_to(home) else path.resolve()
        self._journal.event(file=str(name), folder=folder)

    @_quietly
    def model(self, name: str, folder: Path, description: str, tags: Mapping[str, str]) -> None:
        text, facts = redact_text(description), redact(dict(tags))
        self._journal.event(model={"name": name, "folder": str(folder.resolve()), "description": text, "tags": facts})

    @_quietly
    def tags(self, values: Mapping[str, Any]) -> None:
        if values:
            self._journal.event(tags={key: str(value) for key, value in flat(redact(values)).items()})

    @_quietly
    def close(self, status: str = "FINISHED") -> None:
        self._system.sample()
        if status == "KILLED":
            path = self._artifact.path / "stopped.json"
            self.tags({"stopped": read_json(path).get("reason", "yes") if path.exists() else "yes"})
        self._journal.event(status=status)
        self._closed = True
        if not self._delivery.stop(_CLOSE_SECONDS):
            say(f"tracking: not everything was sent; the next run sends what waits in {self._journal.path}")


# ------------------------------------------------------------------------------------------------ opening


def open_tracker(config: Config, stage: str, artifact: Artifact, *, inputs: Mapping[str, Artifact]) -> Tracker:
    """The tracker of one stage's run. Other ranks and array tasks than the first get one that does nothing."""
    if not config.tracking.enabled or array_share()[0] != 0:
        return NullTracker()
    try:
        tracker = _open(config, stage, artifact, artifact.path / "tracking")
    except Exception as error:
        say(f"tracking: off for this run ({redact_text(repr(error))[:300]})", warning=True)
        return NullTracker()
    tracker.params(_shown(config, stage))
    tracker.tags({f"input.{name}": item.fingerprint for name, item in inputs.items()})
    return tracker


def note_reuse(config: Config, stage: str, artifact: Artifact, *, inputs: Mapping[str, Artifact]) -> None:
    """Show a finished artifact in this experiment: a child run tagged `reused_from`, unless its own run is here.

    Also sends what an earlier run of this artifact could not send. Costs nothing when there is nothing to do.
    """
    if not config.tracking.enabled or array_share()[0] != 0:
        return
    try:
        _note_reuse(config, stage, artifact, inputs)
    except Exception as error:
        say(f"tracking: reuse not noted ({redact_text(repr(error))[:300]})", warning=True)


def _note_reuse(config: Config, stage: str, artifact: Artifact, inputs: Mapping[str, Artifact]) -> None:
    own, here = artifact.path / "tracking", reuse_folder(config, artifact)
    for folder in (own, here):
        if _unsent(config, folder):
            _, delivery = _connect(config, stage, artifact, folder)
            delivery.start()
            delivery.stop(_CLOSE_SECONDS)
    if here.exists() or _experiment_of(own) == config.experiment:
        return
    tracker = _open(config, stage, artifact, here)
    tracker.params(_shown(config, stage))
    tracker.tags(
        {"reused_from": artifact.fingerprint, **{f"input.{name}": i.fingerprint for name, i in inputs.items()}}
    )
    tracker.file(artifact.manifest_path)
    tracker.close("FINISHED")


def _open(config: Config, stage: str, artifact: Artifact, folder: Path) -> MlflowTracker:
    journal, delivery = _connect(config, stage, artifact, folder)
    tracker = MlflowTracker(artifact, journal, delivery)
    journal.event(status="RUNNING")
    tracker.tags({"git_revision": git_revision(), "host": os.uname().nodename, "started": time.strftime("%F %T")})
    delivery.start()
    return tracker


def _connect(config: Config, stage: str, artifact: Artifact, folder: Path) -> tuple[Journal, Delivery]:
    """The journal in `folder` and a delivery for it, not started. A journal stays with the experiment that began it."""
    uri = store_uri(config)
    store = digest(uri)
    experiment = _experiment_of(folder) or config.experiment
    journal, sent = Journal(folder), Sent(folder, store)
    if "experiment" not in sent.facts:
        sent.update(experiment=experiment, uri=redact_text(uri))
    place = Place(
        uri=uri,
        artifact_location=artifact_location(config, experiment),
        experiment=experiment,
        parent=Sent(parent_folder(config, experiment), store),
        run_name=f"{stage} {artifact.fingerprint[:6]}",
        tags={"stage": stage, "fingerprint": artifact.fingerprint, "artifact": str(artifact.path.resolve())},
    )
    return journal, Delivery(journal, sent, place)


def _unsent(config: Config, folder: Path) -> bool:
    """Whether the configured store still misses part of a journal. Reads two small files; imports nothing."""
    journal = folder / "journal.jsonl"
    return journal.exists() and Sent(folder, digest(store_uri(config))).offset < journal.stat().st_size


def _experiment_of(folder: Path) -> str | None:
    """The experiment whose run wrote this journal first."""
    records = sorted(folder.glob("*.json"))
    return read_json(records[0]).get("experiment") if records else None


def _shown(config: Config, stage: str) -> dict[str, Any]:
    """The sections a stage reads, *execution* fields included: what a person compares runs by."""
    shown: dict[str, Any] = {"world_size": os.environ.get("WORLD_SIZE", "1")}
    for name in dict.fromkeys([*STAGES[stage].reads, *ALWAYS_SHOWN]):
        value = getattr(config, name)
        shown[name] = value.model_dump(mode="json") if isinstance(value, Section) else value
    return shown


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings and lists of mappings as one level with dotted keys."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        name = key_name(f"{prefix}{key}")
        if isinstance(value, Mapping) and value:
            out.update(flat(value, f"{name}."))
        elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            out.update(flat({str(index): item for index, item in enumerate(value)}, f"{name}."))
        else:
            out[name] = value
    return out


def key_name(key: str) -> str:
    """A key MLflow accepts."""
    return "".join(letter if letter.isalnum() or letter in "_-. /" else "_" for letter in str(key))[:_KEY_LENGTH]
