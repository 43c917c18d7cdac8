"""Token shards as random-access rows: what training needs of a row besides the target's states."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.artifact import Artifact
from pipeline.shards.builder import TokenRow
from pipeline.shards.index import WINDOW, Index, index_tokens
from pipeline.shards.record import Encoded

_SHARDS_KEPT = 24  # an epoch moves within a window of shards at a time

ReadShard = Callable[[Path], Iterable[TokenRow]]


class TokenRows:
    """Rows of a finished `tokens` artifact. `read` gives those of one shard (`pipeline.corpus.tokens.read_tokens`).

    Rows in `left_out` (file -> rows) have no number: a cache elsewhere is known not to hold them.
    """

    def __init__(
        self,
        tokens: Artifact,
        read: ReadShard,
        *,
        window: int = WINDOW,
        left_out: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        tokens.check_sizes()
        self._tokens, self._read = tokens, read
        self.files = tuple(str(fact["file"]) for fact in tokens.manifest()["shards"])
        self.index: Index = index_tokens(tokens.path, self.files, read, window=window, left_out=left_out)
        self._shards: OrderedDict[int, list[TokenRow]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.index)

    def order(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """See `Index.order`."""
        return self.index.order(seed, epoch)

    def shard(self, number: int) -> list[TokenRow]:
        """All rows of one token shard; the last few stay in memory."""
        with self._lock:
            rows = self._shards.get(number)
            if rows is None:
                rows = self._shards[number] = list(self._read(self._tokens.path / self.files[number]))
                if len(self._shards) > _SHARDS_KEPT:
                    self._shards.popitem(last=False)
            self._shards.move_to_end(number)
            return rows

    def row(self, number: int) -> TokenRow:
        """The token row behind a sample number."""
        return self.shard(self.index.shard_of(number))[int(self.index.row[number])]

    def encoded(self, number: int) -> Encoded:
        """Ids and mask of a row, without the target's states."""
        row = self.row(number)
        tensors = {"ids": torch.from_numpy(row.ids.copy()), "mask": torch.from_numpy(row.mask.copy())}
        return Encoded(tensors, {"id": row.id, "source": row.source, "turn": str(row.turn)})
