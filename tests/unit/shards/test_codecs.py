"""Codecs: bit exactness, bounds, and measured errors on states with outlier channels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipeline.shards import codecs
from pipeline.shards.calibration import codec_errors
from pipeline.shards.codecs import decode_taps, encode_taps
from tests.unit.shards.cache import ToyTarget, rows_of, spec_of


def states(tokens: int = 200, width: int = 576) -> Tensor:
    """[N, 3, D]: two channels 30 times the rest, and a first token a thousand times larger, as real targets have."""
    x = torch.randn(tokens, 3, width, generator=torch.Generator().manual_seed(0))
    x[:, :, 5] *= 30
    x[:, 1, 77] *= 25
    x[0] *= 1000
    return x


def there_and_back(x: Tensor, taps: str, **changes: object) -> Tensor:
    spec = spec_of(taps, num_taps=x.shape[1], hidden_size=x.shape[2], **changes)
    rms = codecs.channel_rms(x) if spec.channel_rms else None
    encoded = encode_taps(x, spec, rms)
    for field in spec.fields():
        if field.name.startswith("taps"):
            assert tuple(encoded[field.name].shape) == (x.shape[0], *field.row)
    return decode_taps(encoded, spec, rms)


def relative(error: Tensor, x: Tensor) -> Tensor:
    return error.norm(dim=-1) / x.norm(dim=-1)


@pytest.mark.case("CAB-07")
def test_bf16_keeps_every_bit_including_large_values_and_denormals() -> None:
    raw = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    every = raw.view(torch.bfloat16)
    finite = every[torch.isfinite(every)]
    finite = torch.cat([finite, torch.tensor([1e5], dtype=torch.bfloat16)])[None, None]
    out = there_and_back(finite, "bf16").to(torch.bfloat16)
    assert torch.equal(out.view(torch.int16), finite.view(torch.int16))


def test_int8_error_is_at_most_half_a_step_and_nothing_clips() -> None:
    x = states()
    step = x.abs().amax(-1, keepdim=True) / 127
    assert ((there_and_back(x, "int8") - x).abs() <= 0.505 * step).all()  # half a step; scales round up by < 1 %


def test_fp8_error_bound_and_no_saturation() -> None:
    x = states()
    bound = x.abs() / 16 + x.abs().amax(-1, keepdim=True) / 448 / 1024 * 1.01
    assert ((there_and_back(x, "fp8") - x).abs() <= bound).all()


@pytest.mark.parametrize(
    ("taps", "rms", "limit"), [("int4", False, 0.11), ("int4", True, 0.14), ("int3", False, 0.2), ("int2", False, 0.36)]
)
@pytest.mark.parametrize("width", [576, 100])
def test_grouped_error(taps: str, rms: bool, limit: float, width: int) -> None:
    x = states(width=width)
    assert relative(there_and_back(x, taps, channel_rms=rms) - x, x)[1:].mean() < limit


def test_the_rotation_is_what_makes_four_bits_enough() -> None:
    """Plain four bits per token lose every channel but the outliers: that codec is not offered."""
    x = states()[1:]
    quiet = torch.ones(x.shape[-1], dtype=torch.bool)
    quiet[[5, 77]] = False
    step = x.abs().amax(-1, keepdim=True) / 7.5
    plain = ((x / step - 0.5).round().clamp(-8, 7) + 0.5) * step
    ours = there_and_back(x, "int4")
    assert (plain - x)[..., quiet].norm() > 3 * (ours - x)[..., quiet].norm()


def test_zero_rows_and_tiny_values_stay_finite() -> None:
    x = torch.zeros(4, 2, 64)
    x[1, 0, 3] = 1e-42
    x[2] = 1e36
    for taps in ("fp8", "int8", "int4", "int3", "int2"):
        out = there_and_back(x, taps)
        assert torch.isfinite(out).all(), taps
        assert out[0].abs().max() < 1e-30, taps


def test_signs_and_packing_are_pinned() -> None:
    """Decoding an old cache depends on them: these values must never change."""
    signs = codecs._sign_table(2, 64, torch.device("cpu"))
    assert "".join("+" if value > 0 else "-" for value in signs[0, :16]) == PINNED_SIGNS
    cells = torch.arange(16, dtype=torch.uint8)
    assert codecs._pack(cells, 4).tolist() == [0x80, 0x91, 0xA2, 0xB3, 0xC4, 0xD5, 0xE6, 0xF7]
    for bits in (2, 3, 4):
        cells = torch.randint(0, 1 << bits, (5, 128), dtype=torch.uint8)
        packed = codecs._pack(cells, bits)
        assert packed.shape == (5, 128 * bits // 8)
        assert torch.equal(codecs._unpack(packed, bits), cells)


PINNED_SIGNS = "-----------+---+"


def test_rows_are_encoded_independently_of_their_neighbours() -> None:
    x = states(20)
    for taps in ("fp8", "int8", "int4", "int2"):
        alone = torch.cat([there_and_back(x[n : n + 1], taps) for n in range(20)])
        assert torch.equal(alone, there_and_back(x, taps))


def test_missing_channel_rms_is_an_error() -> None:
    with pytest.raises(ValueError, match="RMS"):
        encode_taps(states(2), spec_of("int4", hidden_size=576, channel_rms=True))


def test_errors_on_a_sample_of_rows_are_the_codecs_own() -> None:
    """Per layer, by the same numbers as on states given directly; rows that are not finite take no part."""
    rows, spec = rows_of(3), spec_of("int4")
    taps = torch.cat([ToyTarget().forward(torch.from_numpy(row.ids).long()[None]).taps_BTLD[0].float() for row in rows])
    expected = relative(decode_taps(encode_taps(taps, spec), spec) - taps, taps).mean(0)
    assert codec_errors(ToyTarget(), rows, spec, None) == pytest.approx(expected.tolist(), rel=1e-4)
    every = frozenset(int(word) for row in rows for word in row.ids)
    assert codec_errors(ToyTarget(poison=every), rows, spec, None) == []
