"""S26-S27: Algorithm 1 against brute force, the reference cases, and the other policies."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from pipeline.errors import ArtifactError
from pipeline.speculative.scheduler import (
    DIAGNOSTIC,
    Scheduler,
    SpsTable,
    early_stop,
    global_budget,
    static_threshold,
    survival,
    throughputs,
    with_budget,
)  # fmt: skip

TWO = torch.tensor([[0.9, 0.8, 0.7], [0.5, 0.4, 0.3]], dtype=torch.float64)


def power(exponent, scale=1.0, largest=64):
    tokens = list(range(1, largest + 1))
    return SpsTable.of(tokens, [scale * size**-exponent for size in tokens])


def theta(lengths, survival_RK, sps):
    expected = len(lengths) + sum(float(survival_RK[r, :length].sum()) for r, length in enumerate(lengths))
    return expected * float(sps(torch.tensor(len(lengths) + sum(lengths))))


def brute(survival_RK, sps):
    choices = itertools.product(range(survival_RK.shape[1] + 1), repeat=survival_RK.shape[0])
    return max(theta(lengths, survival_RK, sps) for lengths in choices)


@pytest.mark.parametrize(
    ("sps", "lengths", "best"),
    [
        (SpsTable.of([1], [10.0]), None, None),
        (power(0.0, 10.0), [3, 3], 48.84),
        (power(0.5), [3, 1], 1.887740),
        (power(0.7), [2, 0], 1.371723),
    ],
)
def test_s26_reference_cases(sps, lengths, best):
    if lengths is None:
        assert float(sps(torch.tensor(8))) == pytest.approx(10.0 / 8), "beyond the table tokens/s stay what they were"
        return
    survival_RK = survival(TWO)
    got = early_stop(survival_RK, sps).tolist()
    assert got == lengths
    assert theta(got, survival_RK, sps) == pytest.approx(best, rel=1e-6)
    assert brute(survival_RK, sps) == pytest.approx(best, rel=1e-6)


@pytest.mark.prove
def test_s26_early_stop_reaches_brute_force_where_the_greedy_path_has_one_peak(proof):
    """Random confidences and falling speed curves, kept where expected throughput rises and then falls."""
    generator = torch.Generator().manual_seed(0)
    wanted, checked = proof.size(500, 10_000), 0
    while checked < wanted:
        requests, slots = (int(torch.randint(1, high, (1,), generator=generator)) for high in (4, 5))
        survival_RK = survival(torch.rand(requests, slots, generator=generator, dtype=torch.float64))
        exponent = float(torch.rand(1, generator=generator))
        sps = power(exponent)
        path = throughputs(survival_RK, sps)[0].diff()
        falls = (path <= 0).nonzero()
        if len(falls) and bool((path[int(falls[0]) :] > 0).any()):
            continue
        got = early_stop(survival_RK, sps).tolist()
        assert theta(got, survival_RK, sps) == pytest.approx(brute(survival_RK, sps), rel=1e-12)
        checked += 1
    proof.note("cases equal to brute force", checked)


def test_s26_on_a_staircase_early_stop_may_stay_below_the_global_best():
    sps = SpsTable.of([1, 2, 3, 4], [10.0, 6.0, 6.0, 6.0])
    survival_RK = survival(torch.tensor([[0.6, 0.95, 0.95]]))
    assert early_stop(survival_RK, sps).tolist() == [0]
    assert global_budget(survival_RK, sps) == 3


def test_s26_ties_go_to_the_earlier_slot_then_the_earlier_request():
    survival_RK = torch.tensor([[0.5, 0.5], [0.5, 0.25]])
    assert with_budget(survival_RK, 1).tolist() == [1, 0]
    assert with_budget(survival_RK, 2).tolist() == [1, 1]
    assert with_budget(survival_RK, 3).tolist() == [2, 1]


def test_s26_candidates_without_survival_are_never_admitted():
    assert early_stop(torch.tensor([[0.0, 0.0], [1.0, 0.0]]), power(0.0, 10.0)).tolist() == [0, 1]


@pytest.mark.prove
def test_s26_is_fast_enough_for_every_step(proof):
    survival_RK = survival(torch.rand(256, 7, generator=torch.Generator().manual_seed(0)) * 0.5 + 0.5)
    sps, calls = power(0.5, largest=2048), 50
    started = time.process_time()
    for _ in range(calls):
        early_stop(survival_RK, sps)
    proof.note("Algorithm 1, R = 256, K = 7, ms", round((time.process_time() - started) / calls * 1e3, 3))


@pytest.mark.case("CAL-03")
def test_threshold_cuts_on_survival_and_optionally_on_the_slot():
    confidence = torch.tensor([[0.9, 0.5, 0.9]])
    assert torch.allclose(survival(confidence), torch.tensor([[0.9, 0.45, 0.405]]))
    assert static_threshold(confidence, 0.4).tolist() == [3]
    assert static_threshold(confidence, 0.42).tolist() == [2]
    assert static_threshold(confidence, 0.6, slot=True).tolist() == [1]


def test_s27_lagged_budget_comes_from_two_steps_before_and_may_be_zero():
    """Steps: high, low, high, high. Step 2 uses step 0's budget, step 3 that of step 1 (none)."""
    sps = power(0.7)
    high, low = torch.full((2, 3), 0.99), torch.full((2, 3), 0.01)
    scheduler = Scheduler("lagged_global", sps=sps)
    got = [scheduler.lengths(confidence).sum().item() for confidence in (high, low, high, high, high)]
    first = int(early_stop(survival(high), sps).sum())
    assert got == [first, 0, 6, 0, 6]


def test_s27_lagged_tokens_are_chosen_by_current_survival():
    scheduler = Scheduler("lagged_global", sps=power(0.5))
    for _ in range(2):
        scheduler.lengths(TWO)
    swapped = TWO.flip(0)
    assert scheduler.lengths(swapped).tolist() == with_budget(survival(swapped), 4).tolist() == [1, 3]


def test_s27_static_length_and_full():
    confidence = torch.rand(3, 5)
    assert Scheduler("static_length", length=2).lengths(confidence).tolist() == [2, 2, 2]
    assert Scheduler("static_length", length=9).lengths(confidence).tolist() == [5, 5, 5]
    assert Scheduler("full").lengths(confidence).tolist() == [5, 5, 5]


def test_policies_say_what_they_lack():
    with pytest.raises(ValueError, match="early_stop needs an SPS table"):
        Scheduler("early_stop")
    with pytest.raises(ValueError, match="not one of"):
        Scheduler("global_argmax")
    assert DIAGNOSTIC not in ("early_stop", "lagged_global")


def test_s28_lookup_takes_the_sample_below():
    sps = SpsTable.of([2, 4, 8], [10.0, 8.0, 4.0])
    assert sps(torch.tensor([1, 2, 3, 4, 7, 8])).tolist() == [10.0, 10.0, 10.0, 8.0, 8.0, 4.0]
    assert float(sps(torch.tensor(16))) == 2.0
    with pytest.raises(ArtifactError, match="rising"):
        SpsTable.of([2, 2], [1.0, 1.0])
