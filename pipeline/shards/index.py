"""Which samples an artifact holds, where they lie, and the order an epoch reads them in."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

WINDOW = 16


@dataclass(frozen=True)
class Index:
    """All samples of an artifact, shard after shard and by row within a shard (not as they lie in the tar, which
    depends on how batches were formed). Arrays have one entry per sample unless said otherwise.
    """

    files: tuple[str, ...]
    """one per shard"""
    first: NDArray[np.int64]
    """number of the first sample of each shard, and the total as last entry"""
    row: NDArray[np.int64]
    offset: NDArray[np.int64]
    bytes: NDArray[np.int64]
    tokens: NDArray[np.int64]
    supervised: NDArray[np.int64]
    ids: tuple[str, ...]
    window: int = WINDOW
    """shards whose samples are mixed"""

    def __len__(self) -> int:
        return int(self.first[-1])

    @classmethod
    def of(cls, rows: Sequence[tuple[str, dict[str, Any]]], *, window: int = WINDOW) -> Index:
        """From (file, index columns) per shard."""
        counts = [len(columns["row"]) for _, columns in rows]
        by_row = [np.argsort(np.asarray(columns["row"], dtype=np.int64)) for _, columns in rows]
        arrays = {
            name: np.concatenate(
                [
                    np.asarray(columns[name], dtype=np.int64)[places]
                    for (_, columns), places in zip(rows, by_row, strict=True)
                ]
                or [np.zeros(0, np.int64)]
            )
            for name in ("row", "offset", "bytes", "tokens", "supervised")
        }
        ids = tuple(columns["id"][place] for (_, columns), places in zip(rows, by_row, strict=True) for place in places)
        return cls(
            tuple(file for file, _ in rows), np.cumsum([0, *counts], dtype=np.int64), ids=ids, window=window, **arrays
        )

    def order(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """Permutation of all samples, a pure function of (seed, epoch).

        Shards are shuffled, then samples are shuffled within windows of `window` consecutive shards: while a window is
        read, only its files are touched, which is what parallel file systems and page caches like.
        """
        random = np.random.default_rng([seed, epoch, 0x5A])
        out = np.empty(len(self), dtype=np.int64)
        at = 0
        for shards in self._windows(random):
            mixed = random.permutation(np.concatenate([np.arange(self.first[s], self.first[s + 1]) for s in shards]))
            out[at : at + len(mixed)] = mixed
            at += len(mixed)
        return out

    def windows(self, seed: int, epoch: int) -> list[list[int]]:
        """The shards of each window of an epoch, in the order they are read."""
        return self._windows(np.random.default_rng([seed, epoch, 0x5A]))

    def _windows(self, random: np.random.Generator) -> list[list[int]]:
        shards = [int(shard) for shard in random.permutation(len(self.files))]
        return [shards[start : start + self.window] for start in range(0, len(shards), self.window)]

    def shard_of(self, number: int) -> int:
        return bisect_right(self._edges, number) - 1

    @cached_property
    def _edges(self) -> list[int]:
        return [int(edge) for edge in self.first]  # bisecting a list is several times faster than numpy for one number


def index_tokens(
    folder: Path,
    files: Sequence[str],
    read: Callable[[Path], Iterable[Any]],
    *,
    window: int = WINDOW,
    left_out: Mapping[str, Sequence[int]] | None = None,
) -> Index:
    """The index a cache of these token shards would have, without offsets: what live and rolling targets go by.

    `left_out`: file -> rows the cache is known not to hold.
    """
    columns = []
    for file in files:
        absent = set((left_out or {}).get(file, ()))
        rows = [(number, row) for number, row in enumerate(read(folder / file)) if number not in absent]
        zeros = [0] * len(rows)
        facts = {
            "row": [number for number, _ in rows],
            "offset": zeros,
            "bytes": zeros,
            "tokens": [len(row.ids) for _, row in rows],
            "supervised": [int(np.count_nonzero(row.mask)) for _, row in rows],
            "id": [row.id for _, row in rows],
        }
        columns.append((file, facts))
    return Index.of(columns, window=window)
