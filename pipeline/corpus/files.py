"""Reading JSONL, JSON, parquet and arrow files row by row, in ranges, without holding a file in memory.

    for bounds in file_ranges(path):
        for raw in file_rows(path, bounds[0], bounds[1]):
            raw.file, raw.line, raw.value, raw.problem

A line of a JSONL range is numbered from 1 within the range; `bounds[2]` says which number that is in the file, or None
where only counting the lines of the ranges before can tell. A damaged line or value is one bad row; a file that breaks
off or cannot be unpacked is an error, because nobody can count what is lost behind that place.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pipeline.errors import DataError

_RANGE_BYTES = 64 << 20
_MAX_LINE_BYTES = 32 << 20
_ROWS_PER_RANGE = 20_000
_BATCH_ROWS = 256
_READ_CHARACTERS = 1 << 16

BLANK = "blank"  # the problem of a line that is no row: it only keeps the line numbers right

Bounds = tuple[int, int | None, int | None]


@dataclass(frozen=True)
class Raw:
    """One raw row or the reason there is none. `line` is 1-based: a line of text, or a row of a columnar file."""

    file: str
    line: int
    value: Any = None
    problem: str | None = None
    detail: str = ""


def file_ranges(path: Path) -> list[Bounds]:
    """(start, stop, number of the first line) of each piece of a file: bytes for JSONL, row groups for parquet.

    Raises DataError for a format that is not read, or a file that is damaged or not of the format it is named after.
    """
    kind = _kind(path)
    if kind == "jsonl":
        size = path.stat().st_size
        return [
            (start, min(start + _RANGE_BYTES, size), 1 if start == 0 else None)
            for start in range(0, max(size, 1), _RANGE_BYTES)
        ]
    if kind == "parquet":
        with _sound(path, kind):
            return _row_group_ranges(path)
    return [(0, None, 1)]


def file_rows(path: Path, start: int = 0, stop: int | None = None, *, name: str | None = None) -> Iterator[Raw]:
    """Raw rows of a range of a file. Raises DataError where the file is damaged beyond one row.

    `name` is what the rows call the file; by default its own name.
    """
    kind, name = _kind(path), name or path.name
    with _sound(path, kind):
        if kind == "jsonl":
            yield from _jsonl(path, name, start, stop)
        elif kind == "gzip":
            yield from _gzip(path, name)
        elif kind == "json":
            yield from _array(path, name)
        elif kind == "parquet":
            yield from _parquet(path, name, start, stop)
        else:
            yield from _arrow(path, name)


@contextmanager
def _sound(path: Path, kind: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, ValueError, zlib.error) as error:  # pyarrow's own errors are among these
        raise DataError(
            f"{path}: cannot be read as {kind} ({str(error).strip()}): it is damaged, cut off, or of another format"
        ) from error


def _kind(path: Path) -> str:
    name = path.name.lower()
    if name.endswith((".jsonl.gz", ".ndjson.gz", ".json.gz")):
        return "gzip"
    if name.endswith((".jsonl", ".ndjson")):
        return "jsonl"
    if name.endswith(".json"):
        with path.open("rb") as file:
            return "json" if file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[") else "jsonl"
    if name.endswith(".parquet"):
        return "parquet"
    if name.endswith((".arrow", ".feather")):
        return "arrow"
    raise DataError(f"{path}: unknown format; json, jsonl, jsonl.gz, parquet and arrow are read")


# ---------------------------------------------------------------------------------------------------- lines


def _jsonl(path: Path, name: str, start: int, stop: int | None) -> Iterator[Raw]:
    """Lines whose first byte lies in [start, stop): every line of the file belongs to exactly one range."""
    with path.open("rb") as file:
        if start:
            file.seek(start - 1)
            _rest_of_line(file)
        yield from _lines(file, name, stop)


def _gzip(path: Path, name: str) -> Iterator[Raw]:
    with gzip.open(path, "rb") as file:
        yield from _lines(file, name, None)  # type: ignore[arg-type]


def _lines(file: IO[bytes], name: str, stop: int | None) -> Iterator[Raw]:
    number = 0
    while stop is None or file.tell() < stop:
        number += 1
        line = file.readline(_MAX_LINE_BYTES)
        if not line:
            return
        if len(line) == _MAX_LINE_BYTES and not line.endswith(b"\n"):
            _rest_of_line(file)
            yield Raw(name, number, problem="line_too_long", detail=f"longer than {_MAX_LINE_BYTES >> 20} MiB")
        else:
            yield _parsed(line, name, number) if line.strip() else Raw(name, number, problem=BLANK)


def _rest_of_line(file: IO[bytes]) -> None:
    while (piece := file.readline(_MAX_LINE_BYTES)) and not piece.endswith(b"\n"):
        pass


def _parsed(line: bytes, name: str, number: int) -> Raw:
    try:
        return Raw(name, number, json.loads(line.removeprefix(b"\xef\xbb\xbf").rstrip()))
    except (ValueError, RecursionError) as error:
        return Raw(name, number, problem="bad_json", detail=str(error))


# ---------------------------------------------------------------------------------------------------- arrays


def _array(path: Path, name: str) -> Iterator[Raw]:
    """Elements of one JSON array, decoded from a sliding buffer; `line` counts elements."""
    decoder, number, ended = json.JSONDecoder(), 0, False
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        buffer = file.read(_READ_CHARACTERS)
        at = buffer.index("[") + 1  # `_kind` saw it
        while True:
            at = _skip(buffer, at, " \t\r\n,")
            if at < len(buffer) and buffer[at] == "]":
                return
            try:
                value, end = decoder.raw_decode(buffer, at)
                if end < len(buffer) or ended:  # a number at the buffer's end may go on
                    number, at = number + 1, end
                    yield Raw(name, number, value)
                    continue
                problem = ""
            except (ValueError, RecursionError) as error:
                problem = str(error)
            if ended or len(buffer) - at > _MAX_LINE_BYTES:
                raise ValueError(f"element {number + 1} of the array is no JSON or too long: {problem}")
            piece = file.read(max(_READ_CHARACTERS, len(buffer) - at))
            buffer, at, ended = buffer[at:] + piece, 0, not piece


def _skip(text: str, at: int, characters: str) -> int:
    while at < len(text) and text[at] in characters:
        at += 1
    return at


# ---------------------------------------------------------------------------------------------------- columns


def _row_group_ranges(path: Path) -> list[Bounds]:
    import pyarrow.parquet as parquet

    metadata = parquet.read_metadata(path)
    ranges: list[Bounds] = []
    start, rows, line = 0, 0, 1
    for group in range(metadata.num_row_groups):
        rows += metadata.row_group(group).num_rows
        if rows >= _ROWS_PER_RANGE or group == metadata.num_row_groups - 1:
            ranges.append((start, group + 1, line))
            start, line, rows = group + 1, line + rows, 0
    return ranges or [(0, 0, 1)]  # a file without rows is one empty range, as an empty text file is


def _parquet(path: Path, name: str, start: int, stop: int | None) -> Iterator[Raw]:
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(path) as file:
        groups = list(range(start, file.num_row_groups if stop is None else stop))
        line = 1
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, row_groups=groups, use_threads=False):
            yield from _values(batch, name, line)
            line += batch.num_rows


def _arrow(path: Path, name: str) -> Iterator[Raw]:
    """Arrow IPC: the stream form (what `datasets` writes) and the file form (feather)."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as file:
        try:
            reader = pa.ipc.open_stream(file)
            batches: Iterator[Any] = iter(reader)
        except pa.ArrowInvalid:
            whole = pa.ipc.open_file(file)
            batches = (whole.get_batch(index) for index in range(whole.num_record_batches))
        line = 1
        for batch in batches:
            for offset in range(0, batch.num_rows, _BATCH_ROWS):
                yield from _values(batch.slice(offset, _BATCH_ROWS), name, line + offset)
            line += batch.num_rows


def _values(batch: Any, name: str, line: int) -> Iterator[Raw]:
    """Rows of a record batch. A value that Python cannot hold (text that is no UTF-8, a date far off) costs its row."""
    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError) as error:
        if batch.num_rows == 1:
            yield Raw(name, line, problem="bad_value", detail=str(error))
            return
        for offset in range(batch.num_rows):
            yield from _values(batch.slice(offset, 1), name, line + offset)
        return
    for offset, value in enumerate(rows):
        yield Raw(name, line + offset, value)
