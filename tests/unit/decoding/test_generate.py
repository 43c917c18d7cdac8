"""What `dspark generate` shows: which text came from the drafter."""

from __future__ import annotations

from argparse import Namespace

import pytest

from pipeline.config import load
from pipeline.decoding.engine import Generation, Round
from pipeline.decoding.generate import facts, from_draft, generate, marked
from pipeline.errors import ConfigError
from tests.conftest import ROOT

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


@pytest.mark.parametrize("option", [{"temperature": "warm"}, {"temperature": "-1"}, {"max_new_tokens": "0"}], ids=repr)
def test_options_that_mean_nothing_are_refused_first(option):
    given = {"text": "Hi", "temperature": None, "max_new_tokens": None, **option}
    with pytest.raises(ConfigError, match=f"evaluate.{next(iter(option))}"):
        generate(load(ROOT / "configs" / "debug.yaml"), Namespace(**given))
