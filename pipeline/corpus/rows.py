"""One conversation as every stage passes it on: a line of JSON with sorted keys, an id made from its content, a split.

    row = Row.of(source="chat", messages=[{"role": "user", "content": "Hi"}])
    split_of(row.id, calibration=0.02, evaluation=0.02)        # "train" | "calibration" | "evaluation"

Imports neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.artifact import canonical
from pipeline.errors import ArtifactError, DataError

SPLITS = ("train", "calibration", "evaluation")
FINISHED = ("stop", "tool_calls", "function_call")  # finish reasons of an answer that the target itself ended
Message = dict[str, Any]

_STEM = 12  # hex digits of an id that copies of the same content share
_SCALE = 1 << 48


@dataclass(frozen=True)
class Row:
    """A conversation. `finish_reasons` (answers only) has one entry per assistant turn: stop, length, given …"""

    id: str
    source: str
    messages: list[Message]
    tools: list[Any] | None = None
    finish_reasons: list[str] | None = None

    @classmethod
    def of(cls, *, source: str, messages: list[Message], tools: list[Any] | None = None) -> Row:
        return cls(content_id(messages, tools), source, messages, tools)

    def line(self) -> bytes:
        """The row as stored: canonical JSON and a newline. Raises UnicodeEncodeError on a lone surrogate."""
        fields = {"id": self.id, "source": self.source, "messages": self.messages}
        if self.tools is not None:
            fields["tools"] = self.tools
        if self.finish_reasons is not None:
            fields["finish_reasons"] = self.finish_reasons
        return canonical(fields) + b"\n"

    @classmethod
    def parse(cls, line: bytes | str) -> Row:
        return cls(**json.loads(line))


def content_id(messages: list[Message], tools: list[Any] | None) -> str:
    """16 hex digits of the SHA-256 of messages and tools: equal chats have equal ids whatever file they came in."""
    return hashlib.sha256(canonical([messages, tools])).hexdigest()[:16]


def copy_id(row_id: str, copy: int) -> str:
    """Id of the `copy`-th repetition of a row where repetitions are kept; it stays in the original's split.

    Raises DataError for more copies than there are ids that share the original's stem.
    """
    last, room = int(row_id[_STEM:], 16), 16 ** (len(row_id) - _STEM)
    if copy >= room:
        raise DataError(f"row {row_id} stands there more than {room} times; set data.exact_duplicates: true")
    return f"{row_id[:_STEM]}{(last + copy) % room:04x}"


def unit_interval(row_id: str, salt: str) -> int:
    """A fixed whole number in [0, 2^48) for a row: the same in every run, process and library version."""
    return int.from_bytes(hashlib.sha256(f"{salt}:{row_id[:_STEM]}".encode()).digest()[:6], "big")


def split_of(row_id: str, *, calibration: float, evaluation: float) -> str:
    """Split of a row, from its id alone: disjoint, complete, and unchanged when other rows come or go.

    One number is compared with two cut points, so no rounding can put a row into two splits.
    """
    value = unit_interval(row_id, "split")
    if value < int(evaluation * _SCALE):
        return "evaluation"
    if value < int(evaluation * _SCALE) + int(calibration * _SCALE):
        return "calibration"
    return "train"


def sampled(row_id: str, weight: float) -> bool:
    """Whether a row is among the `weight` share that a source keeps."""
    return weight >= 1.0 or unit_interval(row_id, "weight") < int(weight * _SCALE)


def read_rows(path: Path) -> Iterator[Row]:
    """Rows of a published text shard. Raises ArtifactError naming the line that is damaged."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield Row.parse(line)
            except (ValueError, TypeError) as error:
                raise ArtifactError(f"{path}:{number}: not a row of this format ({error})") from error


def shard_name(split: str, index: int, suffix: str = ".jsonl") -> str:
    return f"{split}-{index:05d}{suffix}"


def shards_of(manifest: dict[str, Any], split: str) -> list[str]:
    """File names of one split's shards, from an artifact's manifest, in order."""
    return [fact["file"] for fact in manifest["shards"] if fact["file"].startswith(f"{split}-")]
