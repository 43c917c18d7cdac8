"""What a run wants tracked, as lines of a local file: the buffer that outlives servers and processes.

One JSON object a line, in order, with its time: `{"t": 1700000000000, "step": 3, "metrics": {"loss": 2.1}}`, or
`params`, `tags`, `file`, `model`, `status` in place of `metrics`. A resumed run replays steps it had already written
(it goes back to its last checkpoint); those are recognised by step and dropped, so every metric is there once.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from pipeline.artifact import read_json, write_json
from pipeline.errors import ArtifactError


class Journal:
    """Append-only events of one artifact. Appending is thread-safe and costs one small local write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "journal.jsonl"
        self.last_step: dict[str, int] = {}
        self.single: dict[str, float] = {}
        self.params: dict[str, str] = {}
        self.resumed = 0
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        self._recover()
        self._file = self.path.open("ab")

    def _recover(self) -> None:
        """Read what earlier processes wrote; cut a line that a kill left half-written."""
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            with self.path.open("r+b") as file:
                file.truncate(whole)
        for line in content[:whole].splitlines():
            event = json.loads(line)
            self._remember(event)
            self.resumed += event.get("status") == "RUNNING"

    def _remember(self, event: dict[str, Any]) -> None:
        for key, value in event.get("metrics", {}).items():
            if "step" in event:
                self.last_step[key] = max(event["step"], self.last_step.get(key, event["step"]))
            else:
                self.single[key] = value
        self.params.update(event.get("params", {}))

    def metrics(self, values: dict[str, float], step: int | None) -> None:
        """Steps already written are skipped; so is a stepless value that has not changed."""
        with self._lock:
            if step is None:
                fresh = {key: value for key, value in values.items() if self.single.get(key) != value}
                event: dict[str, Any] = {"metrics": fresh}
            else:
                fresh = {key: value for key, value in values.items() if step > self.last_step.get(key, step - 1)}
                event = {"step": step, "metrics": fresh}
            if fresh:
                self._append(event)

    def parameters(self, values: dict[str, str]) -> None:
        """New ones are params. MLflow refuses to change a param, so a changed one becomes a tag of this resumption."""
        with self._lock:
            fresh = {key: value for key, value in values.items() if key not in self.params}
            changed = {key: value for key, value in values.items() if self.params.get(key, value) != value}
            if fresh:
                self._append({"params": fresh})
            if changed:
                self._append({"tags": {f"resume-{self.resumed}.{key}": value for key, value in changed.items()}})

    def event(self, **what: Any) -> None:
        with self._lock:
            self._append(what)

    def _append(self, event: dict[str, Any]) -> None:
        event = {"t": int(time.time() * 1000), **event}
        self._remember(event)
        self._file.write(json.dumps(event, ensure_ascii=False).encode() + b"\n")
        self._file.flush()

    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def read(self, start: int, limit_bytes: int = 1 << 18) -> tuple[list[dict[str, Any]], int]:
        """Whole events from byte `start` on, and the byte after the last of them."""
        with self.path.open("rb") as file:
            file.seek(start)
            content = file.read(limit_bytes)
            while b"\n" not in content and (more := file.read(limit_bytes)):
                content += more
        whole = content.rfind(b"\n") + 1
        return [json.loads(line) for line in content[:whole].splitlines()], start + whole


class Sent:
    """How far one tracking store has received a journal, and the ids it gave. One small JSON file per store."""

    def __init__(self, folder: Path, store: str) -> None:
        self.path = folder / f"{store}.json"
        try:
            self.facts: dict[str, Any] = read_json(self.path) if self.path.exists() else {}
        except ArtifactError:
            self.facts = {}

    @property
    def offset(self) -> int:
        return int(self.facts.get("sent_bytes", 0))

    def owner(self) -> str:
        """A random mark that all processes using this file share: whoever links it first has chosen it."""
        path = self.path.with_suffix(".owner")
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            mark = uuid.uuid4().hex
            mine = path.with_name(f"{path.name}.{mark}")
            mine.write_text(mark, encoding="utf-8")
            with contextlib.suppress(FileExistsError):
                os.link(mine, path)
            mine.unlink()
        return path.read_text(encoding="utf-8")

    def update(self, **facts: Any) -> None:
        self.facts.update(facts)
        write_json(self.path, self.facts)
