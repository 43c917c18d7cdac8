"""A live target gives the rows a cache would give, at the same numbers, without storing anything."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from pipeline.artifact import Artifact
from pipeline.errors import DataError
from pipeline.shards.live import LiveReader
from pipeline.shards.reader import ShardReader
from tests.unit.shards.cache import Row, ToyTarget, build, rows_of, spec_of

SIZES = (8, 8, 5)


def tokens_of(folder: Path) -> Artifact:
    """A tokens artifact whose files hold only their number; `read` makes the rows."""
    artifact = Artifact(folder, "tokens", {"stage": "tokens", "format": 1})
    artifact.create()
    names = [f"train-{number:05d}.parquet" for number in range(len(SIZES))]
    for number, name in enumerate(names):
        with artifact.shard(name) as shard:
            shard.path.write_text(str(number))
            shard.row["samples"] = SIZES[number]
    artifact.finish(names)
    return artifact


def read(path: Path) -> Iterable[Row]:
    number = int(path.read_text())
    return rows_of(SIZES[number], seed=number)


@pytest.mark.parametrize("positions", ["supervised", "all"])
@pytest.mark.parametrize("batch_tokens", [1, 10_000])
def test_live_rows_equal_cached_rows(positions: str, batch_tokens: int, tmp_path: Path) -> None:
    spec = spec_of("bf16", "last_hidden", positions=positions)
    cached = ShardReader.open(build(tmp_path, spec))
    live = LiveReader(tokens_of(tmp_path), ToyTarget(), spec, read=read, layers=(0, 1, 2), batch_tokens=batch_tokens)
    assert len(live) == len(cached) == 21
    assert live.index.ids == cached.index.ids
    assert live.index.tokens.tolist() == cached.index.tokens.tolist()
    assert live.index.supervised.tolist() == cached.index.supervised.tolist()
    assert live.order(4, 2).tolist() == cached.order(4, 2).tolist()
    numbers = live.order(0, 0)[:9]
    for ours, theirs in zip(live.batch(numbers), cached.batch(numbers), strict=True):
        assert (ours.id, ours.source, ours.turn) == (theirs.id, theirs.source, theirs.turn)
        assert torch.equal(ours.ids_T, theirs.ids_T) and torch.equal(ours.mask_T, theirs.mask_T)
        assert torch.allclose(ours.taps_TLD, theirs.taps_TLD, rtol=2.0**-8, atol=1e-5)
        assert ours.teacher.kind == theirs.teacher.kind
        assert torch.equal(ours.teacher.positions_P, theirs.teacher.positions_P)
        assert ours.teacher.hidden_PD is not None and theirs.teacher.hidden_PD is not None
        assert torch.allclose(ours.teacher.hidden_PD, theirs.teacher.hidden_PD, atol=1e-5)
    encoded = live.encoded(3)
    assert encoded.metadata == cached.encoded(3).metadata
    assert torch.equal(encoded.tensors["ids"], cached.encoded(3).tensors["ids"])


def test_rows_that_are_not_finite_are_named(tmp_path: Path) -> None:
    spec = spec_of("bf16", "last_hidden")
    row = rows_of(8, seed=0)[5]
    target = ToyTarget(poison=frozenset({int(row.ids[0])}))
    live = LiveReader(tokens_of(tmp_path), target, spec, read=read, layers=(0, 1, 2))
    with pytest.raises(DataError, match="not finite"):
        live.batch([live.index.ids.index(row.id)])
