"""Rows of a live target: the frozen target runs when a row is asked for, and nothing is stored.

    reader = LiveReader(tokens, target, spec, read=read_tokens, layers=(1, 7, 14))
    samples = reader.batch(numbers, dtype=torch.float32)

Offers what `ShardReader` offers to training: `index`, `spec`, `encoded` (ids and mask only), `batch`, `order`. Numbers,
order and kept positions are those a cache of the same tokens would have, so a run sees the same rows at the same steps.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch

from pipeline.artifact import Artifact
from pipeline.errors import DataError
from pipeline.shards.batches import bucket
from pipeline.shards.builder import Network, TokenRow, padded_ids
from pipeline.shards.layout import CONVENTION, Spec, kept_positions
from pipeline.shards.record import Sample, Teacher
from pipeline.shards.tokenrows import ReadShard, TokenRows


class LiveReader(TokenRows):
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
        super().__init__(tokens, read)
        self._target, self._batch_tokens = target, batch_tokens
        self.spec = spec
        self.summary = {**spec.summary(), "layers": list(layers), "layer_convention": CONVENTION, "post_norm": True}
        self.channel_rms_LD = None
        self._running = threading.Lock()  # reader threads share the one target

    def batch(
        self, numbers: Iterable[int], *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> list[Sample]:
        """Run the target over these rows. Raises DataError when a row's states are not finite."""
        rows = [self.row(int(number)) for number in numbers]
        out: list[Sample | None] = [None] * len(rows)
        with self._running:
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
