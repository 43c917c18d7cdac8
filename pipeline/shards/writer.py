"""Writes a target shard: a tar that webdataset reads, byte for byte the same from every run, and its index.

    with ShardWriter(path, spec, shard=3) as writer:
        writer.add(row=17, tensors=…, id="…", source="…", turn=0)
    shard.row.update(writer.facts())

Keys are ours, `<shard>-<row>` in digits (a dot in a key would melt samples together when webdataset groups them); the
row's own id is a metadata field. The index has one column per fact and goes into the shard's published row, so it
counts exactly when the shard does.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from torch import Tensor
from webdataset import TarWriter

from pipeline.errors import ArtifactError
from pipeline.shards.layout import TAR_BLOCK, Spec, framed
from pipeline.shards.record import pack

SUFFIX = ".safetensors"
COLUMNS = ("row", "offset", "bytes", "head", "crc", "tokens", "supervised", "id")


def key_of(shard: int, row: int) -> str:
    """The sample's key: no dots, no slashes, sortable."""
    return f"{shard:05d}-{row:06d}"


def row_of(member: str, *, where: str) -> int:
    """The row of the token shard a member's name stands for. Raises ArtifactError for a name that is not ours."""
    found = re.fullmatch(rf"\d{{5,}}-(\d{{6,}}){re.escape(SUFFIX)}", member)
    if found is None:
        raise ArtifactError(f"{where}: {member!r} is not a sample of target shards")
    return int(found[1])


class ShardWriter:
    """Appends samples to one tar. Columns of the index:

    `row` (row of the token shard), `offset` and `bytes` of the member's data, `head` (bytes of its safetensors header),
    `crc` (CRC-32 of tar header and safetensors header together: a swapped, shifted or relabelled member fails it),
    `tokens`, `supervised` (mask sum), `id`.
    """

    def __init__(self, path: Path, spec: Spec, *, shard: int) -> None:
        self._spec, self._shard = spec, shard
        self._file = path.open("wb")
        self._tar = TarWriter(self._file, user="", group="", mtime=0, encoder=False)
        self._offset = 0
        self.index: dict[str, list[Any]] = {column: [] for column in COLUMNS}

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with nullcontext() if kind is None else suppress(OSError):  # closed at last, or its finaliser would write
                self._tar.close()
        finally:
            self._file.close()

    def add(self, *, row: int, tensors: Mapping[str, Tensor], id: str, source: str, turn: int) -> None:
        """Append one sample. `tensors` as `record.pack` wants them, on the CPU."""
        metadata = {"id": id, "source": source, "turn": str(turn)}
        member = pack(tensors, self._spec, metadata)
        key = key_of(self._shard, row)
        if "." in key or "/" in key:
            raise ValueError(f"key {key!r} would be split by tar readers")
        self._tar.write({"__key__": key, SUFFIX[1:]: member})
        head = 8 + int.from_bytes(member[:8], "little")
        facts = {
            "row": row,
            "offset": self._offset + TAR_BLOCK,
            "bytes": len(member),
            "head": head,
            "crc": zlib.crc32(member[:head], zlib.crc32(tar_header(key + SUFFIX, len(member)))),
            "tokens": int(tensors["ids"].shape[0]),
            "supervised": int(np.count_nonzero(tensors["mask"].numpy())),
            "id": id,
        }
        for column, value in facts.items():
            self.index[column].append(value)
        self._offset += framed(len(member))

    def facts(self) -> dict[str, Any]:
        """What the published row of this shard says."""
        return {"samples": len(self.index["row"]), "index": self.index}


def tar_header(name: str, size: int) -> bytes:
    """The 512-byte header webdataset's writer gives a member of ours: fixed mode, owner 0, time 0."""
    import tarfile

    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime, info.uname, info.gname = size, 0o0444, 0, "", ""
    return info.tobuf(tarfile.DEFAULT_FORMAT, tarfile.ENCODING, "surrogateescape")
