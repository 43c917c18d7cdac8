"""Which rows make up a step (contract 4), and how they are dealt out."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.training.batches import Schedule, deal, held_out


def schedule(rows: int, size: int) -> Schedule:
    return Schedule(rows, size, lambda epoch: np.random.default_rng(epoch).permutation(rows).tolist())


@pytest.mark.case("LDR-09")
@pytest.mark.case("LDR-10")
def test_every_epoch_has_every_row_once_and_one_ragged_step() -> None:
    """11 rows, 2 a step: 6 steps an epoch, the last with one row, in every epoch and from any starting step."""
    made = schedule(11, 2)
    assert made.steps_per_epoch == 6
    for epoch in range(3):
        steps = [list(made.batch(epoch * 6 + i)) for i in range(6)]
        assert [len(rows) for rows in steps] == [2, 2, 2, 2, 2, 1]
        assert sorted(row for rows in steps for row in rows) == list(range(11))
    assert list(schedule(11, 2).batch(14)) == list(made.batch(14)), "a resumed run starts anywhere"
    assert {made.epoch(step) for step in (6, 11)} == {1}


@pytest.mark.case("LDR-07")
def test_the_order_changes_from_epoch_to_epoch_and_not_between_runs() -> None:
    made = schedule(50, 50)
    assert list(made.batch(0)) != list(made.batch(1))
    assert list(made.batch(1)) == list(schedule(50, 50).batch(1))


@pytest.mark.case("NUM-10")
def test_accumulation_keeps_the_last_micro_batches() -> None:
    """10 rows, 4 a step: 3 steps, and the third has the two that are left."""
    made = schedule(10, 4)
    assert [len(made.batch(step)) for step in range(made.steps_per_epoch)] == [4, 4, 2]


@given(st.lists(st.integers(1, 500), max_size=40), st.integers(1, 5), st.integers(1, 600))
def test_dealing_loses_nothing_and_keeps_ranks_in_step(lengths: list[int], world: int, budget: int) -> None:
    """Every row once; the same number of micro-batches on all ranks; no bin over budget but for one long row."""
    shares = deal(lengths, world=world, budget=budget)
    assert len(shares) == world and len({len(share) for share in shares}) == 1 and len(shares[0]) >= 1
    assert sorted(row for share in shares for rows in share for row in rows) == list(range(len(lengths)))
    assert all(len(rows) <= 1 or sum(lengths[row] for row in rows) <= budget for share in shares for rows in share)


@pytest.mark.case("LDR-13")
def test_ranks_get_nearly_equal_work() -> None:
    """200 rows of skewed lengths on 4 ranks: as many micro-batches each, tokens within 5 %."""
    lengths = np.random.default_rng(0).lognormal(4.5, 1.0, 200).astype(int) + 1
    shares = deal(lengths.tolist(), world=4, budget=2048)
    tokens = [sum(int(lengths[row]) for rows in share for row in rows) for share in shares]
    assert max(tokens) <= 1.05 * min(tokens)
    assert Counter(len(share) for share in shares) == {len(shares[0]): 4}


def test_held_out_rows_are_decided_by_the_conversation() -> None:
    """All turns of one conversation fall on one side, whatever else is in the data."""
    names = [f"{index:016x}" for index in range(4000)]
    held = held_out(names, 0.1)
    assert 300 < sum(held) < 500
    assert held_out([names[7], names[7], names[3]], 0.1) == [held[7], held[7], held[3]]
    assert not any(held_out(names, 0.0)) and all(held_out(names, 1.0))
