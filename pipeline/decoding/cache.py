"""A key/value cache whose rows have their own lengths.

    cache = RaggedCache(model.config)
    mask = cache.place(positions_BT)                 # where the next forward writes, and what it may see
    model(input_ids=ids_BT, position_ids=positions_BT, attention_mask=mask, cache=cache)

Cache index = sequence position. A query at position p sees keys 0..p, and everything up to p has been written by the
time it looks, so a rejected draft needs no clean-up: the row goes on at a lower position and overwrites it. Padding
writes beyond a row's end, where nobody looks before real tokens land there. Nothing is copied on a rejection.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from pipeline.decoding.portions import GROWTH
from pipeline.errors import ConfigError

_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}

Mask = Tensor | dict[str, Tensor]


class RaggedCache(Cache):
    """Keys and values of all layers as [S, H, N, D] blocks, allocated on first use and grown in steps.

    S slots hold rows; a forward runs either over the first b slots (views, no copy) or over named slots (prefill of
    a few rows; their keys are gathered).
    """

    def __init__(self, config: Any) -> None:
        """`config` is the target's text config. Raises ConfigError for layers that cannot forget (linear attention)."""
        super().__init__(layers=[])
        self._rule = attention_rule(config)
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._slots: Tensor | None = None
        self._positions_BT = torch.empty(0, 0, dtype=torch.long)
        self._upto = 0
        self._capacity = (0, 0)

    def reserve(self, slots: int, length: int) -> None:
        """Make room for `slots` rows of `length` positions. Growing copies what is there, and happens rarely."""
        old_slots, old_length = self._capacity
        if slots <= old_slots and length <= old_length:
            return
        rounded = -(-length // GROWTH) * GROWTH
        self._capacity = (max(slots, old_slots), max(rounded, old_length))
        for store in (self._keys, self._values):
            for layer, old in store.items():
                new = self._block(old)
                new[: old.shape[0], :, : old.shape[2]] = old
                store[layer] = new

    def _block(self, like: Tensor) -> Tensor:
        slots, length = self._capacity
        return like.new_zeros(slots, like.shape[1], length, like.shape[3])

    def place(self, positions_BT: Tensor, slots_B: Tensor | None = None) -> Mask:
        """Set where the next forward writes and return its boolean mask [B, 1, T, N] (a dict where layer types differ).

        `slots_B` None means slots 0..B-1. Room must have been reserved.
        """
        self._slots, self._positions_BT = slots_B, positions_BT
        self._upto = int(positions_BT.max()) + 1
        if self._upto > self._capacity[1] or positions_BT.shape[0] > self._capacity[0]:
            raise IndexError(f"cache of {self._capacity} cannot take {tuple(positions_BT.shape)} up to {self._upto}")
        masks = {kind: _visible(positions_BT, self._upto, kind, span) for kind, span in self._rule.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store [B, H, T, D] at the placed positions; return the [B, H, N, D] the forward attends to."""
        return (
            self._write(self._keys, layer_idx, key_states),
            self._write(self._values, layer_idx, value_states),
        )

    def _write(self, store: dict[int, Tensor], layer: int, new: Tensor) -> Tensor:
        if layer not in store:
            store[layer] = self._block(new)
        block = store[layer]
        positions = self._positions_BT.to(block.device)
        rows = len(positions)
        index = torch.arange(rows, device=block.device) if self._slots is None else self._slots.to(block.device)
        block[index[:, None], :, positions] = new.transpose(1, 2)
        view = block[:rows] if self._slots is None else block[index]
        return view[:, :, : self._upto]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a row into another slot, so that the rows still running stay the first ones."""
        for store in (self._keys, self._values):
            for block in store.values():
                block[target, :, :length] = block[source, :, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions any row may hold; the models read it only when no positions are given."""
        return self._upto

    def bytes(self) -> int:
        """Memory held, all layers together."""
        return sum(block.nbytes for store in (self._keys, self._values) for block in store.values())


def attention_rule(config: Any) -> dict[str, int | None]:
    """Layer kinds of a model and the span each sees (None: everything before).

    Raises ConfigError for kinds whose state cannot be cut back to an earlier position.
    """
    window = getattr(config, "sliding_window", None)
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or []))
    if unknown := set(kinds) - _KINDS:
        raise ConfigError(
            f"target: layers of kind {', '.join(sorted(unknown))} keep a running state that cannot be cut back after a "
            "rejected draft; only attention layers can be decoded here"
        )
    if not kinds:
        sliding = window is not None and getattr(config, "use_sliding_window", True)
        return {"sliding_attention": window} if sliding else {"full_attention": None}
    spans = {
        "full_attention": None,
        "sliding_attention": window,
        "chunked_attention": getattr(config, "attention_chunk_size", None),
    }
    return {kind: spans[kind] for kind in kinds}


def _visible(positions_BT: Tensor, upto: int, kind: str, span: int | None) -> Tensor:
    keys_N = torch.arange(upto, device=positions_BT.device)
    query = positions_BT[:, None, :, None]
    mask = keys_N <= query
    if span is not None and kind == "sliding_attention":
        mask &= keys_N > query - span
    elif span is not None:
        mask &= keys_N // span == query // span
    return mask
