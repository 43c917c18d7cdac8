"""Heads that share keys, a block of new tokens: the same numbers as repeating the keys, and no keys repeated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from pipeline.kernels.grouped_attention import LONGEST, grouped_attention

Sizes = tuple[int, int, int, int]


def inputs(sizes: Sizes, kv_heads: int) -> tuple[Any, ...]:
    """(module, query, key, value): the keys are a view into a longer cache, as the engine hands them over."""
    torch.manual_seed(0)
    batch, heads, tokens, keys = sizes
    query = torch.randn(batch, tokens, heads, 8, dtype=torch.float64).transpose(1, 2)
    cached = torch.randn(2, batch, kv_heads, keys + 5, 8, dtype=torch.float64)[:, :, :, :keys]
    return SimpleNamespace(num_key_value_groups=heads // kv_heads, is_causal=True), query, *cached


@pytest.mark.parametrize("tokens", [1, 2, 8, LONGEST + 1])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("rows", [1, 3])
def test_equal_to_repeated_keys(tokens: int, kv_heads: int, rows: int) -> None:
    module, query, key, value = inputs((3, 6, tokens, 80), kv_heads)
    mask = torch.rand(rows, 1, tokens, 80) < 0.6
    mask[..., 0] = True
    got, _ = grouped_attention(module, query, key, value, mask, scaling=0.3, dropout=0.0)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    assert got.shape == (3, tokens, 6, 8) and got.is_contiguous()
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_a_block_of_new_tokens_repeats_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    def repeated(*_: Any) -> None:
        raise AssertionError("keys were repeated")

    monkeypatch.setattr(sdpa_attention, "repeat_kv", repeated)
    module, *tensors = inputs((2, 6, 8, 40), 2)
    mask = torch.ones(2, 1, 8, 40, dtype=torch.bool)
    grouped_attention(module, *tensors, mask)
    with pytest.raises(AssertionError, match="keys were repeated"):
        sdpa_attention_forward(module, *tensors, mask)


@pytest.mark.parametrize("case", ["no mask", "mask per head", "additive"])
def test_other_masks_keep_their_meaning(case: str) -> None:
    module, query, key, value = inputs((2, 6, 8, 8), 2)
    mask = {
        "no mask": None,
        "mask per head": torch.rand(2, 6, 8, 8) < 0.9,
        "additive": torch.randn(2, 1, 8, 8, dtype=torch.float64),
    }[case]
    got, _ = grouped_attention(module, query, key, value, mask)
    torch.testing.assert_close(got, sdpa_attention_forward(module, query, key, value, mask)[0], rtol=0, atol=1e-12)
