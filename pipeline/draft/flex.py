"""Block-sparse attention over anchors on CUDA, through flex_attention.

The block mask is worked out from the anchors' ranges, per 128 × 128 block: which are empty, whole or cut. The
[A·Q, T + A·S] mask itself never exists; inside a cut block flex asks `mask_mod` entry by entry.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128


def attend_flex(q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, mask: BlockMask) -> Tensor:
    """Queries [A, Q, H, d] over context [T, Hkv, d] and own keys [A, S, Hkv, d], blocks sorted as for `mask`."""
    keys = torch.cat([k, own_k.flatten(0, 1)]).transpose(0, 1)[None]
    values = torch.cat([v, own_v.flatten(0, 1)]).transpose(0, 1)[None]
    kernel = _compiled() if q.is_cuda else flex_attention
    out: Any = kernel(q.flatten(0, 1).transpose(0, 1)[None], keys, values, block_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1).view_as(q)


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)


def block_mask(start_A: Tensor, stop_A: Tensor, *, queries: int, context: int, own: int) -> BlockMask:
    """The mask of blocks with visible context start_A … stop_A − 1 and `own` keys each, `queries` queries each (S2).

    Blocks should be sorted by prefix: neighbours then share most of their ranges, and few mask blocks are cut.
    """
    blocks = len(stop_A)
    rows, columns = blocks * queries, context + blocks * own

    def visible(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        block = q_idx // queries
        in_context = (kv_idx < context) & (kv_idx >= start_A[block]) & (kv_idx < stop_A[block])
        return in_context | ((kv_idx >= context) & ((kv_idx - context) // own == block))

    begin = torch.arange(0, columns, BLOCK, device=stop_A.device)
    end = (begin + BLOCK).clamp(max=columns)
    first_block = torch.arange(0, rows, BLOCK, device=stop_A.device) // queries
    last_block = ((torch.arange(0, rows, BLOCK, device=stop_A.device) + BLOCK - 1) // queries).clamp(max=blocks - 1)
    low, high = _span(start_A, queries)[:, :, None]
    short, far = _span(stop_A, queries)[:, :, None]
    touches = (begin < far) & (end > low)
    own_from, own_to = context + first_block[:, None] * own, context + (last_block[:, None] + 1) * own
    touches |= (begin < own_to) & (end > own_from)
    whole = (begin >= high) & (begin + BLOCK <= short)
    return BlockMask.from_kv_blocks(
        *_listed(touches & ~whole),
        *_listed(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(rows, columns),
    )


def _span(bounds_A: Tensor, queries: int) -> Tensor:
    """Smallest and largest bound among the rows of each mask block: [2, mask blocks]."""
    rows = bounds_A.repeat_interleave(queries)
    padded = torch.cat([rows, rows[-1:].expand(-len(rows) % BLOCK)]).view(-1, BLOCK)
    return torch.stack([padded.amin(1), padded.amax(1)])


def _listed(flags: Tensor) -> tuple[Tensor, Tensor]:
    """Flags [query blocks, key blocks] as flex wants them: how many per row, and their indices first."""
    counts = flags.sum(1, dtype=torch.int32)
    indices = flags.to(torch.int8).argsort(dim=1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], indices[None, None]
