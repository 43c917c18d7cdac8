"""Near-duplicates by MinHash: signatures on disk, at most 120 bytes a row in memory, the smallest id kept.

    signature = Signer(config.data.near_duplicates)(row)             # uint32[permutations], written beside the rows
    removed = near_duplicates(signatures, settings)                  # places of rows, and what each is a copy of

Locality-sensitive hashing proposes pairs (rows that agree in one band of the signature); a pair counts when the full
signatures agree in at least `threshold` of their places, which estimates the Jaccard similarity of the word shingles.
Of each such pair the row with the larger id goes. Rows come ordered by id, so "smaller" is "earlier".
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.config import NearDuplicates
from pipeline.corpus.rows import Row

if TYPE_CHECKING:
    from datasketch import MinHash

_WORD = re.compile(r"\w+")
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"  # kana and Han: written without spaces, each is a word of its own
_WORD_OR_SIGN = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
_RECALL = 0.99  # share of pairs exactly at the threshold that some band proposes
_BANDS_AT_ONCE = 3
_PAIRS_AT_ONCE = 20_000
_ROUNDS = 16  # rows of one band group are compared with at most so many representatives
_NONE = np.uint32(0xFFFFFFFF)


def words(text: str) -> list[str]:
    """Lower-case words: what duplicates and leaks are compared by, however their characters are composed."""
    if text.isascii():
        return _WORD.findall(text.lower())
    return _WORD_OR_SIGN.findall(unicodedata.normalize("NFKC", text).lower())


@dataclass(frozen=True)
class Signer:
    """MinHash signature of a conversation's words in shingles."""

    settings: NearDuplicates

    def __call__(self, row: Row) -> np.ndarray:
        text = " ".join(message["content"] for message in row.messages)
        tokens = words(text) or text.split()  # of signs alone: two such chats are not alike for having no words
        sketch = _empty_sketch(self.settings.permutations).copy()
        sketch.update_batch(_shingles(tokens, self.settings.ngram).tolist())
        return sketch.hashvalues.astype(np.uint32)


@cache
def _empty_sketch(permutations: int) -> MinHash:
    from datasketch import MinHash

    return MinHash(num_perm=permutations, hashfunc=int)  # shingles come hashed


def _shingles(tokens: list[str], size: int) -> np.ndarray:
    """Distinct 32-bit hashes of every run of `size` words (of all words, where there are fewer)."""
    hashes = np.fromiter((zlib.crc32(token.encode()) for token in tokens), np.uint64, len(tokens))
    count = max(len(tokens) - size + 1, min(len(tokens), 1))
    columns = [hashes[at : at + count] for at in range(min(size, len(tokens)))]
    return np.unique(_mix(columns, count) >> np.uint64(32))


@dataclass
class Signatures:
    """Signatures of all rows, on disk by part. `part` and `row` say where the signature of each place lies."""

    files: Sequence[Path]
    part: np.ndarray
    row: np.ndarray

    def __len__(self) -> int:
        return len(self.part)

    @cached_property
    def _order(self) -> np.ndarray:
        return np.argsort(self.part, kind="stable").astype(np.uint32)

    def blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(places, their signatures), one part at a time."""
        bounds = np.searchsorted(self.part[self._order], np.arange(len(self.files) + 1))
        for number, file in enumerate(self.files):
            places = self._order[bounds[number] : bounds[number + 1]]
            if len(places):
                yield places, np.load(file)[self.row[places]]

    def of(self, places: np.ndarray) -> np.ndarray:
        """Signatures [len(places), permutations], read from disk."""
        found: np.ndarray | None = None
        for number in np.unique(self.part[places]):
            stored = np.load(self.files[number], mmap_mode="r")
            if found is None:
                found = np.zeros((len(places), stored.shape[1]), stored.dtype)
            here = self.part[places] == number
            found[here] = stored[self.row[places[here]]]
        return found if found is not None else np.zeros((0, 0), np.uint32)


def bands_of(threshold: float, permutations: int) -> tuple[int, int]:
    """(bands, rows per band): the most selective split that still proposes 99 % of the pairs at the threshold."""
    for rows in range(permutations, 0, -1):
        bands = permutations // rows
        if 1 - (1 - threshold**rows) ** bands >= _RECALL:
            return bands, rows
    return permutations, 1


def near_duplicates(signatures: Signatures, settings: NearDuplicates) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(places that go, the place each is kept as, their estimated similarity), in order of place."""
    bands, rows = bands_of(settings.threshold, settings.permutations)
    match = np.full(len(signatures), _NONE, np.uint32)
    score = np.zeros(len(signatures), np.float32)
    for first in range(0, bands, _BANDS_AT_ONCE):
        some = range(first, min(first + _BANDS_AT_ONCE, bands))
        hashes = np.zeros((len(some), len(signatures)), np.uint64)
        for places, values in signatures.blocks():
            for at, band in enumerate(some):
                hashes[at, places] = _mix(values[:, band * rows : (band + 1) * rows].T, len(values))
        for band_hashes in hashes:
            _match_band(band_hashes, signatures, settings.threshold, match, score)
    gone = np.flatnonzero(match != _NONE)
    return gone, _roots(match, gone), score[gone]


def _mix(columns: Iterable[np.ndarray], count: int) -> np.ndarray:
    """One 64-bit hash of each row of a table of `count` rows, given as columns of unsigned numbers."""
    state = np.zeros(count, np.uint64)
    for column in columns:
        state = (state ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        state ^= state >> np.uint64(29)
    return state


def _match_band(
    hashes: np.ndarray, signatures: Signatures, threshold: float, match: np.ndarray, score: np.ndarray
) -> None:
    """Compare rows that share a band hash with their group's first, then those left with the next first, and so on."""
    members = np.argsort(hashes, kind="stable").astype(np.uint32)  # equal hashes stay in order of id
    for _ in range(_ROUNDS):
        values = hashes[members]
        starts = (
            np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1]))) if len(values) else np.zeros(0, int)
        )
        sizes = np.diff(np.append(starts, len(members)))
        first = np.repeat(members[starts], sizes)
        pending = (members != first) & (match[members] == _NONE)
        members, first = members[pending], first[pending]
        if not len(members):
            return
        similar = np.zeros(len(members), bool)
        for at in range(0, len(members), _PAIRS_AT_ONCE):
            some = slice(at, at + _PAIRS_AT_ONCE)
            agreement = (signatures.of(members[some]) == signatures.of(first[some])).mean(axis=1)
            similar[some] = agreement >= threshold
            score[members[some][similar[some]]] = agreement[similar[some]]
        match[members[similar]] = first[similar]
        members = members[~similar]


def _roots(match: np.ndarray, gone: np.ndarray) -> np.ndarray:
    """The kept row behind each removed one: a row may be a copy of a copy."""
    kept = match[gone]
    while (chained := match[kept] != _NONE).any():
        kept[chained] = match[kept[chained]]
    return kept
