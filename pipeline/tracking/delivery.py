"""The thread that carries a journal to MLflow, in batches, and goes on trying while the store is away.

Everything here may be repeated safely: a metric is identified by key, step and time, params and tags by key, runs are
looked up by their tags before they are made. Only this file imports mlflow.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.progress import say
from pipeline.tracking import models
from pipeline.tracking.journal import Journal, Sent
from pipeline.tracking.redact import redact_text

_FLUSH_SECONDS = 2.0
_RETRY_SECONDS = (2.0, 5.0, 15.0, 60.0)
_TEXT = {".json", ".jsonl", ".yaml", ".yml", ".md", ".txt", ".log", ".html", ".csv"}
_METRICS_PER_CALL, _PARAMS_PER_CALL, _VALUE_LENGTH = 1000, 100, 5000


@dataclass(frozen=True)
class Place:
    """Where a stage's run lives: the store, the experiment, the parent run's record, and the child's tags."""

    uri: str
    artifact_location: str | None
    experiment: str
    parent: Sent
    run_name: str
    tags: dict[str, str] = field(default_factory=dict)


def import_client() -> Any:
    """mlflow's client class; telemetry off, short patience (retrying is ours), no addresses printed, which may hold a
    password, and nothing logged of what reaches us as an exception anyway."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
    from mlflow.tracking import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("mlflow.store", "urllib3.connectionpool"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return MlflowClient


def _told(error: Exception) -> str:
    """The line of an error that says what happened: SQLAlchemy adds the statement, its values and a note before it."""
    lines = [line for line in str(error).splitlines() if line and not line.startswith("(raised as a result of")]
    return redact_text(lines[0])[:300] if lines else type(error).__name__


class Delivery(threading.Thread):
    """Sends `journal` from where `sent` stands until it is stopped."""

    def __init__(self, journal: Journal, sent: Sent, place: Place) -> None:
        super().__init__(name="tracking", daemon=True)
        self.journal, self.sent, self.place = journal, sent, place
        self._client_class = import_client()
        self._wake, self._stopping = threading.Event(), False
        self._failures = 0
        self._ready = False

    # ------------------------------------------------------------------------------------------ life

    def run(self) -> None:
        while True:
            pause = _RETRY_SECONDS[min(self._failures, len(_RETRY_SECONDS)) - 1] if self._failures else _FLUSH_SECONDS
            self._wake.wait(pause)
            self._wake.clear()
            self._attempt()
            if self._stopping:
                return

    def stop(self, patience_seconds: float) -> bool:
        """Ask for a last delivery and wait at most that long. False when something is left in the journal."""
        self._stopping = True
        self._wake.set()
        self.join(min(patience_seconds, 5.0) if self._failures else patience_seconds)
        return not self.is_alive() and self.sent.offset >= self.journal.size()

    def _attempt(self) -> None:
        try:
            self._send_pending()
            if self._failures:
                say(f"tracking: {redact_text(self.place.uri)} answers again; the buffered part was sent")
            self._failures = 0
        except Exception as error:  # whatever the store or the network invents must not reach the run
            self._ready = False
            if not self._failures:
                say(
                    f"tracking: {redact_text(self.place.uri)} does not take the run's metrics "
                    f"({_told(error)}). The run goes on; they wait in {self.journal.path}",
                    warning=True,
                )
            self._failures += 1

    def _send_pending(self) -> None:
        while self.sent.offset < self.journal.size():
            if not self._ready:
                self._client = self._client_class(tracking_uri=self.place.uri)
                self._open_run()
                self._ready = True
            events, end = self.journal.read(self.sent.offset)
            if not events:
                return
            self._send(events)
            self.sent.update(sent_bytes=end)

    # ------------------------------------------------------------------------------------------ runs

    def _open_run(self) -> None:
        """Find or make experiment, parent and child. A run deleted on the server is made again, with its history."""
        experiment = self._experiment()
        parent, place = self.place.parent, self.place
        if not self._exists(parent.facts.get("run_id")):
            run_id = self._make(experiment, parent, place.experiment, {"dspark.kind": "parent"})
            parent.update(run_id=run_id, experiment_id=experiment, sent_bytes=0)
        if not self._exists(self.sent.facts.get("run_id")):
            tags = {**place.tags, "dspark.kind": "stage", "mlflow.parentRunId": parent.facts["run_id"]}
            run_id = self._make(experiment, self.sent, place.run_name, tags)
            self.sent.update(run_id=run_id, experiment_id=experiment, sent_bytes=0)

    def _experiment(self) -> str:
        found = self._client.get_experiment_by_name(self.place.experiment)
        if found is None:
            try:
                return str(self._client.create_experiment(self.place.experiment, self.place.artifact_location))
            except Exception:  # another process may have made it between the two calls
                found = self._client.get_experiment_by_name(self.place.experiment)
                if found is None:
                    raise
        return str(found.experiment_id)

    def _exists(self, run_id: str | None) -> bool:
        if run_id is None:
            return False
        try:
            return bool(self._client.get_run(run_id).info.lifecycle_stage == "active")
        except Exception as error:
            if getattr(error, "error_code", "") == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise

    def _make(self, experiment: str, record: Sent, name: str, tags: dict[str, str]) -> str:
        """Create a run, or find the one made by an earlier call whose answer was lost, or by a process beside us."""
        owner = {"dspark.owner": record.owner()}
        query = f"tags.`dspark.owner` = '{owner['dspark.owner']}'"
        if not self._client.search_runs([experiment], query, max_results=1):
            began = self.journal.read(0)[0][0]["t"]  # not now: the journal may be older than the connection
            self._client.create_run(experiment, began, {**owner, **tags}, name)
        first, *others = self._client.search_runs([experiment], query, order_by=["attributes.start_time ASC"])
        for other in others:
            self._client.delete_run(other.info.run_id)
        return str(first.info.run_id)

    # ------------------------------------------------------------------------------------------ events

    def _send(self, events: list[dict[str, Any]]) -> None:
        """Models come last: a registry that fails must not keep the run from showing how it ended."""
        run_id = self.sent.facts["run_id"]
        metrics: list[Any] = []
        for event in events:
            if "metrics" in event:
                metrics += self._metrics(event)
                continue
            self._log(run_id, metrics=metrics)
            metrics = []
            if "params" in event:
                self._log(run_id, params=event["params"])
            elif "tags" in event:
                for key, value in event["tags"].items():
                    self._client.set_tag(run_id, key, value[:_VALUE_LENGTH])
            elif "file" in event:
                self._file(run_id, event)
            elif "status" in event:
                self._status(run_id, event)
        self._log(run_id, metrics=metrics)
        for event in events:
            if "model" in event:
                models.register(self._client, run_id, event["model"])

    def _metrics(self, event: dict[str, Any]) -> list[Any]:
        from mlflow.entities import Metric

        step = event.get("step", 0)
        return [Metric(key, value, event["t"], step) for key, value in event["metrics"].items()]

    def _log(self, run_id: str, *, metrics: list[Any] | None = None, params: dict[str, str] | None = None) -> None:
        from mlflow.entities import Param

        for first in range(0, len(metrics or []), _METRICS_PER_CALL):
            self._client.log_batch(run_id, metrics=(metrics or [])[first : first + _METRICS_PER_CALL])
        items = [Param(key, value[:_VALUE_LENGTH]) for key, value in (params or {}).items()]
        for first in range(0, len(items), _PARAMS_PER_CALL):
            try:
                self._client.log_batch(run_id, params=items[first : first + _PARAMS_PER_CALL])
            except Exception as error:
                if getattr(error, "error_code", "") != "INVALID_PARAMETER_VALUE":
                    raise
                say(f"tracking: params refused by the store: {redact_text(str(error))[:300]}", warning=True)

    def _file(self, run_id: str, event: dict[str, Any]) -> None:
        path = Path(event["file"]) if Path(event["file"]).is_absolute() else self.journal.folder.parent / event["file"]
        if not path.is_file():
            say(f"tracking: {path} was gone before it could be sent", warning=True)
            return
        if path.stat().st_size > models.MAX_FILE_BYTES:
            say(f"tracking: {path} is larger than {models.MAX_FILE_BYTES:,} bytes and stays where it is", warning=True)
            return
        folder = event.get("folder") or None
        if path.suffix not in _TEXT:
            self._client.log_artifact(run_id, str(path), folder)
            return
        with tempfile.TemporaryDirectory() as temporary:
            copy = Path(temporary) / path.name
            copy.write_text(redact_text(path.read_text(encoding="utf-8", errors="replace")), encoding="utf-8")
            self._client.log_artifact(run_id, str(copy), folder)

    def _status(self, run_id: str, event: dict[str, Any]) -> None:
        """The parent shows the state of its latest child."""
        status = event["status"]
        for each in (run_id, self.place.parent.facts["run_id"]):
            if status == "RUNNING":
                self._client.update_run(each, status=status)
            else:
                self._client.set_terminated(each, status, event["t"])
