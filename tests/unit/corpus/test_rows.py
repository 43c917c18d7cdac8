"""Ids from content, splits from ids."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import Data
from pipeline.corpus.assemble import Assembly
from pipeline.corpus.rows import SPLITS, Row, copy_id, read_rows, sampled, split_of
from pipeline.errors import ArtifactError, DataError

IDS = [hashlib.sha256(str(number).encode()).hexdigest()[:16] for number in range(12_501)]


def splits_of(ids: np.ndarray, *, calibration: float, evaluation: float) -> dict[str, np.ndarray]:
    """Ids of each split, as the data stage divides them."""
    data = Data(sources=[{"path": "x"}], calibration_fraction=calibration, evaluation_fraction=evaluation)  # type: ignore[arg-type]
    places = np.zeros(len(ids), [("id", "<u8")])
    places["id"] = ids
    return {split: found["id"] for split, found in Assembly(Path(), [], data)._split(places).items()}


@pytest.mark.case("DAT-11")
@pytest.mark.parametrize("ratio", [0.01, 0.05, 0.1, 0.2, 0.3, 0.9, 0.95, 0.99])
def test_splits_are_disjoint_and_complete_for_every_size_and_ratio(ratio: float) -> None:
    cut = min(ratio, 0.999 - ratio) if ratio < 0.5 else 0.0
    names = [split_of(row_id, calibration=cut, evaluation=ratio) for row_id in IDS]
    assert abs(names.count("evaluation") / len(IDS) - ratio) < 0.02
    assert abs(names.count("calibration") / len(IDS) - cut) < 0.02
    ids = np.array([int(row_id, 16) for row_id in IDS], np.uint64)
    whole = splits_of(ids, calibration=cut, evaluation=ratio)
    assert {split: len(found) for split, found in whole.items()} == {split: names.count(split) for split in SPLITS}
    for count in [*range(1, 2001, 37), 2000, 12_501]:
        some = splits_of(ids[:count], calibration=cut, evaluation=ratio)
        assert sorted(np.concatenate(list(some.values()))) == sorted(ids[:count])  # each id in one split, none lost
        for split, found in some.items():  # whatever other rows there are
            assert np.isin(found, whole[split]).all()


@given(st.text(alphabet="0123456789abcdef", min_size=16, max_size=16), st.floats(0, 0.5), st.floats(0, 0.49))
@settings(max_examples=200, deadline=None)
def test_growing_one_split_only_takes_rows_from_train(row_id: str, calibration: float, evaluation: float) -> None:
    held_out = split_of(row_id, calibration=0.0, evaluation=evaluation)
    both = split_of(row_id, calibration=calibration, evaluation=evaluation)
    assert both == "evaluation" if held_out == "evaluation" else both in ("train", "calibration")


def test_ids_follow_content_not_source_and_copies_stay_in_their_split() -> None:
    chat = [{"role": "user", "content": "Hi"}]
    row = Row.of(source="a", messages=chat)
    assert row.id == Row.of(source="b", messages=chat).id
    assert row.id != Row.of(source="a", messages=[{"role": "user", "content": "Hi "}]).id
    copies = [copy_id(row.id, number) for number in range(1 << 16)]
    assert copies[0] == row.id
    assert len(set(copies)) == 1 << 16
    with pytest.raises(DataError, match="exact_duplicates"):
        copy_id(row.id, 1 << 16)
    assert len({split_of(copy, calibration=0.3, evaluation=0.3) for copy in copies[::1000]}) == 1


def test_weight_keeps_about_its_share_and_is_independent_of_the_split() -> None:
    kept = [row_id for row_id in IDS if sampled(row_id, 0.25)]
    assert abs(len(kept) / len(IDS) - 0.25) < 0.02
    held_out = sum(split_of(row_id, calibration=0, evaluation=0.2) == "evaluation" for row_id in kept)
    assert abs(held_out / len(kept) - 0.2) < 0.03


def test_a_damaged_line_of_a_shard_is_named(tmp_path) -> None:  # type: ignore[no-untyped-def]
    row = Row.of(source="a", messages=[{"role": "user", "content": "Hi"}])
    path = tmp_path / "train-00000.jsonl"
    path.write_bytes(row.line() + b'{"id": "x"\n')
    with pytest.raises(ArtifactError, match=r"train-00000\.jsonl:2"):
        list(read_rows(path))
    path.write_bytes(row.line())
    assert list(read_rows(path)) == [row]
