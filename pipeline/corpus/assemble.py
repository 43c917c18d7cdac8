"""Second pass over the corpus: decide over all rows at once, then publish shards of a fixed size.

    plan = Assembly(folder, units, config.data)
    plan.decide()                                     # exact and near duplicates, splits; bounded memory
    for name in plan.shards(): ...                    # train-00000.jsonl …
        plan.write(name, path)

Rows of a split are ordered by id. An id is a hash, so this is a fixed shuffle that mixes the sources in every shard and
depends neither on file order nor on the number of processes. In memory: below 50 bytes a row.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.artifact import Artifact, read_json
from pipeline.config import Data, NearDuplicates
from pipeline.corpus.duplicates import Signatures, near_duplicates
from pipeline.corpus.parts import save_array
from pipeline.corpus.rows import SPLITS, Row, copy_id, shard_name, split_of
from pipeline.corpus.sources import Unit

_PLACE = np.dtype([("id", "<u8"), ("part", "<u4"), ("row", "<u4")])
_REMOVED = np.dtype(
    [("id", "<u8"), ("kept", "<u8"), ("part", "<u4"), ("row", "<u4"), ("reason", "u1"), ("score", "<f4")]
)
_REASONS = ("duplicate", "near_duplicate")
# Reasons that are no fault of the row: they never count against max_skip_fraction.
REMOVALS = ("not_sampled", "duplicate", "near_duplicate", "contaminated")


@dataclass
class Assembly:
    """All parts of a data stage. Cheap to make: everything is read when asked for."""

    folder: Path
    units: list[Unit]
    data: Data

    @property
    def ready(self) -> bool:
        """Whether every unit was read, by whichever process."""
        return all((self.folder / f"{unit.key}.json").exists() for unit in self.units)

    @cached_property
    def found(self) -> list[dict[str, Any]]:
        return [read_json(self.folder / f"{unit.key}.json") for unit in self.units]

    @cached_property
    def parts(self) -> list[tuple[int, str]]:
        """(index of the unit, part name), in order."""
        return [(number, name) for number, found in enumerate(self.found) for name in found["parts"]]

    def index(self, part: int) -> np.ndarray:
        return np.load(self.folder / f"{self.parts[part][1]}.npy")

    # ---------------------------------------------------------------------------------------- decisions

    def decide(self) -> None:
        """Write `removed.npy` and `plan-<split>.npy`: the rows that go, and the rows of each split in order."""
        places = _by_id(self._places())
        places, removed = self._without_copies(places)
        if self.data.near_duplicates is not None:
            places, near = self._without_near_copies(places, self.data.near_duplicates)
            removed = np.concatenate([removed, near])
        save_array(self.folder / "removed.npy", removed)
        for split, rows in self._split(places).items():
            save_array(self.folder / f"plan-{split}.npy", rows)

    def _places(self) -> np.ndarray:
        places = np.zeros(sum(found["rows_out"] for found in self.found), _PLACE)
        at = 0
        for part in range(len(self.parts)):
            index = self.index(part)
            block = places[at : at + len(index)]
            block["id"], block["part"], block["row"] = index["id"], part, np.arange(len(index))
            at += len(index)
        return places

    def _without_copies(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Keep the first of each id and record the others, or give copies ids of their own where copies are wanted."""
        again = np.zeros(len(places), bool)
        again[1:] = places["id"][1:] == places["id"][:-1]
        if not again.any():
            return places, np.zeros(0, _REMOVED)
        if self.data.exact_duplicates:
            gone = places[again]
            return places[~again], _removed(gone, kept=gone["id"], reason="duplicate", score=1.0)
        copy, original = 0, ""
        for row in np.flatnonzero(again):
            if not again[row - 1]:
                copy, original = 0, f"{int(places['id'][row]):016x}"
            copy += 1
            places["id"][row] = int(copy_id(original, copy), 16)
        return _by_id(places), np.zeros(0, _REMOVED)

    def _without_near_copies(self, places: np.ndarray, settings: NearDuplicates) -> tuple[np.ndarray, np.ndarray]:
        files = [self.folder / f"{name}.sig.npy" for _, name in self.parts]
        gone, kept, score = near_duplicates(Signatures(files, places["part"], places["row"]), settings)
        stays = np.ones(len(places), bool)
        stays[gone] = False
        return places[stays], _removed(places[gone], kept=places["id"][kept], reason="near_duplicate", score=score)

    def _split(self, places: np.ndarray) -> dict[str, np.ndarray]:
        fractions = {"calibration": self.data.calibration_fraction, "evaluation": self.data.evaluation_fraction}
        names = [split_of(f"{int(row_id):016x}", **fractions) for row_id in places["id"]]
        labels = np.array([SPLITS.index(name) for name in names], dtype=np.uint8)
        return {split: places[labels == number] for number, split in enumerate(SPLITS)}

    # ---------------------------------------------------------------------------------------- shards

    def plan(self, split: str) -> np.ndarray:
        return np.load(self.folder / f"plan-{split}.npy", mmap_mode="r")

    def shards(self) -> list[str]:
        size = self.data.shard_rows
        return [shard_name(split, index) for split in SPLITS for index in range(-(-len(self.plan(split)) // size))]

    def write(self, name: str, path: Path) -> dict[str, Any]:
        """Write one shard; returns the facts of its row (samples, sources)."""
        split, _, number = name.removesuffix(".jsonl").rpartition("-")
        size = self.data.shard_rows
        rows = np.array(self.plan(split)[int(number) * size : (int(number) + 1) * size])
        lines: list[bytes] = [b""] * len(rows)
        sources: Counter[str] = Counter()
        for part in np.unique(rows["part"]):
            unit, part_name = self.parts[part]
            index = self.index(part)
            with (self.folder / f"{part_name}.jsonl").open("rb") as file:
                for place in np.flatnonzero(rows["part"] == part):
                    record = index[rows["row"][place]]
                    file.seek(int(record["offset"]))
                    lines[place] = self._line(file.read(int(record["length"])), rows["id"][place], record["id"])
                    sources[self.found[unit]["sources"][record["source"]]] += 1
        with path.open("wb") as out:
            out.writelines(lines)
        return {"samples": len(rows), "sources": dict(sorted(sources.items()))}

    @staticmethod
    def _line(line: bytes, planned_id: np.uint64, stored_id: np.uint64) -> bytes:
        if planned_id == stored_id:
            return line
        return Row(**{**json.loads(line), "id": f"{int(planned_id):016x}"}).line()

    # ---------------------------------------------------------------------------------------- accounts

    def skipped(self) -> Counter[str]:
        """Reason → rows, over all units and all removals: rows in = rows out + these."""
        total: Counter[str] = Counter()
        for found in self.found:
            total.update(found["skipped"])
        for number, reason in enumerate(_REASONS):
            total[reason] += int((self._gone["reason"] == number).sum())
        return +total

    def listing(self) -> Iterator[dict[str, Any]]:
        """Every skipped row with file, line and reason; lines are counted from the start of the file."""
        for number, unit in enumerate(self.units):
            shift = self._lines_before[number]
            with (self.folder / f"{unit.key}.skipped.jsonl").open(encoding="utf-8") as file:
                for line in file:
                    entry = json.loads(line)
                    yield {**entry, "line": entry["line"] + shift}
        yield from self._removals()

    @cached_property
    def _lines_before(self) -> list[int]:
        """Lines of the file that come before each unit: what turns a line of a range into a line of the file."""
        ended: dict[str, int] = {}
        before = []
        for unit, found in zip(self.units, self.found, strict=True):
            name, first = unit.pieces[0].file, found["first_line"]
            before.append(ended.get(name, 0) if first is None else first - 1)
            ended[name] = before[-1] + found["last_line"]
        return before

    @cached_property
    def _gone(self) -> np.ndarray:
        return np.load(self.folder / "removed.npy")

    def _removals(self) -> Iterator[dict[str, Any]]:
        gone = self._gone
        for part in np.unique(gone["part"]):
            unit = self.parts[part][0]
            found, index = self.found[unit], self.index(part)
            for entry in gone[gone["part"] == part]:
                record = index[entry["row"]]
                yield {
                    "file": found["files"][record["file"]],
                    "line": int(record["line"]) + self._lines_before[unit],
                    "reason": _REASONS[entry["reason"]],
                    "source": found["sources"][record["source"]],
                    "id": f"{int(entry['id']):016x}",
                    "kept": f"{int(entry['kept']):016x}",
                    "similarity": round(float(entry["score"]), 3),
                }


@dataclass(frozen=True)
class ShardWriter:
    """Publishes planned shards; picklable, so that worker processes can share the list."""

    artifact: Artifact
    assembly: Assembly

    def publish(self, name: str) -> int:
        """Write one shard; returns its number of rows."""
        with self.artifact.shard(name) as shard:
            shard.row.update(self.assembly.write(name, shard.path))
            return int(shard.row["samples"])


def _by_id(places: np.ndarray) -> np.ndarray:
    """Places ordered by id; copies of one id keep the order in which the sources have them."""
    return places[np.argsort(places["id"], kind="stable")]


def _removed(places: np.ndarray, *, kept: Any, reason: str, score: Any) -> np.ndarray:
    gone = np.zeros(len(places), _REMOVED)
    for name in ("id", "part", "row"):
        gone[name] = places[name]
    gone["kept"], gone["reason"], gone["score"] = kept, _REASONS.index(reason), score
    return gone
