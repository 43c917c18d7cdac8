"""How much each slot of a block counts (S13)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Decay = float | Literal["block_size"] | None


def decay_length(block_size: int, decay: Decay) -> float | None:
    """The number of slots over which the weight falls by e; None is uniform."""
    return float(block_size) if decay == "block_size" else decay


def position_weights(block_size: int, decay: Decay) -> Tensor:
    """w_k = exp(-(k - 1) / decay) for the slots k = 1 ... K, float64 [K]; the first predicted slot always weighs 1.

    `decay` is a number of slots, `block_size` for exp(-(k - 1) / K), or None for uniform weights.
    """
    length = decay_length(block_size, decay)
    slots_K = torch.arange(block_size, dtype=torch.float64)
    return torch.ones_like(slots_K) if length is None else torch.exp(-slots_K / length)


def describe(block_size: int, decay: Decay) -> str:
    """One line for the start-up summary, e.g. `exp(-(k-1)/4): 1.000 0.779 ...`."""
    length = decay_length(block_size, decay)
    rule = "uniform" if length is None else f"exp(-(k-1)/{length:g})"
    values = " ".join(f"{weight:.3f}" for weight in position_weights(block_size, decay).tolist())
    return f"{rule}: {values}"
