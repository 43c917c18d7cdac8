"""The samples a run trains on, and which of them are held out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.training.batches import held_out


class CachedRows:
    """Rows of a cache or of a live target (`pipeline.shards.reader.ShardReader`, `pipeline.shards.live.LiveReader`)."""

    def __init__(self, reader: Any, dtype: torch.dtype, device: torch.device) -> None:
        """`dtype`: what taps are decoded to, the compute dtype. They are decoded on `device`: fewer bytes travel."""
        self.reader, self.dtype, self.device = reader, dtype, device
        self.lengths: Sequence[int] = reader.index.tokens
        self.num_taps, self.hidden_size = reader.spec.num_taps, reader.spec.hidden_size
        self.kept = min(reader.spec.topk, reader.spec.vocab_size) if reader.spec.logits == "topk" else None

    def tokens(self, row: int) -> tuple[str, Tensor, Tensor]:
        encoded = self.reader.encoded(row)
        return key_of(encoded.metadata), encoded.tensors["ids"], encoded.tensors["mask"]

    def read(self, rows: Sequence[int]) -> list[Any]:
        return list(self.reader.batch(rows, dtype=self.dtype, device=self.device))


def key_of(metadata: Any) -> str:
    """A row's stable name: the conversation and which of its assistant turns is supervised."""
    return f"{metadata['id']}/{metadata.get('turn', '0')}"


class Split:
    """Training and validation rows of an index, and the order of an epoch over the former."""

    def __init__(self, index: Any, fraction: float, seed: int) -> None:
        """`index` is a `pipeline.shards.reader.Index`: `ids`, `supervised`, and `order(seed, epoch)` over all rows."""
        self.index, self.seed = index, seed
        held = np.asarray(held_out(index.ids, fraction), dtype=bool)
        usable = np.asarray(index.supervised) >= 2  # S7: an anchor and a label
        self.training: NDArray[np.bool_] = usable & ~held
        self.validation: NDArray[np.int64] = np.flatnonzero(usable & held)

    @property
    def count(self) -> int:
        return int(self.training.sum())

    def order(self, epoch: int) -> NDArray[np.int64]:
        order = self.index.order(self.seed, epoch)
        return np.asarray(order[self.training[order]], dtype=np.int64)
