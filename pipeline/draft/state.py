"""Ragged per-row memory of a drafter while it decodes.

Row b holds `lengths_B[b]` context positions; lowering a length forgets what follows and copies nothing. Writes go to
each row's own end, so rows of a batch may be anywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.draft.config import DraftConfig


@dataclass
class DraftState:
    """Keys and values of each draft layer [B, N, Hkv, d], stored features [B, N, D] where a drafter needs them.

    `head` caches the target's head cut to the draft vocabulary.
    """

    room: int
    lengths_B: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    features_BND: Tensor | None = None
    head: tuple[Any, Any] | None = field(default=None, repr=False)

    @classmethod
    def empty(
        cls,
        config: DraftConfig,
        batch: int,
        max_length: int,
        *,
        layers: int,
        features: bool,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> DraftState:
        """Room for `batch` rows of `max_length` positions in `layers` layers."""

        def block(*tail: int) -> Tensor:
            return torch.zeros(batch, max_length, *tail, device=device, dtype=dtype)

        keys = [block(config.kv_heads, config.head_dim) for _ in range(layers)]
        values = [block(config.kv_heads, config.head_dim) for _ in range(layers)]
        lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        return cls(max_length, lengths, keys, values, block(config.hidden_size) if features else None)

    def move(self, source: int, target: int) -> None:
        """Copy a row into another slot, so that the rows still running stay the first ones."""
        length = int(self.lengths_B[source])
        for store in [*self.keys, *self.values, *([] if self.features_BND is None else [self.features_BND])]:
            store[target, :length] = store[source, :length]
        self.lengths_B[target] = length

    def cells(self, at_BT: Tensor, keep_BT: Tensor, rows_B: Tensor) -> Cells:
        """Where [B, T] entries go: entry (b, t) to position at_BT[b, t] of row rows_B[b], if kept.

        Raises IndexError when a row is full.
        """
        b, t = keep_BT.nonzero(as_tuple=True)
        at = at_BT[b, t]
        if len(at) and int(at.max()) >= self.room:
            raise IndexError(
                f"a row of the drafter's state holds {self.room} positions, {int(at.max()) + 1} are needed"
            )
        return Cells(rows_B[b], at, b, t)

    def context(self, layer: int, rows_B: Tensor | slice, upto: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, N, Hkv, d] of the first `upto` positions; views when the rows are a slice."""
        return self.keys[layer][rows_B, :upto], self.values[layer][rows_B, :upto]


@dataclass(frozen=True)
class Cells:
    """Flat (row, position) places in the state and the (b, t) entries of a batch that go there."""

    row: Tensor
    at: Tensor
    b: Tensor
    t: Tensor

    def take(self, batch: Tensor) -> Tensor:
        """[B, T, ...] → [n, ...]: the entries that are stored."""
        return batch[self.b, self.t]

    def put(self, store: Tensor, values: Tensor) -> None:
        """Write [n, ...] into a state tensor."""
        store[self.row, self.at] = values.to(store.dtype)


def attend_rows(q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, lengths_B: Tensor) -> Tensor:
    """Queries [B, Q, H, d] of each row over its first lengths_B[b] of N context keys and its own S keys (S2)."""
    rows, queries, heads, d = q.shape
    kv_heads = own_k.shape[2]
    keys = torch.cat([k.to(q.dtype), own_k], dim=1).transpose(1, 2)
    values = torch.cat([v.to(q.dtype), own_v], dim=1).transpose(1, 2)
    seen = torch.arange(k.shape[1], device=q.device) < lengths_B[:, None]
    mask = F.pad(seen, (0, own_k.shape[1]), value=True)[:, None, None]
    share = heads // kv_heads
    stacked = q.view(rows, queries, kv_heads, share, d).permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, d)
    out = F.scaled_dot_product_attention(
        stacked, keys, values, attn_mask=mask.expand(rows, 1, stacked.shape[2], -1), scale=1 / math.sqrt(d)
    )
    return out.view(rows, kv_heads, share, queries, d).permute(0, 3, 1, 2, 4).reshape(rows, queries, heads, d)
