"""What a target shard holds, to the byte: tensors of a sample, member header, tar framing. Imports no torch.

    spec = Spec(taps="int4", logits="topk", topk=64, positions="supervised", num_taps=5, hidden_size=2560, …)
    spec.bytes_per_token(supervised_fraction=1.0)          # what `dspark plan` prints
    member_bytes(spec, tokens=1000, positions=600, metadata={...})   # exactly what the writer will write

A sample is one `.safetensors` member: `ids`, `mask`, then the codec's tensors, each with one row per token or per kept
position, so samples can be laid end to end and decoded in one go.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from math import prod
from typing import Any, NamedTuple

GROUP = 64  # values that share a scale in the grouped codecs, and the Hadamard block
CONVENTION = "layer l is the output of decoder layer l (transformers hidden_states[l + 1])"
TAR_BLOCK, TAR_RECORD = 512, 10_240
_ALIGN = 64
_BITS = {"int4": 4, "int3": 3, "int2": 2}
# safetensors dtype name -> bytes
SIZES = {"I32": 4, "U16": 2, "U8": 1, "I8": 1, "BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1}


class Field(NamedTuple):
    """One tensor of a sample. `per` says what a row stands for: a token, or a kept position."""

    name: str
    dtype: str
    row: tuple[int, ...]
    per: str
    row_bytes: int

    @classmethod
    def of(cls, name: str, dtype: str, row: tuple[int, ...], per: str) -> Field:
        return cls(name, dtype, row, per, SIZES[dtype] * prod(row))


@dataclass(frozen=True)
class Spec:
    """Everything that determines which bytes a sample becomes. Stored in the manifest (`targets`).

    `dtype` is the target's compute dtype: `last_hidden` keeps it, so that logits recomputed from it are exact.
    """

    taps: str
    logits: str
    topk: int
    positions: str
    num_taps: int
    hidden_size: int
    vocab_size: int
    channel_rms: bool = False
    dtype: str = "bfloat16"

    @classmethod
    def of(cls, summary: Mapping[str, Any]) -> Spec:
        """From a manifest's `targets` summary (extra keys are allowed there)."""
        return cls(**{field.name: summary[field.name] for field in fields(cls)})

    def summary(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def bits(self) -> int | None:
        """Bits of the grouped codecs; None for the others."""
        return _BITS.get(self.taps)

    @property
    def padded_size(self) -> int:
        """Width after padding to whole groups (grouped codecs only)."""
        return -(-self.hidden_size // GROUP) * GROUP if self.bits else self.hidden_size

    def fields(self) -> tuple[Field, ...]:
        """The tensors of a sample, in the order they lie in the member."""
        return _fields(self)

    def _fields(self) -> tuple[Field, ...]:
        return (
            Field.of("ids", "I32", (), "token"),
            *self._logits(),
            *self._taps(),
            Field.of("mask", "U8", (), "token"),
        )

    def _taps(self) -> tuple[Field, ...]:
        taps, width = self.num_taps, self.hidden_size
        if not taps:
            return ()
        if self.taps == "bf16":
            return (Field.of("taps", "BF16", (taps, width), "token"),)
        if self.bits:
            groups = self.padded_size // GROUP
            packed = self.padded_size * self.bits // 8
            return Field.of("taps.scale", "BF16", (taps, groups), "token"), Field.of(
                "taps", "U8", (taps, packed), "token"
            )
        dtype = {"fp8": "F8_E4M3", "int8": "I8"}[self.taps]
        return Field.of("taps.scale", "BF16", (taps,), "token"), Field.of("taps", dtype, (taps, width), "token")

    def _logits(self) -> tuple[Field, ...]:
        if self.logits == "last_hidden":
            dtype = {"bfloat16": "BF16", "float32": "F32"}[self.dtype]
            return (Field.of("logits.hidden", dtype, (self.hidden_size,), "position"),)
        if self.logits == "full":
            return (Field.of("logits.full", "F32", (self.vocab_size,), "position"),)
        kept = min(self.topk, self.vocab_size)
        ids = "U16" if self.vocab_size <= 1 << 16 else "I32"
        return (
            Field.of("logits.tail", "F32", (), "position"),
            Field.of("logits.ids", ids, (kept,), "position"),
            Field.of("logits.logprobs", "F16", (kept,), "position"),
        )

    def bytes_per_token(self, supervised_fraction: float = 1.0) -> float:
        """Payload bytes per token; `supervised_fraction` is the share of positions whose distribution is kept."""
        share = 1.0 if self.positions == "all" else supervised_fraction
        return sum(field.row_bytes * (share if field.per == "position" else 1.0) for field in self.fields())

    def payload_bytes(self, tokens: int, positions: int) -> int:
        return sum(field.row_bytes * (positions if field.per == "position" else tokens) for field in self.fields())


@cache
def _fields(spec: Spec) -> tuple[Field, ...]:
    return spec._fields()  # asked for once per sample read


def header(spec: Spec, *, tokens: int, positions: int, metadata: Mapping[str, str]) -> bytes:
    """The safetensors header of a sample: 8-byte length, JSON, spaces up to a multiple of 64 bytes."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for field in spec.fields():
        rows = positions if field.per == "position" else tokens
        end = start + rows * field.row_bytes
        table[field.name] = {"dtype": field.dtype, "shape": [rows, *field.row], "data_offsets": [start, end]}
        start = end
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    return len(text).to_bytes(8, "little") + text


def member_bytes(spec: Spec, *, tokens: int, positions: int, metadata: Mapping[str, str]) -> int:
    """Length of a sample's member, without tar framing."""
    head = header(spec, tokens=tokens, positions=positions, metadata=metadata)
    return len(head) + spec.payload_bytes(tokens, positions)


def framed(member: int) -> int:
    """Bytes a member of that length takes in a tar: its header block, and padding to whole blocks."""
    return TAR_BLOCK + -(-member // TAR_BLOCK) * TAR_BLOCK


def tar_bytes(framed_members: int) -> int:
    """Length of a tar whose framed members sum to that: two zero blocks, padded to a whole record."""
    return -(-(framed_members + 2 * TAR_BLOCK) // TAR_RECORD) * TAR_RECORD


def kept_positions(mask: Any, positions: str) -> Any:
    """Positions whose distribution is kept: p with mask[p + 1] = 1 (both anchor rules of S7 need no more), or all.

    `mask` is a numpy array [T] of 0/1; returns an int64 array.
    """
    import numpy as np

    if positions == "all":
        return np.arange(len(mask))
    return np.flatnonzero(np.asarray(mask[1:]))
