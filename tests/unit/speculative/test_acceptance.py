"""S23: pooled tau, its relatives, and the position curves."""

from __future__ import annotations

import pytest
import torch

from pipeline.speculative.acceptance import Rounds, bootstrap, curves, summarise

# request 0: two full rounds; request 1: a rejection at slot 2, a stop accepted at slot 1; request 2: no round at all
ROWS = [[(3, 3, 1), (3, 0, 1)], [(3, 1, 1), (3, 1, 0)], []]


def test_s23_tau_is_pooled_and_counts_the_bonus_but_not_after_a_stop():
    got = summarise(Rounds.of(ROWS), block_size=4, resamples=50, seed=0)
    assert got["tau"] == pytest.approx((4 + 1 + 2 + 1) / 4)
    assert got["tau_draft_only"] == pytest.approx(5 / 4)
    assert got["tau_request_mean"] == pytest.approx((5 / 2 + 3 / 2) / 2), "the request without rounds has no mean"
    assert (got["num_requests"], got["num_rounds"]) == (3, 4)


@pytest.mark.case("CAL-04")
def test_curves_have_their_own_names_and_nulls_where_nothing_was_seen():
    got = curves(Rounds.of(ROWS), 4)
    # the stop at slot 1 says nothing about slots 2 and 3; slot 4 was never scheduled
    assert got["prefix_acceptance"] == [pytest.approx(3 / 4), pytest.approx(1 / 3), pytest.approx(1 / 3), None]
    assert got["prefix_acceptance_n"] == [4, 3, 3, 0]
    assert got["conditional_acceptance"] == [pytest.approx(3 / 4), pytest.approx(1 / 2), pytest.approx(1.0), None]
    assert got["conditional_acceptance_n"] == [4, 2, 1, 0]


def test_no_rounds_give_nulls_not_zeros():
    got = summarise(Rounds.of([[], []]), block_size=2, resamples=10, seed=0)
    assert got["tau"] is None and got["tau_interval"] is None
    assert got["conditional_acceptance"] == [None, None]


def test_bootstrap_resamples_requests_not_rounds():
    """Ten requests of a hundred equal rounds each: the spread is that of ten, and the seed fixes it."""
    generator = torch.Generator().manual_seed(0)
    rate = torch.rand(10, generator=generator, dtype=torch.float64)
    rounds = torch.full((10,), 100.0, dtype=torch.float64)
    low, high = bootstrap(rate * rounds, rounds, resamples=4000, seed=1)
    expected = 1.96 * float(rate.std(correction=0)) / 10**0.5
    assert low < float(rate.mean()) < high
    assert (high - low) / 2 == pytest.approx(expected, rel=0.1)
    assert (low, high) == bootstrap(rate * rounds, rounds, resamples=4000, seed=1)
