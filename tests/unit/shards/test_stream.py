"""One pass over HTTP through webdataset: documented order, exact cursor, and accounts that notice what is missing."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch

from pipeline.artifact import Artifact
from pipeline.config import load
from pipeline.errors import ArtifactError, ConfigError
from pipeline.preflight import machine
from pipeline.shards.reader import ShardReader
from pipeline.shards.remote import NotArrived
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


@pytest.fixture
def bucket(served: tuple[Artifact, Store], tmp_path: Path) -> Iterator[str]:
    """The same folder as object storage that fsspec knows: in memory, as s3 and gs are behind their packages."""
    store = fsspec.filesystem("memory")
    store.put(str(tmp_path / "public"), "/bucket/targets/", recursive=True)
    yield "memory://bucket/targets/public" if store.exists("/bucket/targets/public") else "memory://bucket/targets"
    store.rm("/bucket", recursive=True)


def test_any_scheme_that_fsspec_opens_is_a_url_too(served: tuple[Artifact, Store], bucket: str) -> None:
    plain, stored = (ShardStream.open(url) for url in (served[1].url, bucket))
    names = [[sample.metadata["id"] for _, sample in each.samples(seed=0, epoch=0)] for each in (plain, stored)]
    assert names[0] == names[1] and len(names[0]) == 21
    shard = f"{bucket}/{stored.shards[0]['file']}"
    with fsspec.open(shard, "rb") as file:
        data = file.read()
    with fsspec.open(shard, "wb") as file:
        file.write(data[: len(data) // 2])
    with pytest.raises(ArtifactError, match=str(stored.shards[0]["file"])):
        list(stored.samples(seed=0, epoch=0))
    fsspec.filesystem("memory").rm(shard)
    with pytest.raises(NotArrived, match=str(stored.shards[0]["file"])):
        list(stored.samples(seed=0, epoch=0))


@pytest.mark.parametrize(
    ("scheme", "told"), [("s3", "Install s3fs"), ("gs", "install gcsfs"), ("nonsense", "Protocol not known: nonsense")]
)
def test_a_url_whose_package_is_not_installed_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, scheme: str, told: str
) -> None:
    """With the package's name, exit code 2, and at once: no attempt is made that would be repeated."""
    registry = importlib.import_module("fsspec.registry")  # `fsspec.registry` is something else
    absent = {name: {**registry.known_implementations[name], "class": "absent.X"} for name in ("s3", "gs")}
    monkeypatch.setattr(registry, "known_implementations", absent)
    monkeypatch.setattr(registry, "_registry", {})
    with pytest.raises(ConfigError, match=told):
        ShardStream.open(f"{scheme}://bucket/targets")
    streamed = ["targets.mode=streamed", "targets.max_bytes=9", f"targets.url={scheme}://bucket/targets"]
    (problem,) = machine.problems(load("configs/debug.yaml", streamed), ["targets"])
    assert problem.startswith(f"targets.url: {scheme}://") and told in problem and "pipe:COMMAND {}" in problem


def test_http_needs_curl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert "curl, which is not installed" in str(machine.transport_problem("https://store/x"))
    assert machine.transport_problem("/a/folder") is machine.transport_problem("pipe:cat {}") is None
