"""One pass over HTTP through webdataset: documented order, exact cursor, and accounts that notice what is missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pipeline.artifact import Artifact
from pipeline.errors import ArtifactError
from pipeline.shards.reader import ShardReader
from pipeline.shards.stream import ShardStream
from tests.store import Store, serving
from tests.unit.shards.cache import build, spec_of


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Artifact, Store]]:
    """An artifact, and a store that holds it without its index rows."""
    artifact = build(tmp_path, spec_of("int8"))
    shutil.copytree(artifact.path, tmp_path / "public")
    shutil.rmtree(tmp_path / "public" / "rows")
    with serving(tmp_path / "public") as store:
        yield artifact, store


def test_the_stream_holds_the_readers_samples_in_its_documented_order(served: tuple[Artifact, Store]) -> None:
    artifact, store = served
    stream, reader = ShardStream.open(store.url), ShardReader.open(artifact)
    assert len(stream) == len(reader) == 21 and stream.spec == reader.spec
    expected = []
    for shard in stream.shard_order(3, 1):
        span = range(int(reader.index.first[shard]), int(reader.index.first[shard + 1]))
        expected += sorted(span, key=lambda number: reader.index.offset[number])  # as they lie in the tar
    got = list(stream.samples(seed=3, epoch=1))
    assert [position for position, _ in got] == list(range(21))
    for number, (_, encoded) in zip(expected, got, strict=True):
        ours = reader[number]
        theirs = encoded.decode(stream.spec)
        assert theirs.id == ours.id and torch.equal(theirs.taps_TLD, ours.taps_TLD)
    assert len({tuple(stream.shard_order(0, epoch).tolist()) for epoch in range(20)}) > 3


@pytest.mark.case("LDR-08")
@pytest.mark.parametrize("start", [1, 8, 13, 20, 21])
def test_resuming_continues_the_same_order_and_fetches_no_shard_before_it(
    served: tuple[Artifact, Store], start: int
) -> None:
    stream = ShardStream.open(served[1].url)
    whole = [encoded.metadata["id"] for _, encoded in stream.samples(seed=0, epoch=0)]
    served[1].asked.clear()
    rest = [encoded.metadata["id"] for _, encoded in stream.samples(seed=0, epoch=0, start=start)]
    assert rest == whole[start:]
    sizes = [int(stream.shards[shard]["samples"]) for shard in stream.shard_order(0, 0)]
    assert len(served[1].asked) == sum(sum(sizes[: n + 1]) > start for n in range(3))


@pytest.mark.case("LDR-01")
@pytest.mark.parametrize("keep", [0.6, "member", "padding", 0.0])
def test_a_cut_shard_is_not_read_as_a_shorter_one(
    served: tuple[Artifact, Store], keep: float | str, tmp_path: Path
) -> None:
    path = tmp_path / "public" / "train-00001.tar"
    index = (served[0].row("train-00001.tar") or {})["index"]
    if keep == "member":
        size = index["offset"][5] - 512
    elif keep == "padding":
        size = path.stat().st_size - 512
    else:
        size = int(path.stat().st_size * float(keep))
    with path.open("r+b") as file:
        file.truncate(size)
    with pytest.raises(ArtifactError, match="train-00001"):
        list(ShardStream.open(served[1].url).samples(seed=0, epoch=0))


def test_flipped_bytes_and_missing_files_end_the_pass(served: tuple[Artifact, Store], tmp_path: Path) -> None:
    path = tmp_path / "public" / "train-00002.tar"
    data = bytearray(path.read_bytes())
    offset = (served[0].row("train-00002.tar") or {})["index"]["offset"][0]
    data[offset + 2000] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match="train-00002.*SHA-256"):
        list(ShardStream.open(served[1].url).samples(seed=0, epoch=0))
    path.unlink()
    with pytest.raises(ArtifactError, match="train-00002"):
        list(ShardStream.open(served[1].url).samples(seed=0, epoch=0))
    (tmp_path / "public" / "manifest.json").unlink()
    with pytest.raises(ArtifactError, match="manifest.json"):
        ShardStream.open(served[1].url)


def test_folders_and_pipes_are_urls_too(served: tuple[Artifact, Store], tmp_path: Path) -> None:
    public = tmp_path / "public"
    for url in (str(public), f"pipe:cat {public}/{{}}"):
        assert len(list(ShardStream.open(url).samples(seed=0, epoch=0))) == 21
