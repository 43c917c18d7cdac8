"""Batches inside a shard: a fixed rule, little padding, every row once."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.shards.batches import bucket, padding


@pytest.mark.parametrize("count", [1, 2, 24, 1000])
@pytest.mark.parametrize("batch_tokens", [1, 512, 8192])
def test_padding_stays_under_five_percent_and_rows_appear_once(count: int, batch_tokens: int) -> None:
    lengths = np.random.default_rng(0).lognormal(5, 0.8, count).astype(int) + 3
    batches = bucket(lengths.tolist(), batch_tokens, salt=7)
    assert sorted(number for batch in batches for number in batch) == list(range(count))
    assert padding(lengths.tolist(), batches) <= 0.05
    for batch in batches:
        padded = len(batch) * max(lengths[batch])
        assert padded <= batch_tokens or len(batch) == 1
        assert padding(lengths[batch].tolist(), [range(len(batch))]) <= 0.05 + 1e-12


def test_batches_are_full_where_lengths_allow() -> None:
    lengths = np.random.default_rng(0).integers(190, 210, 200).tolist()
    assert len(bucket(lengths, 2100)) <= 22


def test_the_rule_is_fixed_and_the_stream_is_not_sorted() -> None:
    lengths = list(range(10, 400, 3))
    assert bucket(lengths, 1000, salt=1) == bucket(lengths, 1000, salt=1)
    firsts = [lengths[batch[0]] for batch in bucket(lengths, 1000, salt=1)]
    assert firsts != sorted(firsts) and firsts != sorted(firsts, reverse=True)
    assert firsts != [lengths[batch[0]] for batch in bucket(lengths, 1000, salt=2)]
