"""Anchors and supervised slots (S7, S8, S9)."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.speculative.anchors import eligible, sample_anchors, supervised_slots


def mask(length: int, *supervised: int) -> torch.Tensor:
    out = torch.zeros(length, dtype=torch.uint8)
    out[list(supervised)] = 1
    return out


@pytest.mark.case("DAT-02")
def test_the_first_answer_token_is_a_label_only_by_option() -> None:
    """S7: an answer at 10 ... 14."""
    row = mask(20, 10, 11, 12, 13, 14)
    assert eligible(row).nonzero().flatten().tolist() == [10, 11, 12, 13]
    assert eligible(row, "label").nonzero().flatten().tolist() == [9, 10, 11, 12, 13]
    every = sample_anchors(row, num_anchors=99, seed=0, epoch=0, sample_id="x", rule="label")
    assert every.tolist() == [9, 10, 11, 12, 13]


@pytest.mark.case("NUM-11")
def test_position_zero_never_reads_the_last_token() -> None:
    """S7, S9: a supervised first token is an ordinary anchor, and no index goes below 0 or past the end."""
    row = mask(5, 0, 4)
    assert eligible(row).sum() == 0
    assert eligible(mask(5, 0, 1)).nonzero().flatten().tolist() == [0]
    assert eligible(row, "label").nonzero().flatten().tolist() == [3]
    assert supervised_slots(mask(3, 0, 1, 2), torch.tensor([0, 2]), 4).tolist() == [
        [True, True, False, False],
        [False] * 4,
    ]


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 9))
def test_supervised_slots_are_the_contiguous_prefix(bits: list[bool], block_size: int) -> None:
    """S9 against its definition, for every position of any mask."""
    row = torch.tensor(bits, dtype=torch.bool)
    found = supervised_slots(row, torch.arange(len(bits)), block_size)
    for anchor in range(len(bits)):
        labels = [bits[anchor + k] if anchor + k < len(bits) else False for k in range(1, block_size + 1)]
        assert found[anchor].tolist() == [all(labels[:k]) for k in range(1, block_size + 1)]


def test_anchors_are_a_pure_function_of_seed_epoch_and_sample() -> None:
    """S8: sampled without replacement; global random state plays no part."""
    row = torch.ones(200, dtype=torch.uint8)

    def draw(seed: int = 1, epoch: int = 0, sample_id: str = "a") -> list[int]:
        return sample_anchors(row, num_anchors=16, seed=seed, epoch=epoch, sample_id=sample_id).tolist()

    first = draw()
    torch.manual_seed(5)
    torch.rand(3)
    assert draw() == first == sorted(set(first)) and len(first) == 16
    assert len({tuple(draw()), tuple(draw(seed=2)), tuple(draw(epoch=1)), tuple(draw(sample_id="b"))}) == 4


def test_anchors_are_uniform_over_the_eligible_positions() -> None:
    """S8: chi-square over 4,000 draws of 2 out of 10; 9 degrees of freedom, bound at p = 1e-4."""
    row = mask(30, *range(10, 21))
    counts = Counter(
        position
        for sample in range(2000)
        for position in sample_anchors(row, num_anchors=2, seed=0, epoch=0, sample_id=str(sample)).tolist()
    )
    assert sorted(counts) == list(range(10, 20))
    assert sum((count - 400) ** 2 / 400 for count in counts.values()) < 33.7
