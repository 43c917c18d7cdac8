"""Rotary positions, computed in fp32 whatever the drafter's dtype (S5).

    rope = Rope(config.rope, config.head_dim)
    cos, sin = rope.tables(positions)
    q = rotate(q, cos, sin)

The inverse frequencies are neither a parameter nor a buffer, so `.to(bfloat16)`, DeepSpeed and FSDP cannot round them:
in bf16 the phase at position 2,048 would be off by more than two radians.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipeline.architecture import ROPE_TYPES
from pipeline.errors import ConfigError


class Rope:
    """Inverse frequencies [head_dim · partial_rotary_factor / 2] and the factor cos and sin are multiplied by."""

    def __init__(self, rope: Mapping[str, Any], head_dim: int) -> None:
        self.inv_freq, self.scale = inverse_frequencies(rope, head_dim)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, fp32 [..., half], for integer positions [...]."""
        if self.inv_freq.device != positions.device:
            self.inv_freq = self.inv_freq.to(positions.device)
        angles = positions.to(torch.float32)[..., None] * self.inv_freq
        return angles.cos() * self.scale, angles.sin() * self.scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2 · half channels of x [..., H, d] by tables [..., half], in fp32; the result has x's dtype."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    if rest.shape[-1]:
        return torch.cat((*(part.to(x.dtype) for part in turned), rest), dim=-1)
    return torch.cat(turned, dim=-1).to(x.dtype)


def inverse_frequencies(rope: Mapping[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """(inv_freq fp32, factor of cos and sin) by the target's rule.

    Raises ConfigError for a rope type that depends on the sequence length or is unknown, and for missing parameters.
    """
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise ConfigError(f"drafter: rope_type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    width = int(head_dim * _number(rope, "partial_rotary_factor", 1.0))
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    plain = 1.0 / _number(rope, "rope_theta") ** exponents
    if kind == "linear":
        return plain / _number(rope, "factor"), 1.0
    if kind == "llama3":
        return _llama3(plain, rope), 1.0
    if kind == "yarn":
        return _yarn(plain, rope, width)
    return plain, 1.0


def _llama3(plain: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between are blended."""
    original = _number(rope, "original_max_position_embeddings")
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    turns = original * plain / (2 * math.pi)  # full turns within the original context
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return plain * (kept + (1 - kept) / _number(rope, "factor"))


def _yarn(plain: Tensor, rope: Mapping[str, Any], width: int) -> tuple[Tensor, float]:
    """Interpolate slow channels, keep fast ones, ramp between, and sharpen attention by a factor on cos and sin."""
    factor, theta = _number(rope, "factor"), _number(rope, "rope_theta")
    original = _number(rope, "original_max_position_embeddings")

    def channel(turns: float) -> float:
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = channel(_number(rope, "beta_fast", 32.0)), channel(_number(rope, "beta_slow", 1.0))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    ramp = (torch.arange(width // 2, dtype=torch.float32) - first) / max(last - first, 0.001)
    stretched = ramp.clamp(0.0, 1.0)
    return plain * (1 - stretched) + plain / factor * stretched, _yarn_scale(rope, factor)


def _yarn_scale(rope: Mapping[str, Any], factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def sharpening(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    weight, all_dims = rope.get("mscale"), rope.get("mscale_all_dim")
    return sharpening(weight) / sharpening(all_dims) if weight and all_dims else sharpening(1.0)


def _number(rope: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = rope.get(key)
    value = default if value is None else value
    if value is None:
        kind = rope.get("rope_type", "default")
        raise ConfigError(f"drafter: rope parameter {key} is missing for rope_type {kind!r}")
    return float(value)
