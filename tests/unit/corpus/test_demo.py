"""Demo prompts: natural questions of moderate length, the same ones every time, each opening once."""

from __future__ import annotations

from collections import Counter

import pytest

from pipeline.corpus.demo import demo_rows, demo_size

pytest.importorskip("reasoning_gym", reason="the demo extra is not installed")
pytest.importorskip("chatterbot_corpus", reason="the demo extra is not installed")


@pytest.mark.parametrize("name", ["gsm_symbolic", "codeio", "chatterbot"])
def test_rows_are_a_pure_function_of_their_range(name: str) -> None:
    whole = list(demo_rows(name, start=0, stop=60, seed=3))
    parts = [row for start in (0, 20, 40) for row in demo_rows(name, start=start, stop=start + 20, seed=3)]
    assert whole == parts
    assert len(whole) == 60
    for row in whole:
        turns = row["conversations"]
        assert [turn["from"] for turn in turns] == (["human", "gpt"] * len(turns))[: len(turns)]
        assert row["source"] == name
        assert 0 < len(turns[0]["value"]) < 1500
        assert "final answer" not in turns[0]["value"]


def test_generated_rows_follow_the_seed_and_packaged_sets_have_a_size() -> None:
    one, two = (list(demo_rows("gsm_symbolic", start=0, stop=5, seed=seed)) for seed in (1, 2))
    assert one != two
    assert demo_size("gsm_symbolic") is None
    for name in ("codeio", "chatterbot"):
        rows = list(demo_rows(name, start=0, stop=10_000, seed=0))
        assert len(rows) == demo_size(name)
        assert max(Counter(row["conversations"][0]["value"] for row in rows).values()) == 1
