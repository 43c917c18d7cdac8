"""Prompt lookup by hand-made cases, and against the engine run with the same proposals."""

from __future__ import annotations

import torch

from pipeline.decoding.engine import decode
from pipeline.decoding.lookup import rounds
from tests.unit.decoding.toys import TableTarget


def test_most_recent_match_of_the_longest_suffix():
    # the suffix (1, 2) is followed by 3 at first, by 4 later; the single 2 is no longer consulted
    assert rounds([1, 2, 3, 1, 2, 4, 9, 1], [2, 4, 9, 1, 7, 7], limit=5, block_size=3, stop_ids=()) == [(3, 3, 1)]


def test_no_match_proposes_nothing():
    assert rounds([1, 2, 3], [4, 5, 6], limit=3, block_size=4, stop_ids=()) == [(0, 0, 1), (0, 0, 1)]


def test_a_stop_inside_the_accepted_prefix_has_no_bonus():
    assert rounds([5, 6, 0, 9, 5], [6, 0], limit=9, block_size=4, stop_ids={0}) == [(4, 1, 0)]


def test_rounds_that_cannot_be_judged_are_left_out():
    cycle = [1, 2, 3] * 6
    full = rounds(cycle, cycle + [1, 2, 3], limit=9, block_size=3, stop_ids=())
    assert full == [(3, 3, 1), (3, 3, 1)]
    assert rounds(cycle, cycle[:6], limit=9, block_size=3, stop_ids=()) == [(3, 3, 1)]


def test_the_first_output_token_is_prefill_and_never_counted():
    assert rounds([1], [0], limit=5, block_size=3, stop_ids={0}) == []


def test_tokens_add_up_on_a_real_output():
    table = torch.randn(6, 6, generator=torch.Generator().manual_seed(2)) * 3
    (generation,) = decode(
        TableTarget(table), [[1, 2, 3]], temperature=1.0, max_new_tokens=400, stop_ids=(), batch_size=1, seeds=(7,)
    )
    steps = rounds([1, 2, 3], generation.ids, limit=390, block_size=4, stop_ids=())
    tokens = 1 + sum(accepted + bonus for _, accepted, bonus in steps)
    assert 390 <= tokens < 390 + 5
    assert len(steps) < 390, "on a sharp six-letter chain some proposals must be right"
