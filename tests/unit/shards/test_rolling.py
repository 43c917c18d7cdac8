"""A rolling cache: never above its budget, and every row at every epoch, whoever is slow, killed or gone back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.artifact import Artifact
from pipeline.errors import ConfigError, DataError
from pipeline.shards.feeder import Feeder
from pipeline.shards.reader import ShardReader
from pipeline.shards.rolling import Mark, RollingReader
from pipeline.shards.supply import Computed
from pipeline.shards.tokenrows import TokenRows
from tests.unit.shards.cache import Row, ToyTarget, artifact_of, build, rows_of, spec_of

SHARDS, ROWS = 10, 6
SPEC = spec_of("int8")


def read(path: Path) -> Iterable[Row]:
    return rows_of(ROWS, seed=int(path.read_text()))


def _ends_with(ids: Sequence[str], *, ending: str) -> list[bool]:
    return [name.endswith(ending) for name in ids]


held = partial(_ends_with, ending=".5")


@pytest.fixture
def tokens(tmp_path: Path) -> Artifact:
    artifact = Artifact(tmp_path, "tokens", {"stage": "tokens", "format": 1})
    artifact.create()
    names = [f"train-{number:05d}.parquet" for number in range(SHARDS)]
    for number, name in enumerate(names):
        with artifact.shard(name) as shard:
            shard.path.write_text(str(number))
            shard.row["samples"] = ROWS
    artifact.finish(names)
    return artifact


def reader_of(tokens: Artifact, artifact: Artifact, *, held: Any = held, **options: Any) -> RollingReader:
    return RollingReader(
        tokens, artifact, SPEC, read=read, summary={}, validation=held, seed=3, **options
    )  # fmt: skip


def feeder_of(tokens: Artifact, artifact: Artifact, max_bytes: int, *, target: Any = None, held: Any = held) -> Feeder:
    rows = TokenRows(tokens, read, window=4)
    supply = Computed(rows, artifact, target or ToyTarget(), SPEC, batch_tokens=256)
    return Feeder(rows, artifact, supply, SPEC, max_bytes=max_bytes, seed=3, validation=held)


def budget(tokens: Artifact, artifact: Artifact, shards: int) -> int:
    """Enough for the validation rows and that many of the largest shards."""
    feeder = feeder_of(tokens, artifact, 10**9)
    return feeder._pinned_bytes + shards * max(feeder.size(shard) for shard in range(SHARDS))


@contextmanager
def feeding(feeder: Feeder, folder: Path) -> Iterator[dict[str, int]]:
    """Run the feeder in a thread, and watch the bytes on disk."""
    seen = {"most": 0, "steps": 0}
    done = threading.Event()

    def feed() -> None:
        while not done.is_set():
            seen["steps"] += feeder.step()
            time.sleep(0.001)

    def watch() -> None:
        while not done.is_set():
            seen["most"] = max(seen["most"], bytes_below(folder))
            time.sleep(0.001)

    threads = [threading.Thread(target=work) for work in (feed, watch)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        done.set()
        for thread in threads:
            thread.join()


def bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


@pytest.mark.parametrize("shards", [4, 10])
def test_every_row_of_every_epoch_within_the_budget(shards: int, tokens: Artifact, tmp_path: Path) -> None:
    """Two ranks at different speeds, two epochs, batches across windows; contents as in a finished cache."""
    artifact = artifact_of(tmp_path, SPEC, tag="rolling")
    full = ShardReader.open(build(tmp_path, SPEC, sizes=(ROWS,) * SHARDS))
    limit = budget(tokens, artifact, shards)
    before = bytes_below(artifact.path)
    readers = [reader_of(tokens, artifact, rank=rank, world=2) for rank in range(2)]
    assert readers[0].index.ids == full.index.ids
    seen: list[list[str]] = [[], []]

    def train(rank: int) -> None:
        reader = readers[rank]
        for epoch in range(2):
            order = [int(n) for n in reader.index.order(3, epoch) if n not in reader.validation]
            for start in range(0, len(order), 5):
                mine = order[start : start + 5][rank::2]
                for number, sample in zip(mine, reader.batch(mine), strict=True):
                    assert torch.equal(sample.taps_TLD, full[number].taps_TLD)
                    seen[rank].append(sample.id)
                time.sleep(0.002 * rank)
            for sample in reader.batch(sorted(reader.validation)[:4]):
                assert held([sample.id]) == [True]

    with feeding(feeder_of(tokens, artifact, limit), artifact.path) as disk:
        threads = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
            assert not thread.is_alive(), "a rank waits for a shard that never comes"
    expected = sorted(name for name in full.index.ids if not held([name])[0]) * 2
    assert sorted(seen[0] + seen[1]) == sorted(expected)
    assert 0 < disk["most"] <= limit + before + 4096  # marks are a few bytes beside it
    if shards == 10:
        assert disk["steps"] == SHARDS + 1, "all fits: every shard is built once"


def test_a_run_that_goes_back_gets_its_shards_again(tokens: Artifact, tmp_path: Path) -> None:
    """Killed at the end of epoch 1, resumed in epoch 0: what was deleted is built again."""
    artifact = artifact_of(tmp_path, SPEC, tag="rolling")
    with feeding(feeder_of(tokens, artifact, budget(tokens, artifact, 4)), artifact.path):
        first = reader_of(tokens, artifact)
        orders = [[int(n) for n in first.index.order(3, epoch)] for epoch in range(2)]
        ids = {n: first.batch([n])[0].id for order in orders for n in order}
        again = reader_of(tokens, artifact)
        again.index.order(3, 0)
        for number in orders[0][20:]:
            assert again.batch([number])[0].id == ids[number]


def test_a_resumed_run_starts_in_its_own_epoch(tokens: Artifact, tmp_path: Path) -> None:
    artifact = artifact_of(tmp_path, SPEC, tag="rolling")
    reader = reader_of(tokens, artifact)
    order = reader.index.order(3, 7)
    with feeding(feeder_of(tokens, artifact, budget(tokens, artifact, 4)), artifact.path) as disk:
        for number in order:
            reader.batch([int(number)])
        assert Mark.read(artifact.path / "marks")[0].epoch == 7
    assert disk["steps"] <= 2 * SHARDS + 6, "one build and one deletion per shard"


def test_a_feeder_that_was_killed_is_replaced(tokens: Artifact, tmp_path: Path) -> None:
    """Its half-written file does not count for ever, and what it published is used."""
    artifact = artifact_of(tmp_path, SPEC, tag="rolling")
    feeder = feeder_of(tokens, artifact, budget(tokens, artifact, 4))
    assert feeder.step() and feeder.step() and feeder.step()
    leftover = artifact.path / "rolling" / ".tmp" / "elsewhere.1.train-00009.tar"
    leftover.parent.mkdir(exist_ok=True)
    leftover.write_bytes(b"x" * 10_000)
    target = ToyTarget()
    second = feeder_of(tokens, artifact, budget(tokens, artifact, 4), target=target)
    assert not leftover.exists()
    reader = reader_of(tokens, artifact)
    with feeding(second, artifact.path):
        for number in reader.index.order(3, 0):
            reader.batch([int(number)])
    second.clear()
    assert not list((artifact.path / "rolling").glob("*.tar"))


def test_another_runs_validation_rows_are_not_taken_for_ours(tokens: Artifact, tmp_path: Path) -> None:
    """A killed run left them; this one holds out other rows of the same cache."""
    artifact = artifact_of(tmp_path, SPEC, tag="rolling")
    limit = 10**9
    assert feeder_of(tokens, artifact, limit).step()
    held_here = partial(_ends_with, ending=".4")
    reader = reader_of(tokens, artifact, held=held_here)
    with feeding(feeder_of(tokens, artifact, limit, held=held_here), artifact.path):
        for number in list(reader.validation)[:3]:
            (sample,) = reader.batch([number])
            assert sample.id == reader.index.ids[number] and sample.id.endswith(".4")
    kept = artifact.path / "rolling" / "validation.tar"
    before = kept.stat().st_mtime_ns
    with feeding(feeder_of(tokens, artifact, limit, held=held_here), artifact.path):
        reader.batch(list(reader.validation)[:1])
    assert kept.stat().st_mtime_ns == before, "the same run's stay"


def test_waiting_ranks_learn_that_the_feeder_is_gone(tokens: Artifact, tmp_path: Path) -> None:
    artifact = artifact_of(tmp_path, SPEC, tag="rolling")

    def gone() -> None:
        raise DataError("the feeder ended")

    with pytest.raises(DataError, match="the feeder ended"):
        reader_of(tokens, artifact, alive=gone).batch([0])
    assert Mark.read(artifact.path / "marks")[0].waits == ()


def test_a_smaller_budget_is_kept_from_the_start(tokens: Artifact, tmp_path: Path) -> None:
    """Shards a run with more room left are too many now."""
    artifact = artifact_of(tmp_path, SPEC, tag="rolling")
    roomy = feeder_of(tokens, artifact, 10**9)
    while roomy.step():
        pass
    limit = budget(tokens, artifact, 4)
    feeder_of(tokens, artifact, limit)
    assert 0 < bytes_below(artifact.path / "rolling") <= limit


def test_a_budget_below_one_window_is_refused(tokens: Artifact, tmp_path: Path) -> None:
    artifact = artifact_of(tmp_path, SPEC, tag="rolling")
    with pytest.raises(ConfigError, match="targets.max_bytes"):
        feeder_of(tokens, artifact, budget(tokens, artifact, 2))


def test_rows_that_are_not_finite_are_named(tokens: Artifact, tmp_path: Path) -> None:
    artifact = artifact_of(tmp_path, SPEC, tag="rolling")
    reader = reader_of(tokens, artifact)
    bad = next(n for n in range(len(reader)) if n not in reader.validation)
    poison = ToyTarget(poison=frozenset({int(reader.row(bad).ids[0])}))
    with (
        feeding(feeder_of(tokens, artifact, 10**9, target=poison), artifact.path),
        pytest.raises(DataError, match="finite"),
    ):
        reader.batch([bad])
