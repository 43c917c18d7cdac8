"""What `dspark generate` shows: which text came from the drafter."""

from __future__ import annotations

from pipeline.decoding.engine import Generation, Round
from pipeline.decoding.generate import facts, from_draft, marked

WORDS = ["The", " cat", " sat", " on", " a", " mat", "."]


def decode(ids):
    return "".join(WORDS[index] for index in ids)


ANSWER = Generation(3, [0, 1, 2, 3, 4, 5, 6], "stop", [Round(4, 2, 1), Round(4, 0, 1), Round(4, 2, 0)])


def test_accepted_runs_are_marked_and_the_text_is_whole():
    assert from_draft(ANSWER) == [False, True, True, False, False, True, True]
    assert marked(ANSWER, decode, terminal=False) == "The‹ cat sat› on a‹ mat.›"
    assert "\033[32m mat.\033[0m" in marked(ANSWER, decode, terminal=True)


def test_a_character_split_over_tokens_is_not_cut():
    pieces = {(0,): "�", (0, 1): "é", (0, 1, 2): "é!"}
    answer = Generation(1, [0, 1, 2], "length", [Round(2, 1, 1)])
    assert marked(answer, lambda ids: pieces[tuple(ids)], terminal=False) == "‹é›!"


def test_the_line_below_counts_rounds_only():
    assert "tau 2.00 over 3 rounds" in facts(ANSWER, 2.0) and "7 tokens in 2.0 s (3.5 tokens/s)" in facts(ANSWER, 2.0)
