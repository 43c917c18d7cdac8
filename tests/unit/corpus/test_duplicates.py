"""Near-duplicates: every pair at the threshold is looked at, the smallest id stays, and a copy of a copy finds it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.config import NearDuplicates
from pipeline.corpus.duplicates import Signatures, Signer, bands_of, near_duplicates, words
from pipeline.corpus.rows import Row


def row(text: str) -> Row:
    return Row.of(source="s", messages=[{"role": "user", "content": text}])


def stored(folder: Path, signatures: np.ndarray, parts: int) -> Signatures:
    """Signatures spread over part files in an order unlike that of the places."""
    part = np.arange(len(signatures), dtype=np.uint32) % parts
    row_of = np.zeros(len(signatures), np.uint32)
    files = []
    for number in range(parts):
        places = np.flatnonzero(part == number)[::-1]
        row_of[places] = np.arange(len(places))
        files.append(folder / f"{number}.sig.npy")
        np.save(files[-1], signatures[places])
    return Signatures(files, part, row_of)


def test_signatures_estimate_the_similarity_of_shingles() -> None:
    settings = NearDuplicates(permutations=512, ngram=3)
    a, b = [f"w{n}" for n in range(200)], [f"w{n}" for n in range(50, 250)]
    shingles = [{tuple(text[at : at + 3]) for at in range(198)} for text in (a, b)]
    truth = len(shingles[0] & shingles[1]) / len(shingles[0] | shingles[1])
    signer = Signer(settings)
    assert abs((signer(row(" ".join(a))) == signer(row(" ".join(b)))).mean() - truth) < 0.08
    assert (signer(row("One two, three")) == signer(row("one TWO three!"))).all()
    assert words("Don't, ünder_score 3.5") == ["don", "t", "ünder_score", "3", "5"]


def test_chats_of_signs_alone_are_alike_only_when_their_signs_are() -> None:
    signer = Signer(NearDuplicates())
    assert (signer(row("🙂 !")) == signer(row("🙂 !"))).all()
    assert (signer(row("🙂 !")) == signer(row(":-( ?"))).mean() < 0.1


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 0.95])
def test_bands_propose_pairs_at_the_threshold(threshold: float) -> None:
    bands, rows = bands_of(threshold, 128)
    assert bands * rows <= 128
    assert 1 - (1 - threshold**rows) ** bands >= 0.99
    wider = rows + 1
    assert 1 - (1 - threshold**wider) ** (128 // wider) < 0.99


def test_the_smallest_id_stays_and_similarity_is_direct(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    base = rng.integers(0, 2**32, (60, 128), dtype=np.uint32)
    near = base[7].copy()
    near[:13] = rng.integers(0, 2**32, 13)  # 115 of 128 places agree: 0.898
    far = base[8].copy()
    far[:64] = rng.integers(0, 2**32, 64)  # half agree
    signatures = np.concatenate([base, near[None], far[None], base[9:10], base[9:10]])
    gone, kept, score = near_duplicates(stored(tmp_path, signatures, parts=5), NearDuplicates(threshold=0.8))
    assert gone.tolist() == [60, 62, 63]
    assert kept.tolist() == [7, 9, 9]
    assert score.tolist() == pytest.approx([115 / 128, 1.0, 1.0])


def test_copies_of_copies_point_to_the_row_that_is_kept(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    chain = [rng.integers(0, 2**32, 128, dtype=np.uint32)]
    for step in range(1, 12):  # each agrees with the one before in 118 places, with the first in ever fewer
        chain.append(chain[-1].copy())
        chain[-1][(step * 10) % 118 : (step * 10) % 118 + 10] = rng.integers(0, 2**32, 10)
    gone, kept, score = near_duplicates(stored(tmp_path, np.stack(chain), parts=3), NearDuplicates(threshold=0.8))
    assert len(gone) >= 6
    assert set(kept.tolist()).isdisjoint(gone.tolist())
    assert (score >= 0.8).all()
