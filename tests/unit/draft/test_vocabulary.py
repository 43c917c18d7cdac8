"""Which tokens a drafter may propose (S30, TOK-04, TOK-07)."""

from __future__ import annotations

import pytest
import torch

from pipeline.draft.vocabulary import choose_vocabulary, count_tokens
from pipeline.errors import ConfigError, DataError


def test_S30_the_most_frequent_tokens_and_always_the_stop_tokens() -> None:
    counts = torch.tensor([5, 0, 9, 1, 5, 7, 0, 2])
    words = choose_vocabulary(counts, size=4, always=[6])
    assert words.token_ids.tolist() == [0, 2, 5, 6]  # 9, 7, then the lower of the two fives, and the stop token
    assert words.coverage == pytest.approx(21 / 29) and words.padded == 1
    assert choose_vocabulary(counts, size=3, always=[2, 2]).token_ids.tolist() == [0, 2, 5]


@pytest.mark.case("TOK-04")
def test_S30_few_distinct_tokens_are_padded_to_the_requested_size() -> None:
    counts = torch.zeros(320, dtype=torch.int64)
    counts[100:120] = 3
    words = choose_vocabulary(counts, size=64, always=[300, 301])
    assert len(words.token_ids) == 64 and (words.token_ids.diff() > 0).all()
    assert {300, 301, *range(100, 120)} <= set(words.token_ids.tolist())
    assert words.coverage == 1.0 and words.padded == 44


@pytest.mark.case("TOK-07")
def test_S30_ids_beyond_the_tokenizer_are_never_chosen() -> None:
    counts = torch.zeros(320, dtype=torch.int64)
    counts[[5, 310]] = 4
    words = choose_vocabulary(counts, size=300, always=[7], usable=300)
    assert words.token_ids.tolist() == list(range(300))
    with pytest.raises(ConfigError, match="301 tokens asked for, 300 usable ones exist"):
        choose_vocabulary(counts, size=301, always=[7], usable=300)
    with pytest.raises(ConfigError, match=r"stop tokens \[305\] are outside"):
        choose_vocabulary(counts, size=10, always=[305], usable=300)


def test_S30_nothing_counted_is_an_error() -> None:
    with pytest.raises(DataError, match="no supervised token"):
        choose_vocabulary(torch.zeros(8, dtype=torch.int64), size=4, always=[1])


def test_only_supervised_tokens_count() -> None:
    ids, mask = torch.tensor([3, 1, 3, 2], dtype=torch.int32), torch.tensor([0, 1, 1, 1], dtype=torch.uint8)
    assert count_tokens(ids, mask, 5).tolist() == [0, 1, 1, 1, 0]
    assert count_tokens(ids, mask * 0, 5).tolist() == [0] * 5
    with pytest.raises(DataError, match="token ids up to 3; the target has 3"):
        count_tokens(ids, mask, 3)
