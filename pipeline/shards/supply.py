"""Where a rolling cache's shards come from: the target computes them, or they are copied from a finished cache.

    supply = Computed(rows, artifact, target, spec, batch_tokens=8192)
    supply = Copied(rows, artifact, ShardStream(Remote(url), spec, facts))
    supply.shard(3)                                    # published in the artifact as rolling/train-00003.tar
    supply.held([17, 230])                             # these rows, from whatever shards, as the validation tar

Both publish the same members. A copy is written anew as it arrives, so it needs no index from elsewhere; it is
published once the shard's account is settled (see `ShardStream.rows`), and every row must be the row of the local
tokens, because a corpus answered elsewhere may differ under the same fingerprint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol

import numpy as np
from torch import Tensor

from pipeline.artifact import Artifact
from pipeline.errors import DataError
from pipeline.shards.builder import Builder, Network, TokenRow
from pipeline.shards.layout import Spec
from pipeline.shards.record import Encoded
from pipeline.shards.remote import retried
from pipeline.shards.rolling import VALIDATION, rolling_name
from pipeline.shards.stream import ShardStream
from pipeline.shards.tokenrows import TokenRows
from pipeline.shards.writer import ShardWriter


class Supply(Protocol):
    """Publishes what the feeder asks for."""

    def shard(self, number: int) -> None: ...

    def held(self, numbers: Sequence[int]) -> None:
        """The validation tar: samples `numbers`, whose places in the list become their rows."""
        ...


class Computed:
    """The target reads the token rows."""

    def __init__(
        self,
        rows: TokenRows,
        artifact: Artifact,
        target: Network,
        spec: Spec,
        *,
        batch_tokens: int,
        channel_rms_LD: Tensor | None = None,
    ) -> None:
        self._rows, self._artifact = rows, artifact
        self._builder = partial(Builder, target, spec, batch_tokens=batch_tokens, channel_rms_LD=channel_rms_LD)

    def shard(self, number: int) -> None:
        self._build(rolling_name(self._rows.files[number]), number, self._rows.shard(number))

    def held(self, numbers: Sequence[int]) -> None:
        self._build(VALIDATION, len(self._rows.files), [self._rows.row(number) for number in numbers])

    def _build(self, name: str, shard: int, rows: Sequence[TokenRow]) -> None:
        with self._builder() as builder:
            builder.build(self._artifact, name, shard=shard, rows=rows)


class Copied:
    """A finished cache under a URL is read, one whole shard at a time."""

    def __init__(self, rows: TokenRows, artifact: Artifact, stream: ShardStream) -> None:
        self._rows, self._artifact, self._stream = rows, artifact, stream

    def shard(self, number: int) -> None:
        name = rolling_name(self._rows.files[number])
        retried(lambda: self._write(name, number, self._arriving(number)))

    def held(self, numbers: Sequence[int]) -> None:
        self._write(VALIDATION, len(self._rows.files), self._picked(numbers))

    def _write(self, name: str, shard: int, rows: Iterable[tuple[int, Encoded]]) -> None:
        with self._artifact.shard(name) as published:
            with ShardWriter(published.path, self._stream.spec, shard=shard) as writer:
                for row, encoded in rows:
                    meta = encoded.metadata
                    turn = int(meta.get("turn", "0"))
                    writer.add(row=row, tensors=encoded.tensors, id=meta["id"], source=meta["source"], turn=turn)
            published.row.update(writer.facts())

    def _arriving(self, number: int) -> Iterator[tuple[int, Encoded]]:
        """(row, row as stored) of a shard, compared with the tokens here. Raises DataError where they differ."""
        ours = self._rows.shard(number)
        for row, encoded in self._stream.rows(number):
            tensors = encoded.tensors
            if not (
                row < len(ours)
                and np.array_equal(tensors["ids"].numpy(), ours[row].ids)
                and np.array_equal(tensors["mask"].numpy(), ours[row].mask)
            ):
                raise DataError(
                    f"{self._stream.remote.where(self._stream.shards[number]['file'])}: row {row} was made of other "
                    f"tokens than those of {self._rows.files[number]} here (answers sampled twice?). Copy the tokens "
                    "artifact from where the cache was built"
                )
            yield row, encoded

    def _picked(self, numbers: Sequence[int]) -> Iterator[tuple[int, Encoded]]:
        """Held-out rows by their places. Every shard that has some is read as a whole: only so its account settles."""
        index = self._rows.index
        wanted: dict[int, dict[int, int]] = {}
        for place, number in enumerate(numbers):
            wanted.setdefault(index.shard_of(number), {})[int(index.row[number])] = place
        for shard, places in wanted.items():
            yield from retried(partial(self._some, shard, places))

    def _some(self, shard: int, places: dict[int, int]) -> list[tuple[int, Encoded]]:
        return [(places[row], encoded) for row, encoded in self._arriving(shard) if row in places]
