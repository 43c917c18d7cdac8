"""Where raw rows come from: local files of any common format, hub data sets, demo sets; cut into units of work.

    for unit in plan_units(config.data, seed=config.seed):
        for raw in read_unit(unit):
            raw.value or raw.problem            # with raw.file and raw.line, always

The list of units is a pure function of the files and the config, never of how many processes read them. Reading
streams: one line, one array element or one small record batch at a time. Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.config import Data, Source
from pipeline.corpus.demo import demo_rows, demo_size
from pipeline.corpus.files import BLANK, Raw, file_ranges, file_rows
from pipeline.corpus.hub import hub_rows
from pipeline.errors import ConfigError
from pipeline.identity import hub_commit, local_files

_ROWS_PER_UNIT = 20_000


@dataclass(frozen=True)
class Piece:
    """A range of one file, hub split or demo set. start/stop are bytes for JSONL, row groups for parquet, else rows."""

    file: str
    start: int = 0
    stop: int | None = None
    first_line: int | None = 1  # of `start`; None where only a count of the earlier ranges' lines can tell
    name: str = ""  # of a local file in listings: as much of its path as no other file of the corpus shares


@dataclass(frozen=True)
class Unit:
    """What one worker reads in one go. `limit` counts raw rows over all its pieces."""

    key: str
    source_index: int
    source: Source
    seed: int
    pieces: tuple[Piece, ...]
    limit: int | None = None
    default_name: str = ""  # source name of rows that bring none: the demo's, the hub id's or the file's


def plan_units(data: Data, *, seed: int) -> list[Unit]:
    """Units of all sources, in order. Raises ConfigError for sources that name nothing, with every problem at once."""
    units: list[Unit] = []
    problems: list[str] = []
    for index, source in enumerate(data.sources):
        try:
            source = _pinned(source)
            pieces = _pieces(source)
        except ConfigError as error:
            problems += [f"data.sources.{index}: {problem}" for problem in error.problems]
            continue
        blank = Unit("", index, source, seed, ())
        if source.limit is not None and source.demo is None:
            pieces_of_units = [tuple(replace(piece, stop=None) for piece in _whole(pieces))]
        else:
            pieces_of_units = [(piece,) for piece in pieces]
        units += [
            replace(
                blank,
                key=f"{index:02d}-{number:05d}",
                pieces=group,
                limit=source.limit,
                default_name=_name(source, group),
            )
            for number, group in enumerate(pieces_of_units)
        ]
    if problems:
        raise ConfigError(problems)
    names = short_names({piece.file for unit in units for piece in unit.pieces})
    return [
        replace(unit, pieces=tuple(replace(piece, name=names[piece.file]) for piece in unit.pieces)) for unit in units
    ]


def short_names(files: Collection[str]) -> dict[str, str]:
    """The shortest end of each path that no other of them ends with: its name, where names differ."""
    named: dict[str, str] = {}
    for length in range(1, 1 + max((len(Path(file).parts) for file in files), default=0)):
        ends = {file: str(Path(*Path(file).parts[-length:])) for file in files if file not in named}
        count = Counter(ends.values())
        named |= {file: end for file, end in ends.items() if count[end] == 1}
    return named


def read_unit(unit: Unit) -> Iterator[Raw]:
    """Raw rows of a unit in order, good and bad alike: each counts, each names its file and line."""
    left = unit.limit
    for piece in unit.pieces:
        for raw in _read_piece(unit, piece):
            if left is not None and unit.source.demo is None and raw.problem != BLANK:
                if left == 0:
                    return
                left -= 1
            yield raw


def _name(source: Source, pieces: Sequence[Piece]) -> str:
    if source.demo is not None:
        return source.demo
    text = str(source.path)
    return Path(pieces[0].file).name.split(".", 1)[0] if local_files(text) else text


def _pinned(source: Source) -> Source:
    """A hub source at its commit, so that every process that reads a unit reads the same rows."""
    if source.demo is not None or local_files(str(source.path)):
        return source
    return source.model_copy(update={"revision": hub_commit(str(source.path), source.revision)})


def _pieces(source: Source) -> list[Piece]:
    if source.demo is not None:
        size = demo_size(source.demo)
        if size is None and source.limit is None:
            raise ConfigError(f"demo {source.demo} is generated without end: set its limit")
        size = min(count for count in (size, source.limit) if count is not None)
        return _row_ranges(source.demo, size)
    files = local_files(str(source.path))
    if files:
        return [Piece(str(file), *bounds) for file in files for bounds in file_ranges(file)]
    return _row_ranges(str(source.path), len(hub_split(source)))


def _row_ranges(name: str, size: int) -> list[Piece]:
    starts = range(0, size, _ROWS_PER_UNIT)
    return [Piece(name, start, min(start + _ROWS_PER_UNIT, size), start + 1) for start in starts]


def _whole(pieces: Sequence[Piece]) -> list[Piece]:
    """First range of every file: with its stop taken away it stands for the file."""
    return [piece for piece in pieces if piece.start == 0]


def _read_piece(unit: Unit, piece: Piece) -> Iterator[Raw]:
    source = unit.source
    if source.demo is not None:
        rows = demo_rows(source.demo, start=piece.start, stop=int(piece.stop or 0), seed=unit.seed)
        for line, value in enumerate(rows, 1):
            yield Raw(source.demo, line, value)
    elif local_files(str(source.path)):
        yield from file_rows(Path(piece.file), piece.start, piece.stop, name=piece.name)
    else:
        stop = piece.stop if piece.stop is not None else len(hub_split(source))
        rows = hub_split(source).select(range(piece.start, stop))
        for line, value in enumerate(rows, 1):
            yield Raw(piece.file, line, value)


def hub_split(source: Source) -> Any:
    """The memory-mapped hub split. Downloads once; offline it is read from the cache `dspark fetch` filled."""
    return hub_rows(str(source.path), subset=source.subset, split=source.split, revision=source.revision)
