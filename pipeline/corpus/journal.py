"""A shard's answers as they come in, so that a kill loses nothing that a server has already said.

    with Journal(folder / "train-00003.jsonl") as journal:
        journal.get(row_id, turn)                          # an answer of an earlier attempt, or None
        journal.add(row_id, turn, message, reason)

One line per answer, keyed by row id and turn, in the order of completion: resuming never counts lines. A half-written
last line is cut off when the journal is opened; if an answer stands twice the first one holds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

from pipeline.files import storage_error


class Journal:
    """Append-only, one writer. Everything known is in memory: one shard's answers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[tuple[str, int], tuple[dict[str, Any], str]] = {}
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Journal:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a+b")
        self._file.truncate(self._read(self._file))
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def remove(self) -> None:
        """The shard is published: its journal has done its work."""
        self.close()
        self.path.unlink(missing_ok=True)

    def get(self, row_id: str, turn: int) -> tuple[dict[str, Any], str] | None:
        return self.known.get((row_id, turn))

    def add(self, row_id: str, turn: int, message: dict[str, Any], reason: str) -> None:
        """Raises StorageError when there is no room: an open file's own error would not name it."""
        assert self._file is not None
        line = json.dumps({"id": row_id, "turn": turn, "message": message, "finish_reason": reason})
        try:
            self._file.write(line.encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise storage_error(self.path, error) or error from None
        self.known[row_id, turn] = (message, reason)

    def _read(self, file: IO[bytes]) -> int:
        """Take in every whole line; returns the length of the part that is sound."""
        file.seek(0)
        sound = 0
        for line in file:
            try:
                entry = json.loads(line)
                key, value = (entry["id"], entry["turn"]), (entry["message"], entry["finish_reason"])
            except (ValueError, KeyError, TypeError):
                break
            if not line.endswith(b"\n"):
                break
            self.known.setdefault(key, value)
            sound += len(line)
        return sound
