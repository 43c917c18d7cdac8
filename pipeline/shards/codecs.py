"""Codecs of tapped hidden states, vectorised over tokens: they run where the tensors are.

    encoded = encode_taps(taps_NLD, spec, channel_rms_LD)       # {"taps": …, "taps.scale": …}, one row per token
    taps_NLD = decode_taps(encoded, spec, channel_rms_LD, dtype=torch.bfloat16)

| codec | what is stored | error |
|---|---|---|
| bf16 | the value | none for a bf16 target (bit exact) |
| fp8  | x / s as e4m3, s per token and tap | at most x/16 relative, s/1024 absolute, per value |
| int8 | round(x / s), s per token and tap | at most s/2 = max|x| / 254 per value (scale rounding aside) |
| int4 | after signs and Hadamard: 16 cells, a scale per 64 values | about 9 % of the group's norm |
| int3 | 8 cells | lossy: about 18 % |
| int2 | 4 cells | lossy: about 34 % |

Hidden states have a few channels 20–36 times the median, so one scale per token wastes nearly all of four bits: random
signs and an orthogonal Hadamard transform of 64 values (both fixed, nothing is stored) spread each outlier over its
block, and being orthogonal they keep the error's norm. `channel_rms` divides by a static per-channel RMS first. Scales
are bf16, rounded up, so the largest value is never clipped in the absolute-maximum codecs.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.shards.layout import GROUP, Spec

_TINY = 2.0**-126
_PEAK = {"int8": 127.0, "fp8": 448.0}
# Share of the group's largest magnitude that the cells cover. With few cells it pays to clip the peak: the best of
# these is chosen per group by its squared error.
_COVER = {"int4": (1.0, 0.88), "int3": (1.0, 0.88, 0.76), "int2": (1.0, 0.86, 0.72, 0.6)}


def encode_taps(taps_NLD: Tensor, spec: Spec, channel_rms_LD: Tensor | None = None) -> dict[str, Tensor]:
    """Encode finite hidden states [N, L, D] into the `taps*` tensors of `spec`, on the same device."""
    if spec.taps == "bf16":
        return {"taps": taps_NLD.to(torch.bfloat16)}
    if spec.bits:
        return _encode_grouped(taps_NLD.float(), spec, channel_rms_LD)
    values = taps_NLD.float()
    scale_NL = _bf16_up((values.abs().amax(-1) / _PEAK[spec.taps]).clamp_min(_TINY))
    scaled = values / scale_NL[..., None]
    stored = scaled.round().to(torch.int8) if spec.taps == "int8" else scaled.to(torch.float8_e4m3fn)
    return {"taps.scale": scale_NL.to(torch.bfloat16), "taps": stored}


def decode_taps(
    encoded: dict[str, Tensor], spec: Spec, channel_rms_LD: Tensor | None = None, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Hidden states [N, L, D] in `dtype`, on the device of the encoded tensors."""
    stored = encoded["taps"]
    if spec.taps == "bf16":
        return stored.to(dtype)
    if spec.bits:
        return _decode_grouped(encoded, spec, channel_rms_LD).to(dtype)
    return (stored.float() * encoded["taps.scale"].float()[..., None]).to(dtype)


def channel_rms(taps_NLD: Tensor) -> Tensor:
    """Static per-channel root mean square [L, D] (fp32) of a sample of tokens; silent channels get 1.

    Every token is brought to unit norm first: the first token of a row can be a thousand times larger than the rest,
    and would otherwise be all the average sees.
    """
    values = taps_NLD.double()
    unit = values / values.norm(dim=-1, keepdim=True).clamp_min(_TINY)
    rms = (unit.square().mean(0) * unit.shape[-1]).sqrt().float()
    return torch.where(rms > 0, rms, torch.ones_like(rms))


# ------------------------------------------------------------------------------------------------ grouped codecs


def _encode_grouped(values_NLD: Tensor, spec: Spec, rms_LD: Tensor | None) -> dict[str, Tensor]:
    assert spec.bits is not None
    if spec.channel_rms:
        values_NLD = values_NLD / _required(rms_LD).to(values_NLD)
    padded = F.pad(values_NLD, (0, spec.padded_size - spec.hidden_size))
    rotated = _rotate((padded * _signs(spec, values_NLD.device)).unflatten(-1, (-1, GROUP)))
    cells = 1 << spec.bits
    peak = rotated.abs().amax(-1)
    best: Any = None
    for cover in _COVER[spec.taps]:
        scale = _bf16_up((peak * (2 * cover / cells)).clamp_min(_TINY))
        cell = (rotated / scale[..., None] + cells / 2).floor().clamp_(0, cells - 1)
        if len(_COVER[spec.taps]) == 1:
            best = scale, cell, None
            break
        error = ((cell + (0.5 - cells / 2)) * scale[..., None] - rotated).square().sum(-1)
        if best is None:
            best = scale, cell, error
        else:
            better = error < best[2]
            best = (
                torch.where(better, scale, best[0]),
                torch.where(better[..., None], cell, best[1]),
                torch.where(better, error, best[2]),
            )
    cells_NLD = best[1].to(torch.uint8).flatten(-2)
    return {"taps.scale": best[0].to(torch.bfloat16), "taps": _pack(cells_NLD, spec.bits)}


def _decode_grouped(encoded: dict[str, Tensor], spec: Spec, rms_LD: Tensor | None) -> Tensor:
    assert spec.bits is not None
    cells = _unpack(encoded["taps"], spec.bits).unflatten(-1, (-1, GROUP))
    rotated = (cells.float() + (0.5 - (1 << spec.bits) / 2)) * encoded["taps.scale"].float()[..., None]
    values = (_rotate(rotated).flatten(-2) * _signs(spec, rotated.device))[..., : spec.hidden_size]
    return values * _required(rms_LD).to(values) if spec.channel_rms else values


def _required(rms_LD: Tensor | None) -> Tensor:
    if rms_LD is None:
        raise ValueError("this codec divides by per-channel RMS values, and none were given")
    return rms_LD


def _rotate(grouped: Tensor) -> Tensor:
    """Orthonormal Hadamard transform of each group [..., G, 64]. Its own inverse."""
    return torch.matmul(grouped, _hadamard(grouped.device))


@lru_cache(maxsize=8)
def _hadamard(device: torch.device) -> Tensor:
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < GROUP:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    scaled: Tensor = matrix / GROUP**0.5
    return scaled.to(device)


def _signs(spec: Spec, device: torch.device) -> Tensor:
    return _sign_table(spec.num_taps, spec.padded_size, device)


@lru_cache(maxsize=8)
def _sign_table(taps: int, width: int, device: torch.device) -> Tensor:
    """Fixed signs [L, D'], from a hash: the same for every run and library version, because decoding depends on it."""
    raw = hashlib.shake_256(b"dspark tap signs").digest(taps * width // 8)
    bits = torch.tensor(list(raw), dtype=torch.uint8)[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return (bits.flatten().view(taps, width).float() * 2 - 1).to(device)


def _pack(cells: Tensor, bits: int) -> Tensor:
    """Cells [..., W] (uint8) in W·bits/8 bytes: part i of the row goes to bit i·bits of each byte; 3 bits = 2 + 1."""
    if bits == 3:
        return torch.cat([_pack(cells & 3, 2), _pack(cells >> 2, 1)], -1)
    parts = cells.chunk(8 // bits, -1)
    out = parts[0].clone()
    for index, part in enumerate(parts[1:], 1):
        out |= part << (bits * index)
    return out


def _unpack(packed: Tensor, bits: int) -> Tensor:
    if bits == 3:
        low, high = packed.split([packed.shape[-1] // 3 * 2, packed.shape[-1] // 3], -1)
        return _unpack(low, 2) | (_unpack(high, 1) << 2)
    return torch.cat([(packed >> (bits * index)) & ((1 << bits) - 1) for index in range(8 // bits)], -1)


def _bf16_up(positive: Tensor) -> Tensor:
    """The smallest bf16 number that is not below each (positive, finite) fp32 value, as fp32."""
    bits = positive.contiguous().view(torch.int32)
    return ((bits + 0xFFFF) & -65536).view(torch.float32)
