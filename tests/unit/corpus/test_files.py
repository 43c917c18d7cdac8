"""Files of every format are read row by row, in ranges, with their line numbers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from pipeline.corpus import files
from pipeline.corpus.files import BLANK, file_ranges, file_rows
from pipeline.errors import DataError

ROWS = [{"number": number, "text": "ü" * (number % 7), "list": [1, number]} for number in range(97)]


def write(folder: Path, suffix: str) -> Path:
    path = folder / f"rows{suffix}"
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    if suffix == ".jsonl":
        path.write_text(lines)
    elif suffix == ".jsonl.gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif suffix == ".json":
        path.write_text(json.dumps(ROWS, indent=1))
    elif suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=10)
    elif suffix == ".arrow":
        table = pa.Table.from_pylist(ROWS)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=13)
    else:
        table = pa.Table.from_pylist(ROWS)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=13)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json", ".parquet", ".arrow", ".feather"])
def test_ranges_cover_every_row_once_with_its_line(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_RANGE_BYTES", 333)
    monkeypatch.setattr(files, "_ROWS_PER_RANGE", 25)
    monkeypatch.setattr(files, "_READ_CHARACTERS", 50)
    path = write(tmp_path, suffix)
    found, before = [], 0
    for start, stop, first in file_ranges(path):
        raws = list(file_rows(path, start, stop))
        shift = before if first is None else first - 1
        found += [(raw.line + shift, raw.value) for raw in raws]
        before = shift + (raws[-1].line if raws else 0)
    assert found == list(enumerate(ROWS, 1))


def test_a_bad_line_is_one_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n\n{"a": \nnull\n{"a": 2}')
    found = [(raw.line, raw.problem) for raw in file_rows(path)]
    assert found == [(1, None), (2, BLANK), (3, "bad_json"), (4, None), (5, None)]


def test_a_line_too_long_to_hold_is_one_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MAX_LINE_BYTES", 40)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"a": "x" * 500}) + '\n{"a": 2}\n')
    assert [(raw.line, raw.problem) for raw in file_rows(path)] == [(1, "line_too_long"), (2, None)]


def test_a_file_that_breaks_off_or_is_something_else_is_named_and_never_read_as_a_shorter_one(tmp_path: Path) -> None:
    rows = [{"prompt": f"Question {n}?", "response": "Yes. " * n} for n in range(3000)]
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "whole.parquet")
    with pa.ipc.new_stream(tmp_path / "whole.arrow", pa.Table.from_pylist(rows).schema) as stream:
        stream.write_table(pa.Table.from_pylist(rows), max_chunksize=100)
    whole = (tmp_path / "whole.parquet").read_bytes()
    spoilt = {
        "cut.json": json.dumps(rows).encode()[:-200],
        "bad.json": b'[{"a": 1}, {bad}, {"a": 2}]',
        "cut.jsonl.gz": gzip.compress(lines)[:-200],
        "other.jsonl.gz": lines,
        "cut.arrow": (tmp_path / "whole.arrow").read_bytes()[:-5000],
        "empty.arrow": b"",
        "other.arrow": lines,
        "cut.parquet": whole[:-200],
        "page.parquet": whole[:2000] + bytes(600) + whole[2600:],
        "empty.parquet": b"",
        "other.parquet": lines,
    }
    for name, content in spoilt.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name}: cannot be read as"):
            for bounds in file_ranges(tmp_path / name):
                list(file_rows(tmp_path / name, bounds[0], bounds[1]))


def test_a_value_python_cannot_hold_costs_its_own_row(tmp_path: Path) -> None:
    texts = pa.array([b"Yes", b"\xff", b"No"], pa.binary()).view(pa.string())
    parquet.write_table(pa.table({"prompt": ["a", "b", "c"], "response": texts}), tmp_path / "rows.parquet")
    found = [(raw.line, raw.problem) for raw in file_rows(tmp_path / "rows.parquet")]
    assert found == [(1, None), (2, "bad_value"), (3, None)]


def test_lines_in_a_file_called_json_are_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    assert [raw.value for raw in file_rows(path)] == [{"a": 1}, {"a": 2}]


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a\n1\n")
    with pytest.raises(DataError, match="unknown format"):
        file_ranges(tmp_path / "rows.csv")
