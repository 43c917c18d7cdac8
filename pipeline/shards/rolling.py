"""A cache that never holds more than a budget: shards come just ahead of training and are deleted behind it.

    reader = RollingReader(tokens, artifact, spec, …)      # in every training rank: waits for the shards it needs
    feeder = Feeder(rows, artifact, supply, spec, …)       # in one process: see pipeline.shards.feeder

Ranks say where they are (`marks/<rank>.json`: the window of the epoch's shard order they read, and the shards they wait
for); the feeder keeps what the marks ask for next and deletes the rest. Marks only steer: a shard that was deleted too
early, or is asked for again after a resume, is built again with the same content, so nothing is lost or trained twice
whatever happens to marks, feeder or ranks. A rank waits for one shard at a time and copies what it reads, so any budget
that holds the validation rows and one window moves.
"""

from __future__ import annotations

import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.artifact import Artifact
from pipeline.errors import ArtifactError, DataError
from pipeline.shards.index import Index
from pipeline.shards.layout import TAR_BLOCK, Spec
from pipeline.shards.record import Encoded, Sample, decode_all, unpack
from pipeline.shards.tokenrows import ReadShard, TokenRows

WINDOW = 4  # shards whose samples are mixed: smaller than a full cache's, because a window must fit the budget
VALIDATION = "rolling/validation.tar"
_POLL_SECONDS = 0.05


def rolling_name(file: str) -> str:
    """train-00003.parquet -> rolling/train-00003.tar"""
    return "rolling/" + file.removesuffix(".parquet") + ".tar"


@dataclass
class Mark:
    """Where a rank of `world` is: window `window` of epoch `epoch`; `waits` are shards it cannot go on without."""

    epoch: int = 0
    window: int = 0
    waits: tuple[int, ...] = ()
    world: int = 1

    def write(self, folder: Path, rank: int) -> None:
        """Replace the rank's mark. Not synced to disk: a lost mark costs a little waiting, nothing else."""
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{rank:05d}"
        temporary.write_text(json.dumps(asdict(self)), encoding="utf-8")
        temporary.replace(folder / f"{rank:05d}.json")

    @classmethod
    def read(cls, folder: Path) -> list[Mark]:
        """Marks of all ranks; one that has not written yet stands at the start."""
        first = cls._read(folder, 0)
        return [first, *(cls._read(folder, rank) for rank in range(1, first.world))]

    @classmethod
    def _read(cls, folder: Path, rank: int) -> Mark:
        try:
            facts = json.loads((folder / f"{rank:05d}.json").read_text(encoding="utf-8"))
            return cls(int(facts["epoch"]), int(facts["window"]), tuple(facts["waits"]), int(facts["world"]))
        except (OSError, ValueError, KeyError):
            return cls()


@dataclass(frozen=True)
class _Watched(Index):
    """An index that tells which epoch's order was asked for."""

    asked: Callable[[int], None] = lambda epoch: None

    def order(self, seed: int, epoch: int) -> NDArray[np.int64]:
        self.asked(epoch)
        return super().order(seed, epoch)


class RollingReader(TokenRows):
    """What `ShardReader` is to a finished cache. `alive` raises when the feeder is gone; it is called while waiting."""

    def __init__(
        self,
        tokens: Artifact,
        artifact: Artifact,
        spec: Spec,
        *,
        read: ReadShard,
        summary: dict[str, Any],
        validation: Callable[[Sequence[str]], Sequence[bool]],
        seed: int,
        rank: int = 0,
        world: int = 1,
        alive: Callable[[], None] = lambda: None,
        channel_rms_LD: Tensor | None = None,
        left_out: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """`validation` tells from the ids which rows are held out: they lie in a tar that stays."""
        super().__init__(tokens, read, window=WINDOW, left_out=left_out)
        self.spec, self.summary, self.channel_rms_LD = spec, summary, channel_rms_LD
        held = validation_rows(self.index.ids, validation)
        self.validation = {number: place for place, number in enumerate(held)}
        self._artifact, self._seed, self._alive = artifact, seed, alive
        self._rank, self._world = rank, world
        self._mark, self._waits = Mark(), list[int]()
        self._places: dict[int, dict[int, int]] = {}
        self._rows: dict[str, dict[str, Any]] = {}
        self._marking = threading.Lock()  # reader threads share the mark
        self._started = False
        facts = {field.name: getattr(self.index, field.name) for field in fields(self.index)}
        self.index = _Watched(**facts, asked=self._begin)
        self._write_mark()

    def batch(
        self, numbers: Iterable[int], *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> list[Sample]:
        """Decode these samples, waiting for their shards where they are not built yet."""
        rows = [self._stored(int(number)) for number in numbers]
        return decode_all(rows, self.spec, self.channel_rms_LD, dtype=dtype, device=device)

    # -------------------------------------------------------------------------------------------- one sample

    def _stored(self, number: int) -> Encoded:
        shard = self.index.shard_of(number)
        pinned = number in self.validation
        name = VALIDATION if pinned else rolling_name(self.files[shard])
        if not pinned:
            self._move_to(shard)
        key = self.validation[number] if pinned else int(self.index.row[number])
        data = self._try(name, key, number)
        if data is None:
            with nullcontext() if pinned else self._waiting_for(shard):
                while (data := self._try(name, key, number)) is None:
                    self._alive()
                    time.sleep(_POLL_SECONDS)
        return unpack(data, self.spec, where=f"{self._artifact.path / name}: sample {self.index.ids[number]}")

    def _try(self, name: str, key: int, number: int) -> bytearray | None:
        """The member's bytes, or None while its shard is not there (or is being replaced)."""
        row = self._rows.get(name)
        if row is None:
            row = self._artifact.row(name)
            if row is None:
                return None
            self._rows[name] = row
        index = row["index"]
        try:
            place = index["row"].index(key)
        except ValueError:
            raise DataError(
                f"row {self.index.ids[number]}: its states or logits are not finite; a finished cache leaves such rows "
                "out, a rolling one cannot know them in advance. Remove the row, or use targets.mode: cached"
            ) from None
        try:
            with (self._artifact.path / name).open("rb") as file:
                data = os.pread(file.fileno(), TAR_BLOCK + index["bytes"][place], index["offset"][place] - TAR_BLOCK)
        except FileNotFoundError:
            data = b""
        head = TAR_BLOCK + index["head"][place]
        if len(data) != TAR_BLOCK + index["bytes"][place] or zlib.crc32(data[:head]) != index["crc"][place]:
            if self._artifact.row(name) == row:
                raise ArtifactError(f"{self._artifact.path / name}: member {place} is not what its index says")
            self._rows.pop(name, None)
            return None
        return bytearray(data[TAR_BLOCK:])

    # -------------------------------------------------------------------------------------------- where we are

    def _begin(self, epoch: int) -> None:
        """The first epoch a run asks for is where it starts, also after a resume."""
        with self._marking:
            if not self._started:
                self._started, self._mark = True, Mark(epoch)

    @contextmanager
    def _waiting_for(self, shard: int) -> Iterator[None]:
        with self._marking:
            self._waits.append(shard)
            self._write_mark()
        try:
            yield
        finally:
            with self._marking:
                self._waits.remove(shard)
                self._write_mark()

    def _move_to(self, shard: int) -> None:
        """Follow the order: the shard's window in this epoch, or in the next when this epoch is past it."""
        with self._marking:
            epoch = self._mark.epoch
            window = self._place(epoch, shard)
            if window < self._mark.window - 1:  # readers work ahead a little, so one window back is still this epoch
                epoch, window = epoch + 1, self._place(epoch + 1, shard)
            if (epoch, window) > (self._mark.epoch, self._mark.window):
                self._mark = Mark(epoch, window)
                self._write_mark()

    def _write_mark(self) -> None:
        mark = Mark(self._mark.epoch, self._mark.window, tuple(self._waits), self._world)
        mark.write(self._artifact.path / "marks", self._rank)

    def _place(self, epoch: int, shard: int) -> int:
        if epoch not in self._places:
            windows = self.index.windows(self._seed, epoch)
            self._places = {e: places for e, places in self._places.items() if e >= epoch - 1}
            self._places[epoch] = {s: number for number, shards in enumerate(windows) for s in shards}
        return self._places[epoch][shard]


def validation_rows(ids: Sequence[str], held: Callable[[Sequence[str]], Sequence[bool]]) -> list[int]:
    """Numbers of the held-out rows, ascending: the order they lie in the validation tar's rows."""
    return [number for number, flag in enumerate(held(ids)) if flag]
