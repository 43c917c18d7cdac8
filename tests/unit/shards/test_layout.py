"""Byte arithmetic: what `plan` prints is what the writer writes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors

from pipeline.shards.layout import Spec, framed, header, kept_positions, member_bytes, tar_bytes
from tests.unit.shards.cache import spec_of

QWEN3_4B = {"num_taps": 5, "hidden_size": 2560, "vocab_size": 151_936, "topk": 64, "positions": "supervised"}


@pytest.mark.parametrize(
    ("taps", "logits", "low", "high"),
    [
        ("bf16", "last_hidden", 30_650, 30_800),
        ("fp8", "topk", 13_000, 13_300),
        ("int8", "topk", 13_000, 13_300),
        ("int4", "topk", 6_900, 7_300),
        ("int3", "topk", 5_300, 5_700),
        ("int2", "topk", 3_700, 4_100),
    ],
)
def test_bytes_per_token_of_qwen3_4b(taps: str, logits: str, low: int, high: int) -> None:
    assert low <= Spec(taps=taps, logits=logits, **QWEN3_4B).bytes_per_token() <= high


def test_unsupervised_tokens_carry_no_distribution() -> None:
    spec = Spec(taps="bf16", logits="last_hidden", **QWEN3_4B)
    assert spec.bytes_per_token(0.0) == 5 * 2560 * 2 + 5
    everywhere = Spec(taps="bf16", logits="last_hidden", **{**QWEN3_4B, "positions": "all"})
    assert everywhere.bytes_per_token(0.0) == spec.bytes_per_token(1.0)


def test_exact_states_keep_the_targets_dtype() -> None:
    sizes = {dtype: spec_of("bf16", "last_hidden", dtype=dtype).bytes_per_token() for dtype in ("bfloat16", "float32")}
    assert sizes["float32"] - sizes["bfloat16"] == 2 * 32


def test_positions_kept_serve_both_anchor_rules_s7_s11() -> None:
    mask = np.array([0, 0, 1, 1, 0, 1], dtype=np.uint8)
    assert kept_positions(mask, "supervised").tolist() == [1, 2, 4]  # p with mask[p + 1] = 1
    assert kept_positions(mask, "all").tolist() == [0, 1, 2, 3, 4, 5]


def test_header_is_safetensors_and_lengths_add_up() -> None:
    spec = spec_of("int4", "topk")
    head = header(spec, tokens=7, positions=3, metadata={"id": "ü"})
    assert len(head) % 64 == 0
    table = json.loads(head[8:])
    payload = spec.payload_bytes(7, 3)
    assert max(entry["data_offsets"][1] for name, entry in table.items() if name != "__metadata__") == payload
    read = safetensors.deserialize(head + b"\0" * payload)
    assert {name for name, _ in read} == {field.name for field in spec.fields()}
    assert member_bytes(spec, tokens=7, positions=3, metadata={"id": "ü"}) == len(head) + payload


def test_tar_framing() -> None:
    assert framed(512) == 1024 and framed(513) == 1536
    assert tar_bytes(0) == 10_240 and tar_bytes(10_240) == 20_480
