"""Uniform numbers that depend only on (row seed, position, lane): no state, so no batch, slot or order can change them.

A row draws the same numbers alone, in a batch of sixteen, or after a restart. Lanes keep the draws of one round apart:
0 chooses the final token, 1..K the drafts, K+1..2K their acceptance tests.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB
_LANES = 1 << 20


def uniforms(seeds_B: Tensor, positions_B: Tensor, lanes: int, first: int = 0) -> Tensor:
    """fp32 numbers in [0, 1), 24 bits each, as [B, lanes]; seeds and positions are int64, positions below 2^40."""
    lane = torch.arange(first, first + lanes, device=seeds_B.device)
    counter = positions_B[:, None] * _LANES + lane
    mixed = _mix(_mix(seeds_B[:, None] * _GOLDEN + _FIRST) + (counter + 1) * _GOLDEN)
    return (_shift(mixed, 40)).to(torch.float32) * (1.0 / (1 << 24))


def _mix(value: Tensor) -> Tensor:
    """The splitmix64 finaliser; int64 products wrap around, as it needs."""
    value = (value ^ _shift(value, 30)) * _FIRST
    value = (value ^ _shift(value, 27)) * _SECOND
    return value ^ _shift(value, 31)


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical right shift: int64 `>>` copies the sign bit, which is masked away."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
