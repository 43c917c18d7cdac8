"""First pass over the corpus: each unit becomes sorted parts on disk, in parallel and in bounded memory.

    PartWriter(folder, config.data).run(unit)         # folder/00-00003.json says it is done, and what it found

A part is `<unit>-<n>.jsonl` (rows as they will be published, sorted by id) beside `<unit>-<n>.npy` (one `INDEX` record
per row: id, where it lies, where it came from) and, where near-duplicates are looked for, `<unit>-<n>.sig.npy` (MinHash
signatures). The second pass reads only these. Every raw row is a stored row or a counted skip.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from pipeline.artifact import atomic_path, write_json
from pipeline.config import Data
from pipeline.corpus.duplicates import Signer
from pipeline.corpus.files import BLANK, Raw
from pipeline.corpus.leaks import Leaks
from pipeline.corpus.normalise import Skip, normalise
from pipeline.corpus.rows import Row, sampled
from pipeline.corpus.sources import Unit, read_unit

PART_ROWS = 4_000
PART_BYTES = 16 << 20

INDEX = np.dtype(
    [
        ("id", "<u8"),
        ("offset", "<u4"),
        ("length", "<u4"),
        ("line", "<u4"),
        ("file", "<u4"),  # into the unit's list of file names
        ("source", "<u4"),  # into the unit's list of source names
    ]
)


@dataclass
class _Found:
    """What one unit turned out to hold; becomes `<unit>.json`."""

    rows_in: int = 0
    rows_out: int = 0
    last_line: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    parts: list[str] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)  # name → its number
    sources: dict[str, int] = field(default_factory=dict)
    read: Counter[str] = field(default_factory=Counter)  # usable rows of each source before any removal


class _Buffer:
    """Rows of a part on their way to disk."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.facts: list[tuple[int, int, int, int, int]] = []  # id, order, line, file, source
        self.signatures: list[np.ndarray] = []
        self.size_bytes = 0

    @property
    def full(self) -> bool:
        return len(self.lines) >= PART_ROWS or self.size_bytes >= PART_BYTES

    def add(self, line: bytes, facts: tuple[int, int, int, int, int]) -> None:
        self.lines.append(line)
        self.facts.append(facts)
        self.size_bytes += len(line)

    def publish(self, folder: Path, name: str) -> None:
        order = sorted(range(len(self.lines)), key=lambda row: self.facts[row][:2])
        index = np.zeros(len(order), INDEX)
        offset = 0
        for place, row in enumerate(order):
            row_id, _, line, file, source = self.facts[row]
            index[place] = (row_id, offset, len(self.lines[row]), line, file, source)
            offset += len(self.lines[row])
        with atomic_path(folder / f"{name}.jsonl") as path, path.open("wb") as out:
            out.writelines(self.lines[row] for row in order)
        save_array(folder / f"{name}.npy", index)
        if self.signatures:
            save_array(folder / f"{name}.sig.npy", np.stack([self.signatures[row] for row in order]))


def save_array(path: Path, array: np.ndarray) -> None:
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.save(file, array)


@dataclass(frozen=True)
class PartWriter:
    """Turns units into parts. Picklable: worker processes each get a copy."""

    folder: Path
    data: Data
    leaks: Leaks | None = None
    signer: Signer | None = None

    def done(self, unit: Unit) -> bool:
        return self._meta(unit).exists()

    def run(self, unit: Unit) -> int:
        """Read a unit and publish its parts; `<unit>.json`, written last, proves that all are there.

        Returns the number of raw rows read.
        """
        if self.done(unit):
            return 0
        found, buffer = _Found(), _Buffer()
        with (
            atomic_path(self.folder / f"{unit.key}.skipped.jsonl") as path,
            path.open("w", encoding="utf-8") as listing,
        ):
            for order, raw in enumerate(read_unit(unit)):
                found.last_line = raw.line
                if raw.problem == BLANK:
                    continue
                found.rows_in += 1
                try:
                    self._store(raw, order, unit, found, buffer)
                except Skip as skip:
                    _note(listing, found, raw, skip)
                if buffer.full:
                    self._publish(buffer, unit, found)
                    buffer = _Buffer()
            self._publish(buffer, unit, found)
        names = {"files": list(found.files), "sources": list(found.sources)}
        write_json(self._meta(unit), {**vars(found), **names, "key": unit.key, "first_line": unit.pieces[0].first_line})
        return found.rows_in

    def _store(self, raw: Raw, order: int, unit: Unit, found: _Found, buffer: _Buffer) -> None:
        if raw.problem is not None:
            raise Skip(raw.problem, raw.detail)
        try:
            source, messages, tools = normalise(
                raw.value, roles=self.data.roles, name=unit.source.name, default_source=unit.default_name
            )
            row = Row.of(source=source, messages=messages, tools=tools)
            line = row.line()
        except UnicodeEncodeError as error:
            raise Skip("bad_unicode", str(error)) from error
        except (ValueError, TypeError, RecursionError) as error:  # NaN, dates, endless nesting: in tools and calls
            raise Skip("not_json", str(error)) from error
        found.read[source] += 1
        if not sampled(row.id, unit.source.weight):
            raise Skip("not_sampled")
        if self.leaks is not None:
            self.leaks.check(row)
        if self.signer is not None:
            buffer.signatures.append(self.signer(row))
        file = found.files.setdefault(raw.file, len(found.files))
        named = found.sources.setdefault(source, len(found.sources))
        buffer.add(line, (int(row.id, 16), order, raw.line, file, named))

    def _publish(self, buffer: _Buffer, unit: Unit, found: _Found) -> None:
        if buffer.lines:
            name = f"{unit.key}-{len(found.parts):04d}"
            buffer.publish(self.folder, name)
            found.parts.append(name)
            found.rows_out += len(buffer.lines)

    def _meta(self, unit: Unit) -> Path:
        return self.folder / f"{unit.key}.json"


def _note(listing: IO[str], found: _Found, raw: Raw, skip: Skip) -> None:
    found.skipped[skip.reason] += 1
    if skip.reason != "not_sampled":
        entry: dict[str, Any] = {"file": raw.file, "line": raw.line, "reason": skip.reason, **skip.facts}
        listing.write(json.dumps(entry, sort_keys=True) + "\n")
