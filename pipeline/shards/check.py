"""Does a tar hold exactly the members its index names? Headers only: about 2 µs a member."""

from __future__ import annotations

import os
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.shards.layout import TAR_BLOCK, framed, tar_bytes


def check_shard(path: Path, index: dict[str, list[Any]]) -> list[str]:
    """Problems of one shard against its index columns: length, holes, and each member's headers (by CRC)."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError as error:
        return [f"{path}: cannot be opened ({error.strerror})"]
    try:
        size = os.fstat(handle).st_size
        expected = tar_bytes(sum(framed(length) for length in index["bytes"]))
        if size != expected:
            return [f"{path}: {size} bytes, its index accounts for {expected}: cut, or members missing or added"]
        end = 0
        for number, (offset, length) in enumerate(zip(index["offset"], index["bytes"], strict=True)):
            if offset != end + TAR_BLOCK:
                return [f"{path}: the index leaves a gap before sample {index['id'][number]}"]
            found = os.pread(handle, TAR_BLOCK + index["head"][number], offset - TAR_BLOCK)
            if zlib.crc32(found) != index["crc"][number]:
                return [f"{path}: member {number} is {_describe(found)}, expected sample {index['id'][number]} "
                        f"(row {index['row'][number]}, {length} bytes)"]  # fmt: skip
            end += framed(length)
        if any(os.pread(handle, 2 * TAR_BLOCK, end)):
            return [f"{path}: more members than its index names"]
    finally:
        os.close(handle)
    return []


def _describe(block: bytes) -> str:
    try:
        info = tarfile.TarInfo.frombuf(block[:TAR_BLOCK], tarfile.ENCODING, "surrogateescape")
    except tarfile.HeaderError:
        return "no tar member"
    return f"{info.name} of {info.size} bytes (or its header was altered)"


def members(path: Path) -> Iterator[tuple[str, int, int]]:
    """(name, offset of the data, bytes) of every member, from the tar itself. Stops where the tar is cut."""
    with tarfile.open(path, "r:") as tar:
        for info in tar:
            yield info.name, info.offset_data, info.size
