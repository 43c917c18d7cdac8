"""Turns token rows into target shards: forward, encode, write, with the writing beside the next forward.

    with Builder(target, spec, batch_tokens=8192) as builder:
        for shard, rows in work:
            builder.build(artifact, "train-00003.tar", shard=3, rows=rows, advance=bar.advance)

One shard is one unit of work: it is published whole, or not at all. Rows whose states or logits are not finite are left
out, counted (`not_finite`) and listed in the shard's row.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.artifact import Artifact
from pipeline.shards.batches import bucket
from pipeline.shards.codecs import encode_taps
from pipeline.shards.layout import Spec, kept_positions
from pipeline.shards.teacher import Head, encode_logits
from pipeline.shards.writer import ShardWriter
from pipeline.usage import trim

_AHEAD = 2  # encoded batches that may wait for the writer


class TokenRow(Protocol):
    """A row of a token shard: ids int32 [T], mask uint8 [T] (1 = supervised)."""

    @property
    def id(self) -> str: ...

    @property
    def source(self) -> str: ...

    @property
    def turn(self) -> int: ...

    @property
    def ids(self) -> NDArray[np.int32]: ...

    @property
    def mask(self) -> NDArray[np.uint8]: ...


class Network(Protocol):
    """The part of `pipeline.target.Target` needed here."""

    @property
    def frozen(self) -> Head: ...

    @property
    def device(self) -> torch.device: ...

    def forward(self, ids_BT: Tensor) -> Any: ...


@dataclass
class Batch:
    """Encoded rows on their way to the writer; their tensors lie end to end in the order of `rows`."""

    rows: list[int]
    tensors: dict[str, Tensor]
    tokens: list[int]
    positions: list[int]
    finite: Tensor


Job = tuple["queue.Queue[Batch | None]", "Future[None]"]


class Builder:
    """`write=False` runs the forwards only: the other ranks of a tensor-parallel target."""

    def __init__(
        self,
        target: Network,
        spec: Spec,
        *,
        batch_tokens: int,
        channel_rms_LD: Tensor | None = None,
        write: bool = True,
    ) -> None:
        self._target, self._spec, self._batch_tokens = target, spec, batch_tokens
        self._rms = None if channel_rms_LD is None else channel_rms_LD.to(target.device)
        self._write = write
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shard-writer")
        self._jobs: list[Future[None]] = []

    def __enter__(self) -> Builder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True)
        if kind is None:
            self._raise_failed()

    def build(
        self,
        artifact: Artifact,
        name: str,
        *,
        shard: int,
        rows: Sequence[TokenRow],
        advance: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        """Compute one shard. The writer thread publishes it soon after this returns; its errors are raised by a later
        call, or on leaving the `with` block. `advance` is told the tokens of each batch.
        """
        self._raise_failed()
        waiting: queue.Queue[Batch | None] = queue.Queue(_AHEAD)
        job = self._pool.submit(_write_shard, artifact, name, shard, rows, self._spec, waiting) if self._write else None
        if job is not None:
            self._jobs.append(job)
        try:
            for numbers in bucket([len(row.ids) for row in rows], self._batch_tokens, salt=shard):
                batch = self.encode(rows, numbers)
                if job is not None:
                    _put(waiting, batch, job)
                if self._target.device.type == "cpu":
                    trim()  # batches of unlike shapes leave gaps in the heap, which add up
                advance(sum(batch.tokens))
        except BaseException:
            if job is not None:
                _abandon(waiting, job)
            raise
        if job is not None:
            _put(waiting, None, job)

    def encode(self, rows: Sequence[TokenRow], numbers: Sequence[int]) -> Batch:
        """One forward over some rows, and everything the codecs keep of it, still on the target's device."""
        device, spec = self._target.device, self._spec
        chosen = [rows[number] for number in numbers]
        tokens = [len(row.ids) for row in chosen]
        longest = max(tokens)
        flat = np.concatenate([np.arange(count) + index * longest for index, count in enumerate(tokens)])
        kept = [kept_positions(row.mask, spec.positions) for row in chosen]
        flat_kept = np.concatenate([part + index * longest for index, part in enumerate(kept)])
        out = self._target.forward(padded_ids(chosen).to(device))
        taps_NLD = out.taps_BTLD.flatten(0, 1)[torch.from_numpy(flat).to(device)]
        hidden_PD = out.last_hidden_BTD.flatten(0, 1)[torch.from_numpy(flat_kept).to(device)]
        finite_N = torch.isfinite(taps_NLD.flatten(1).abs().amax(-1)) if spec.num_taps else None
        logits, finite_P = encode_logits(hidden_PD, self._target.frozen, spec)
        positions = [len(part) for part in kept]
        finite = _all_in_row(finite_P, positions)
        if finite_N is not None:
            finite &= _all_in_row(finite_N, tokens)
        tensors = dict(logits)
        if spec.num_taps:
            tensors |= encode_taps(taps_NLD, spec, self._rms)
        return Batch(list(numbers), tensors, tokens, positions, finite)

    def _raise_failed(self) -> None:
        for job in [job for job in self._jobs if job.done()]:
            self._jobs.remove(job)
            job.result()


def padded_ids(rows: Sequence[TokenRow]) -> Tensor:
    """Ids [B, T] padded on the right with 0: a causal target never looks there, and nothing there is kept."""
    ids = np.zeros((len(rows), max(len(row.ids) for row in rows)), dtype=np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)] = row.ids
    return torch.from_numpy(ids)


def _all_in_row(flags: Tensor, counts: Sequence[int]) -> Tensor:
    """Per row, whether all its flags hold: bool [B]. A row without flags holds."""
    row_of = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(flags.device)
    bad = torch.zeros(len(counts), dtype=torch.int32, device=flags.device)
    return bad.index_add_(0, row_of, (~flags).to(torch.int32)) == 0


# ------------------------------------------------------------------------------------------------ writer thread


def _put(waiting: queue.Queue[Batch | None], item: Batch | None, job: Future[None]) -> None:
    """Hand over one batch; a writer that has failed raises here instead of letting us wait forever."""
    while True:
        if job.done():
            job.result()
        try:
            return waiting.put(item, timeout=0.2)
        except queue.Full:
            continue


class _Abandoned(Exception):
    """The forward failed or was stopped: the shard must not be published."""


_ABANDON = Batch([], {}, [], [], torch.empty(0))


def _abandon(waiting: queue.Queue[Batch | None], job: Future[None]) -> None:
    while not job.done():
        try:
            waiting.put(_ABANDON, timeout=0.2)
            break
        except queue.Full:
            continue


def _write_shard(
    artifact: Artifact,
    name: str,
    shard: int,
    rows: Sequence[TokenRow],
    spec: Spec,
    waiting: queue.Queue[Batch | None],
) -> None:
    left_out: list[str] = []
    try:
        with artifact.shard(name) as published:
            with ShardWriter(published.path, spec, shard=shard) as writer:
                while (batch := waiting.get()) is not None:
                    if batch is _ABANDON:
                        raise _Abandoned
                    left_out += _write_batch(writer, batch, rows, spec)
            published.row.update(writer.facts())
            published.row["tokens"] = sum(len(row.ids) for row in rows)
            if left_out:
                published.row.update(skipped={"not_finite": len(left_out)}, left_out=sorted(left_out))
    except _Abandoned:
        return


def _write_batch(writer: ShardWriter, batch: Batch, rows: Sequence[TokenRow], spec: Spec) -> list[str]:
    """Append the batch's finite rows; returns the ids of the others."""
    finite = batch.finite.tolist()
    per = {field.name: batch.positions if field.per == "position" else batch.tokens for field in spec.fields()}
    split = {name: tensor.cpu().split(per[name]) for name, tensor in batch.tensors.items()}
    left_out = []
    for index, number in enumerate(batch.rows):
        row = rows[number]
        if not finite[index]:
            left_out.append(row.id)
            continue
        tensors = {name: parts[index] for name, parts in split.items()}
        tensors["ids"] = torch.from_numpy(np.array(row.ids, dtype=np.int32))
        tensors["mask"] = torch.from_numpy(np.array(row.mask, dtype=np.uint8))
        writer.add(row=number, tensors=tensors, id=row.id, source=row.source, turn=row.turn)
    return left_out
