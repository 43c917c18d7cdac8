"""Where the reader meets training: one shard feeds any number of ranks, and nothing usable is said before step 1."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.errors import DataError
from pipeline.shards.builder import Builder
from pipeline.shards.reader import ShardReader
from pipeline.training.batches import Schedule, deal
from pipeline.training.rows import CachedRows, Split
from pipeline.training.setup import check_rows
from tests.unit.shards.cache import Row, ToyTarget, artifact_of, build, finish, rows_of, spec_of


@pytest.mark.case("LDR-03")
def test_one_shard_feeds_more_readers_than_shards(tmp_path: Path) -> None:
    reader = ShardReader.open(build(tmp_path, sizes=(6,)))
    split, rows = Split(reader.index, 0.0, seed=0), CachedRows(reader, torch.float32, torch.device("cpu"))
    schedule = Schedule(split.count, 2, split.order)
    seen: list[str] = []
    for step in range(schedule.steps_per_epoch):
        batch = [int(row) for row in schedule.batch(step)]
        shares = deal([int(rows.lengths[row]) for row in batch], world=4, budget=64)
        assert len({len(share) for share in shares}) == 1
        seen += [rows.tokens(batch[place])[0] for share in shares for bins in share for place in bins]
    usable = [
        name for name, supervised in zip(reader.index.ids, reader.index.supervised, strict=True) if supervised >= 2
    ]
    assert sorted(key.rsplit("/", 1)[0] for key in seen) == sorted(usable)


@pytest.mark.case("LDR-12")
def test_a_cache_without_usable_rows_is_refused_with_counts(tmp_path: Path) -> None:
    rows = [Row(row.id, row.source, row.turn, row.ids, row.mask * 0) for row in rows_of(8)]
    artifact = artifact_of(tmp_path, spec_of())
    with Builder(ToyTarget(), spec_of(), batch_tokens=256) as builder:
        builder.build(artifact, "train-00000.tar", shard=0, rows=rows)
    finish(artifact, spec_of(), 1)
    reader = ShardReader.open(artifact)
    with pytest.raises(DataError, match="0 usable samples of 8"):
        check_rows(Split(reader.index, 0.0, seed=0), len(reader))
