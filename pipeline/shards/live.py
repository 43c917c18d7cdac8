"""Rows of a live target: the frozen target runs when a row is asked for, and nothing is stored.

    reader = LiveReader(tokens, target, spec, read=read_tokens, layers=(1, 7, 14))
    samples = reader.batch(numbers, dtype=torch.float32)

Offers what `ShardReader` offers to training: `index`, `spec`, `encoded` (ids and mask only), `batch`, `order`. Numbers,
order and kept positions are those a cache of the same tokens would have, so a run sees the same rows at the same steps.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.artifact import Artifact
from pipeline.errors import DataError
from pipeline.shards.batches import bucket
from pipeline.shards.builder import Network, TokenRow, padded_ids
from pipeline.shards.index import index_tokens
from pipeline.shards.layout import CONVENTION, Spec, kept_positions
from pipeline.shards.record import Encoded, Sample, Teacher

_SHARDS_KEPT = 24  # the order moves within 16 shards at a time

ReadShard = Callable[[Any], Iterable[TokenRow]]


class LiveReader:
    """Reads token rows of a finished `tokens` artifact and runs the target over them."""

    def __init__(
        self,
        tokens: Artifact,
        target: Network,
        spec: Spec,
        *,
        read: ReadShard,
        layers: Sequence[int],
        batch_tokens: int = 8192,
    ) -> None:
        """`read` gives the rows of one token shard (`pipeline.corpus.tokens.read_tokens`)."""
        tokens.check_sizes()
        self._tokens, self._target, self._read, self._batch_tokens = tokens, target, read, batch_tokens
        self.spec = spec
        self.summary = {**spec.summary(), "layers": list(layers), "layer_convention": CONVENTION, "post_norm": True}
        self.channel_rms_LD = None
        self._files = tuple(str(fact["file"]) for fact in tokens.manifest()["shards"])
        self._shards: OrderedDict[int, list[TokenRow]] = OrderedDict()
        self._lock = threading.RLock()
        self.index = index_tokens(tokens.path, self._files, read)

    def __len__(self) -> int:
        return len(self.index)

    def order(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """See `Index.order`."""
        return self.index.order(seed, epoch)

    def row(self, number: int) -> TokenRow:
        """The token row behind a sample number."""
        shard = self.index.shard_of(number)
        with self._lock:
            rows = self._shards.get(shard)
            if rows is None:
                rows = self._shards[shard] = list(self._read(self._tokens.path / self._files[shard]))
                if len(self._shards) > _SHARDS_KEPT:
                    self._shards.popitem(last=False)
            self._shards.move_to_end(shard)
        return rows[int(self.index.row[number])]

    def encoded(self, number: int) -> Encoded:
        """Ids and mask of a row, without running the target."""
        row = self.row(number)
        tensors = {"ids": torch.from_numpy(row.ids.copy()), "mask": torch.from_numpy(row.mask.copy())}
        return Encoded(tensors, {"id": row.id, "source": row.source, "turn": str(row.turn)})

    def batch(
        self, numbers: Iterable[int], *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> list[Sample]:
        """Run the target over these rows. Raises DataError when a row's states are not finite."""
        rows = [self.row(int(number)) for number in numbers]
        out: list[Sample | None] = [None] * len(rows)
        with self._lock:
            for places in bucket([len(row.ids) for row in rows], self._batch_tokens):
                for place, sample in zip(places, self._forward([rows[place] for place in places], dtype), strict=True):
                    out[place] = sample if device is None else _moved(sample, device)
        return [sample for sample in out if sample is not None]

    def _forward(self, rows: Sequence[TokenRow], dtype: torch.dtype) -> list[Sample]:
        device = self._target.device
        ids_BT = padded_ids(rows).to(device)
        result = self._target.forward(ids_BT)
        samples = []
        for index, row in enumerate(rows):
            length = len(row.ids)
            kept = torch.from_numpy(kept_positions(row.mask, self.spec.positions)).to(device)
            taps_TLD, hidden_PD = result.taps_BTLD[index, :length].to(dtype), result.last_hidden_BTD[index, kept]
            if not (torch.isfinite(taps_TLD).all() and torch.isfinite(hidden_PD).all()):
                raise DataError(f"row {row.id}: the target's states are not finite; a cache would leave it out")
            mask = torch.from_numpy(row.mask.copy()).bool().to(device)
            teacher = Teacher("last_hidden", kept, hidden_PD=hidden_PD)
            samples.append(Sample(row.id, row.source, row.turn, ids_BT[index, :length], mask, taps_TLD, teacher))
        return samples


def _moved(sample: Sample, device: torch.device | str) -> Sample:
    teacher = sample.teacher
    assert teacher.hidden_PD is not None
    return Sample(
        sample.id, sample.source, sample.turn, sample.ids_T.to(device), sample.mask_T.to(device),
        sample.taps_TLD.to(device),
        Teacher(teacher.kind, teacher.positions_P.to(device), hidden_PD=teacher.hidden_PD.to(device)),
    )  # fmt: skip
