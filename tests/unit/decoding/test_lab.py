"""The scheduler lab on made-up rounds whose best policy is known."""

from __future__ import annotations

import re

import pytest
import torch

from pipeline.decoding.lab import Trace, replay, run_lab, shortfalls, threshold_sweep
from pipeline.speculative.scheduler import Scheduler, SpsTable
from pipeline.speculative.sts import Records


def power(exponent, largest=4096):
    tokens = list(range(1, largest + 1))
    return SpsTable.of(tokens, [100.0 * size**-exponent for size in tokens])


def honest_trace(n=600, block_size=5, seed=0):
    """Confidences that are true: slot k is accepted with exactly its confidence."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, block_size, generator=generator) * 1.5 + 0.5
    accepted = (torch.rand(logits.shape, generator=generator) < torch.sigmoid(logits)).long().cumprod(1).sum(1)
    records = Records(logits, accepted, torch.zeros(n, dtype=torch.bool))
    return Trace.of(records, torch.arange(n) // 20, None)


def test_gains_are_cut_at_the_schedule_and_have_no_bonus_after_a_stop():
    trace = Trace(torch.zeros(3, 4), torch.tensor([3, 2, 2]), torch.tensor([False, True, True]), torch.arange(3))
    accepted, tokens = trace.gains(torch.arange(3), torch.tensor([1, 2, 1]))
    assert accepted.tolist() == [1, 2, 1] and tokens.tolist() == [2, 2, 2]


def test_a_user_goes_through_whole_prompts_in_order():
    trace = honest_trace()
    rounds = trace.play(3, 50, seed=1)
    assert rounds.shape == (50, 3)
    for column in rounds.t().tolist():
        for before, after in zip(column, column[1:], strict=False):
            assert after == before + 1 if (before + 1) % 20 else after % 20 == 0


def test_cost_is_the_tables_and_tokens_are_the_records():
    trace = Trace(torch.ones(4, 2), torch.tensor([2, 0, 1, 2]), torch.zeros(4, dtype=torch.bool), torch.zeros(4))
    sps = SpsTable.of([1, 3], [10.0, 5.0])
    got = replay(trace, torch.arange(4)[:, None], Scheduler("full"), sps)
    assert got["throughput"] == pytest.approx((3 + 1 + 2 + 3) / (4 / 5.0))
    assert got["waste"] == pytest.approx(1 - 5 / 8) and got["verify_budget"] == 2.0


def test_the_budget_falls_with_concurrency_and_no_static_length_is_better():
    """A machine on which tokens cost nothing until 64 and their full price from there on."""
    tokens = list(range(1, 256 * 6 + 1))
    sps = SpsTable.of(tokens, [100.0 if size <= 64 else 6400.0 / size for size in tokens])
    trace = honest_trace()
    rows = run_lab(trace, sps, concurrencies=[1, 8, 32, 64, 256], steps=60)
    budget = [row["verify_budget"] for row in rows if row["policy"] == "early_stop"]
    assert budget[0] == 5.0 and budget[-1] < 1.0
    assert all(a >= b for a, b in zip(budget, budget[1:], strict=False))
    assert not [text for text in shortfalls(rows, trace, sps, steps=60) if text.startswith("early_stop")]


def test_a_shortfall_is_early_stops_where_looking_further_makes_it_good():
    """One more token halves the speed, the next four are free: whoever stops at the first never gets there."""
    sps, trace = SpsTable.of([1, 2, 3, 4, 5, 6], [100.0, 49.0, 49.0, 49.0, 49.0, 49.0]), honest_trace()
    (text,) = [text for text in shortfalls(run_lab(trace, sps, concurrencies=[1]), trace, sps) if "early_stop" in text]
    assert "static_5" in text and text.endswith("early stop does not look past the first draft that gains nothing")


def test_a_shortfall_of_confidences_that_promise_too_little_is_theirs_on_an_uneven_table_too():
    """Samples far apart are levels with steps between them, as every measured table has them beyond 64 tokens."""
    honest = honest_trace()
    logits = honest.confidence_NK.logit() - 4
    trace = Trace(logits.sigmoid(), honest.accepted_N, honest.stopped_N, honest.prompt_N)
    sps = SpsTable.of([1, 3, 5], [100.0, 90.0, 80.0])
    found = shortfalls(run_lab(trace, sps, concurrencies=[1]), trace, sps)
    assert len(found) == 2 and all("static_" in text and "early stop does not" not in text for text in found)
    promised, kept = (float(word) for word in re.findall(r"promise (\S+) .*, (\S+) were accepted", found[0])[0])
    assert kept == pytest.approx(float(honest.accepted_N.double().mean()), abs=0.4) and promised < kept / 5


def test_threshold_sweep_trades_length_for_acceptance():
    rows = threshold_sweep(honest_trace(4000))
    assert rows[0]["scheduled_per_round"] == 5.0
    shares = [row["accepted_share"] for row in rows[:15]]
    assert all(a < b + 0.02 for a, b in zip(shares, shares[1:], strict=False)) and shares[-1] > shares[0] + 0.2
    assert rows[-1]["tau"] < rows[0]["tau"]
