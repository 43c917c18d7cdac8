"""Attention of a few new tokens over a long cache, without repeating keys and values for the queries that share them.

    model.set_attn_implementation(register())

transformers packs the query heads of a key/value head together only where one token is new; a verify step brings a
block, and there `repeat_kv` copies the whole cache once per layer. Here the heads and the tokens of a block become the
query rows of one key/value head:

    [B, H, T, D] over [B, N_kv, N, D]    ->    [B, N_kv, (H / N_kv) T, D] over the same keys

Everything else (no mask, prompts, masks of their own per head) goes through transformers' own function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "sdpa_grouped"
LONGEST = 64  # new tokens; a prompt's own product is larger than the copy it saves


def register() -> str:
    """Make the implementation known to transformers; returns its name."""
    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [B, H, T, D], key and value [B, N_kv, N, D] -> ([B, T, H, D], None)."""
    batch, heads, tokens, _ = query.shape
    groups = heads // key.shape[1]
    plain = options.get("position_bias") is None and options.get("softcap") is None and not options.get("dropout")
    shared = attention_mask is not None and attention_mask.shape[1] == 1
    if groups == 1 or not 1 < tokens <= LONGEST or not (plain and shared):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    assert attention_mask is not None
    rows = query.reshape(batch, -1, groups * tokens, query.shape[-1])
    mask = attention_mask.expand(batch, 1, tokens, -1).repeat(1, 1, groups, 1)
    out = scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=options.get("scaling"))
    return torch.reshape(out, (batch, heads, tokens, -1)).transpose(1, 2).contiguous(), None
