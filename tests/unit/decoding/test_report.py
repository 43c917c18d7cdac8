"""Records made from recorded lines."""

from __future__ import annotations

import pytest

from pipeline.decoding.report import Group, Setting, build

SETTING = Setting("dspark", block_size=3, batch_size=4, resamples=20, seed=0)


def line(name, domain, rounds, lookup):
    turn = {"prompt_tokens": 4, "ids": [1] * 9, "finish_reason": "length", "rounds": rounds}
    return {"id": name, "domain": domain, "error": None, "turns": [turn], "lookup": [lookup]}


FACTS = {"draft": {"seconds": {"prefill": 1.0, "draft": 1.0, "verify": 6.0, "sample": 1.0}, "wall_seconds": 10.0,
                   "batch_rounds": 4, "row_rounds": 8, "round_tokens": 16, "tokens": 18}}  # fmt: skip


def records():
    lines = [
        line("a", "math", [[3, 3, 1, None], [3, 0, 1, None]], [[0, 0, 1], [1, 1, 1]]),
        line("b", "chat", [[3, 1, 1, None]], [[3, 3, 1], [0, 0, 1]]),
    ]
    return {(r["drafter"], r["domain"]): r for r in build([Group("set", 1.0, lines, [FACTS])], SETTING)}


def test_lookup_curves_count_slots_it_had_no_proposal_for_as_misses():
    found = records()["prompt-lookup", None]
    assert found["prefix_acceptance"] == [0.5, 0.25, 0.25] and found["prefix_acceptance_n"] == [4, 4, 4]
    assert found["conditional_acceptance"] == [0.5, 0.5, 1.0]
    assert found["tau"] == pytest.approx((1 + 2 + 4 + 1) / 4) and found["scheduled_per_round"] == 1.0


def test_s23_latency_from_parts_beside_the_measured_one_and_the_overhead():
    found = records()["dspark", None]
    tau = 16 / 8
    assert found["latency_seconds"] == pytest.approx(8.0 / 4 / tau)
    assert found["latency_from_parts_seconds"] == pytest.approx(7.0 / 4 / tau)
    assert found["overhead_share"] == pytest.approx(1 / 8), "prefill is outside the rounds"
    assert found["tokens_per_second"] == pytest.approx(1.8)


def test_domains_add_up_to_the_pooled_record():
    found = records()
    assert (
        found["dspark", None]["num_rounds"]
        == found["dspark", "math"]["num_rounds"] + found["dspark", "chat"]["num_rounds"]
    )
    assert found["dspark", None]["tau"] == pytest.approx((4 + 1 + 2) / 3)
    assert "seconds" not in found["dspark", "math"]
