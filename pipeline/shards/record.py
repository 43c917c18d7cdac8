"""One sample of a target shard: to bytes and back, without copies.

member = pack(tensors, spec, metadata)                     # a complete .safetensors file
encoded = unpack(buffer, spec, where="train-00000.tar/00000-000003")
sample = encoded.decode(spec)                              # Sample: ids, mask, taps, teacher
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import ArtifactError
from pipeline.shards.codecs import decode_taps
from pipeline.shards.layout import SIZES, Spec, header, kept_positions

_DTYPES = {
    "I32": torch.int32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "I8": torch.int8,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class Teacher:
    """The target's distribution at `positions_P` (int64, within the sample). `kind` says which tensors are set.

    topk: `ids_Pn` (int64), `logprobs_Pn` (fp32), `tail_P` (fp32, log of the tail mass); last_hidden: `hidden_PD`
    (post final norm, stored dtype); full: `logits_PV` (fp32).
    """

    kind: str
    positions_P: Tensor
    ids_Pn: Tensor | None = None
    logprobs_Pn: Tensor | None = None
    tail_P: Tensor | None = None
    hidden_PD: Tensor | None = None
    logits_PV: Tensor | None = None


@dataclass(frozen=True)
class Sample:
    """A decoded row: `ids_T` int64, `mask_T` bool, `taps_TLD` in the dtype asked for."""

    id: str
    source: str
    turn: int
    ids_T: Tensor
    mask_T: Tensor
    taps_TLD: Tensor
    teacher: Teacher


@dataclass(frozen=True)
class Encoded:
    """A row as stored. `tensors` view the shard's bytes."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str] = field(default_factory=dict)

    def decode(
        self,
        spec: Spec,
        channel_rms_LD: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Sample:
        """One row; `decode_all` does many at once."""
        return decode_all([self], spec, channel_rms_LD, dtype=dtype, device=device)[0]


# ------------------------------------------------------------------------------------------------ bytes


def pack(tensors: Mapping[str, Tensor], spec: Spec, metadata: Mapping[str, str]) -> bytes:
    """The member of one sample. Tensors must be on the CPU and have exactly the spec's names, dtypes and shapes."""
    tokens = tensors["ids"].shape[0]
    counts = [tensors[f.name].shape[0] for f in spec.fields() if f.per == "position"]
    positions = counts[0] if counts else 0
    parts = [header(spec, tokens=tokens, positions=positions, metadata=metadata)]
    for f in spec.fields():
        tensor = tensors[f.name]
        rows = positions if f.per == "position" else tokens
        if tensor.dtype != _DTYPES[f.dtype] or tuple(tensor.shape) != (rows, *f.row):
            raise ValueError(
                f"{f.name}: {tensor.dtype} {tuple(tensor.shape)} given, {f.dtype} {(rows, *f.row)} to be written"
            )
        parts.append(_bytes(tensor))
    return b"".join(parts)


def _bytes(tensor: Tensor) -> bytes:
    """The tensor's own bytes. bf16 and fp8 have no numpy type, so everything passes as uint8."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def read_header(buffer: Any, where: str | Callable[[], str]) -> tuple[int, dict[str, Any]]:
    """(start of the data, header table) of a safetensors buffer. Raises ArtifactError when it is not one."""
    length = int.from_bytes(bytes(buffer[:8]), "little")
    if not 2 <= length <= len(buffer) - 8:
        raise ArtifactError(f"{_name(where)}: not a safetensors file (header of {length} bytes in {len(buffer)})")
    try:
        table = json.loads(bytes(buffer[8 : 8 + length]))
    except ValueError as error:
        raise ArtifactError(f"{_name(where)}: damaged header ({error})") from error
    return 8 + length, table


def unpack(buffer: Any, spec: Spec, *, where: str | Callable[[], str]) -> Encoded:
    """View a member's bytes as tensors. Every dtype, shape and byte length is checked against the spec.

    `buffer` is writable bytes (bytearray, private mmap); tensors share it. `where` names the sample, or makes its name
    when one is needed. Raises ArtifactError naming the tensor.
    """
    start, table = read_header(buffer, where)
    metadata = table.pop("__metadata__", {})
    expected = spec.fields()
    if len(table) != len(expected) or any(f.name not in table for f in expected):
        raise ArtifactError(f"{_name(where)}: holds {sorted(table)}, expected {sorted(f.name for f in expected)}")
    tokens, end = table["ids"]["shape"][0], 0
    tensors = {}
    for f in expected:
        entry = table[f.name]
        shape, rows = entry["shape"], entry["shape"][0]
        size = rows * f.row_bytes
        if (
            entry["dtype"] != f.dtype
            or tuple(shape[1:]) != f.row
            or entry["data_offsets"] != [end, end + size]
            or (f.per == "token" and rows != tokens)
        ):
            raise ArtifactError(
                f"{_name(where)}: {f.name} is {entry}, expected {f.dtype} of {f.row} per {f.per} at byte {end}"
            )
        if start + end + size > len(buffer):
            raise ArtifactError(
                f"{_name(where)}: {f.name} ends at byte {start + end + size}, the member has {len(buffer)}"
            )
        dtype = _DTYPES[f.dtype]
        if size:
            flat = torch.frombuffer(buffer, dtype=dtype, count=size // SIZES[f.dtype], offset=start + end)
        else:
            flat = torch.empty(0, dtype=dtype)
        tensors[f.name] = flat.view(shape) if f.row else flat
        end += size
    if start + end != len(buffer):
        raise ArtifactError(f"{_name(where)}: {len(buffer)} bytes, its header accounts for {start + end}")
    return Encoded(tensors, metadata)


def _name(where: str | Callable[[], str]) -> str:
    return where if isinstance(where, str) else where()


# ------------------------------------------------------------------------------------------------ decoding


def decode_all(
    rows: Sequence[Encoded],
    spec: Spec,
    channel_rms_LD: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> list[Sample]:
    """Decode rows together on `device`: their tensors are laid end to end, moved once, decoded, and split again."""
    if not rows:
        return []
    joined = {
        f.name: torch.cat([row.tensors[f.name] for row in rows]).to(device, non_blocking=True) for f in spec.fields()
    }
    tokens = [row.tensors["ids"].shape[0] for row in rows]
    positions = [torch.from_numpy(kept_positions(row.tensors["mask"].numpy(), spec.positions)) for row in rows]
    kept = torch.cat(positions).to(device, non_blocking=True)
    if spec.num_taps:
        taps = decode_taps(joined, spec, channel_rms_LD, dtype=dtype)
    else:
        taps = torch.zeros(sum(tokens), 0, spec.hidden_size, dtype=dtype, device=device)
    teachers = _teachers(joined, spec, kept, [len(part) for part in positions])
    split = zip(
        joined["ids"].long().split(tokens),
        joined["mask"].bool().split(tokens),
        taps.split(tokens),
        teachers,
        strict=True,
    )
    return [
        Sample(meta.get("id", ""), meta.get("source", ""), int(meta.get("turn", "0")), *parts)
        for meta, parts in zip((row.metadata for row in rows), split, strict=True)
    ]


def _teachers(joined: Mapping[str, Tensor], spec: Spec, kept: Tensor, counts: list[int]) -> Iterator[Teacher]:
    if spec.logits == "last_hidden":
        tensors = {"hidden_PD": joined["logits.hidden"]}
    elif spec.logits == "full":
        tensors = {"logits_PV": joined["logits.full"]}
    else:
        ids = joined["logits.ids"]
        tensors = {
            "ids_Pn": ids.to(torch.int64),
            "logprobs_Pn": joined["logits.logprobs"].float(),
            "tail_P": joined["logits.tail"],
        }
    pieces = {name: tensor.split(counts) for name, tensor in tensors.items()}
    for index, positions in enumerate(kept.split(counts)):
        yield Teacher(spec.logits, positions, **{name: piece[index] for name, piece in pieces.items()})
