"""Reading: webdataset agrees, damage is refused before the first sample, order and access are exact."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset
from safetensors.torch import load as load_safetensors

from pipeline.artifact import Artifact, digest, sha256_file
from pipeline.errors import ArtifactError
from pipeline.shards.check import check_shard, members
from pipeline.shards.index import Index
from pipeline.shards.reader import ShardReader
from tests.conftest import Proof
from tests.unit.shards.cache import Row, artifact_of, build, finish, rows_of, spec_of

SHARD = "train-00001.tar"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return build(tmp_path_factory.mktemp("cache"), spec_of("int8"))


@pytest.fixture
def copy(finished: Artifact, tmp_path: Path) -> Artifact:
    artifact = Artifact(tmp_path, "targets", finished.request)
    shutil.copytree(finished.path, artifact.path)
    return artifact


@pytest.mark.parametrize("taps", ["bf16", "fp8", "int8", "int4", "int3", "int2"])
@pytest.mark.parametrize("logits", ["topk", "last_hidden", "full"])
def test_webdataset_and_safetensors_read_the_same_samples(taps: str, logits: str, tmp_path: Path) -> None:
    reader = ShardReader.open(build(tmp_path, spec_of(taps, logits)))
    urls = [str(reader.folder / name) for name in reader.index.files]
    samples = list(webdataset.WebDataset(urls, shardshuffle=False))
    assert len(samples) == len(reader) == 21
    by_key = {sample["__key__"]: sample for sample in samples}
    for number in range(21):
        shard = int(np.searchsorted(reader.index.first, number, side="right")) - 1
        sample = by_key[f"{shard:05d}-{int(reader.index.row[number]):06d}"]
        theirs, ours = load_safetensors(sample["safetensors"]), reader.encoded(number).tensors
        assert theirs.keys() == ours.keys()
        for name, tensor in ours.items():
            assert tensor.dtype == theirs[name].dtype
            assert torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8)), name


@pytest.mark.case("CAB-11")
def test_the_index_is_the_tars_own_listing(finished: Artifact) -> None:
    for fact in finished.manifest()["shards"]:
        index = (finished.row(fact["file"]) or {})["index"]
        listed = list(members(finished.path / fact["file"]))
        assert [(offset, size) for _, offset, size in listed] == list(zip(index["offset"], index["bytes"], strict=True))
        assert len(listed) == fact["samples"]
        assert sum(index["supervised"]) and all(index["tokens"])


@pytest.mark.case("LDR-02")
def test_keys_are_ours_and_the_source_id_is_a_field(tmp_path: Path) -> None:
    names = ["v1.2/row.7", "v1.2/row.8", "ü" * 200, "a\nb", '"quoted"']
    plain = rows_of(len(names))
    rows = [Row(name, "s.o/u", 0, row.ids, row.mask) for name, row in zip(names, plain, strict=True)]
    from pipeline.shards.builder import Builder
    from tests.unit.shards.cache import ToyTarget

    spec = spec_of()
    artifact = artifact_of(tmp_path, spec)
    with Builder(ToyTarget(), spec, batch_tokens=256) as builder:
        builder.build(artifact, "train-00000.tar", shard=0, rows=rows)
    finish(artifact, spec, 1)
    reader = ShardReader.open(artifact)
    assert {reader[number].id for number in range(len(reader))} == set(names)
    keys = [
        sample["__key__"]
        for sample in webdataset.WebDataset(str(artifact.path / "train-00000.tar"), shardshuffle=False)
    ]
    assert len(set(keys)) == len(names) and not any("." in key or "/" in key for key in keys)


def test_batches_decode_to_the_same_samples(finished: Artifact) -> None:
    reader = ShardReader.open(finished)
    numbers = [20, 3, 3, 11]
    for number, sample in zip(numbers, reader.batch(numbers, dtype=torch.bfloat16), strict=True):
        alone = reader[number]
        assert sample.id == alone.id and torch.equal(sample.ids_T, alone.ids_T)
        assert sample.taps_TLD.dtype == torch.bfloat16
        assert torch.equal(sample.taps_TLD, alone.taps_TLD.bfloat16())
        assert torch.equal(sample.teacher.positions_P, alone.teacher.positions_P)
        assert torch.equal(sample.teacher.logprobs_Pn, alone.teacher.logprobs_Pn)
        assert sample.teacher.positions_P.tolist() == [p for p in range(len(sample.ids_T) - 1) if sample.mask_T[p + 1]]
    assert reader.batch([]) == []
    with pytest.raises(IndexError):
        reader.encoded(21)


# ------------------------------------------------------------------------------------------------ order


@pytest.mark.case("LDR-07")
def test_order_is_a_permutation_and_a_pure_function_of_seed_and_epoch(finished: Artifact) -> None:
    reader = ShardReader.open(finished)
    orders = {(seed, epoch): reader.order(seed, epoch).tolist() for seed in (0, 1) for epoch in (0, 1, 2)}
    assert all(sorted(order) == list(range(21)) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == 6
    assert reader.order(1, 2).tolist() == ShardReader.open(finished).order(1, 2).tolist()


def test_order_stays_within_a_window_of_shards() -> None:
    """16 shards at a time are open: a parallel file system is not asked for a random file per sample."""
    index = Index.of([(f"train-{n:05d}.tar", columns(50)) for n in range(96)])
    shard_of = np.searchsorted(index.first, index.order(0, 0), side="right") - 1
    for start in range(0, len(index), 16 * 50):
        assert len(set(shard_of[start : start + 16 * 50])) == 16


def columns(count: int) -> dict[str, list[int]]:
    return {name: [0] * count for name in ("row", "offset", "bytes", "head", "crc", "tokens", "supervised", "id")}


# ------------------------------------------------------------------------------------------------ damage


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(int(path.stat().st_size * 0.6))


def cut_at_a_member(path: Path) -> None:
    _, offset, _ = list(members(path))[5]
    with path.open("r+b") as file:
        file.truncate(offset - 512)


def rewrite(path: Path, change: Callable[[list[tuple[str, bytes]]], list[tuple[str, bytes]]]) -> None:
    """Write the tar again with other members, as a tool that knows tar but not the index would."""
    with tarfile.open(path) as tar:
        items = [(info.name, tar.extractfile(info).read()) for info in tar]  # type: ignore[union-attr]
    with tarfile.open(path, "w") as tar:
        for name, data in change(items):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o444
            tar.addfile(info, io.BytesIO(data))


def same_header_length(items: list[tuple[str, bytes]]) -> tuple[int, int]:
    """Two members whose framed sizes agree, so that swapping them changes no length."""
    sizes = [-(-len(data) // 512) for _, data in items]
    return next((a, b) for a in range(8) for b in range(a + 1, 8) if sizes[a] == sizes[b])


def swapped(items: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    a, b = same_header_length(items)
    items[a], items[b] = items[b], items[a]
    return items


def swapped_contents(items: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """Keys in place, contents exchanged: even the tar's listing looks right where lengths agree."""
    a, b = same_header_length(items)
    items[a], items[b] = (items[a][0], items[b][1]), (items[b][0], items[a][1])
    return items


def shortened(items: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """Two bytes less, tar header in order: tar's padding hides it from every offset."""
    number = next(n for n, (_, data) in enumerate(items) if (len(data) - 2) % 512 < 510)
    items[number] = (items[number][0], items[number][1][:-2])
    return items


def shifted(items: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    return [items[-1], *items[:-1]]


DAMAGE: dict[str, Callable[[Path], None]] = {
    "cut": cut,
    "cut at a member": cut_at_a_member,
    "missing member": lambda path: rewrite(path, lambda items: items[:3] + items[4:]),
    "extra member": lambda path: rewrite(path, lambda items: [*items, ("00001-000099.safetensors", items[0][1])]),
    "swapped members": lambda path: rewrite(path, swapped),
    "swapped contents": lambda path: rewrite(path, swapped_contents),
    "shortened member": lambda path: rewrite(path, shortened),
    "shifted members": lambda path: rewrite(path, shifted),
    "missing file": Path.unlink,
}


@pytest.mark.case("LDR-01")
@pytest.mark.case("LDR-11")
@pytest.mark.parametrize("honest_manifest", [False, True], ids=["manifest of the good file", "manifest rewritten"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_refused_at_open_with_the_shard_named(kind: str, honest_manifest: bool, copy: Artifact) -> None:
    """Also when somebody wrote the new length and hashes into manifest and row: the index still knows its members."""
    path = copy.path / SHARD
    DAMAGE[kind](path)
    if honest_manifest and path.exists():
        facts = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        row_path = copy.path / "rows" / f"{SHARD}.json"
        row = {**json.loads(row_path.read_text()), **facts}
        row_path.write_text(json.dumps(row))
        manifest = json.loads(copy.manifest_path.read_text())
        next(fact for fact in manifest["shards"] if fact["file"] == SHARD).update(facts, row=digest(row))
        copy.manifest_path.write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match=SHARD) as refused:
        ShardReader.open(copy)
    assert "train-00000" not in str(refused.value)


@pytest.mark.case("LDR-01")
@pytest.mark.parametrize("change", [-1, 1, "into the last member"])
def test_a_length_that_its_members_do_not_account_for_is_told_where_every_header_is_right(
    change: int | str, copy: Artifact
) -> None:
    """What the headers cannot show: a tar cut in its last member's data or its padding, or with something behind it."""
    path, index = copy.path / SHARD, (copy.row(SHARD) or {})["index"]
    assert check_shard(path, index) == []
    size = path.stat().st_size
    last = index["offset"][-1] + index["bytes"][-1]
    there = last - 1 if isinstance(change, str) else size + change
    with path.open("r+b") as file:
        file.truncate(there)
    (problem,) = check_shard(path, index)
    assert problem.startswith(f"{path}: {there} bytes, its index accounts for {size}: ")


def test_every_flipped_byte_is_found_by_the_hashes(copy: Artifact, proof: Proof) -> None:
    """What headers cannot show: one byte anywhere in a tar. `verify` names the shard every time."""
    random = np.random.default_rng(0)
    names = [fact["file"] for fact in copy.manifest()["shards"]]
    flips = proof.size(50, 1000)
    for _ in range(flips):
        name = names[random.integers(len(names))]
        path = copy.path / name
        at, bit = int(random.integers(path.stat().st_size)), 1 << int(random.integers(8))
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ bit]))
        assert copy.verify() == [name]
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([byte]))
    assert copy.verify() == []
    proof.note("random single-byte flips named by verify", f"{flips} of {flips}")


def test_a_cursor_far_into_an_epoch_costs_only_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample 1,000,000 of a 1.4 M index: no file is opened to get there."""
    zeros = np.zeros(1_400_000, dtype=np.int64)
    files = tuple(f"train-{n:05d}.tar" for n in range(1400))
    index = Index(files, np.arange(0, 1_401_000, 1000), *[zeros] * 5, ids=("",) * 1_400_000)
    reader = ShardReader(Path("/nowhere"), index, spec_of(), summary={})
    order = reader.order(0, 2)
    assert (np.sort(order) == np.arange(1_400_000)).all()
    opened: list[int] = []
    monkeypatch.setattr(reader, "_map", lambda shard: opened.append(shard) or bytearray(1))
    with pytest.raises(ArtifactError):
        reader.encoded(int(order[1_000_000]))
    assert len(opened) == 1


def test_an_undamaged_copy_opens(copy: Artifact) -> None:
    assert len(ShardReader.open(copy)) == 21


def test_an_index_row_of_another_build_is_refused(copy: Artifact) -> None:
    row_path = copy.path / "rows" / f"{SHARD}.json"
    row_path.write_text(json.dumps({**json.loads(row_path.read_text()), "sha256": "0" * 64}))
    with pytest.raises(ArtifactError, match="another build"):
        ShardReader.open(copy)
    row_path.unlink()
    with pytest.raises(ArtifactError, match=SHARD):
        ShardReader.open(copy)


@pytest.mark.parametrize("change", [{"tokens": 1}, {"id": "x"}, None], ids=["tokens", "ids", "lost"])
def test_an_altered_or_lost_index_row_is_refused_and_named_by_verify(
    change: dict[str, Any] | None, copy: Artifact
) -> None:
    """What `open` tells to repair, `repair` must find."""
    row_path = copy.path / "rows" / f"{SHARD}.json"
    if change is None:
        row_path.unlink()
    else:
        row = json.loads(row_path.read_text())
        for column, value in change.items():
            row["index"][column][0] = value
        row_path.write_text(json.dumps(row))
    with pytest.raises(ArtifactError, match=f"{SHARD}: its index row"):
        ShardReader.open(copy)
    assert copy.verify() == [SHARD]


@pytest.mark.case("CAB-03")
@pytest.mark.case("CAB-09")
@pytest.mark.parametrize("change", [{"post_norm": False}, {"layer_convention": "hidden_states[l]"}])
def test_another_convention_is_refused(change: dict[str, object], finished: Artifact, copy: Artifact) -> None:
    finish(copy, spec_of("int8"), 3, **change)
    with pytest.raises(ArtifactError, match="manifest"):
        ShardReader.open(copy)


@pytest.mark.case("LDR-11")
def test_a_header_that_lies_about_lengths_is_refused_on_access(finished: Artifact) -> None:
    reader = ShardReader.open(finished)
    from pipeline.shards.record import unpack

    index = reader.index
    data = bytearray((finished.path / SHARD).read_bytes())
    start = int(index.offset[8])
    member = data[start : start + int(index.bytes[8])]
    assert unpack(member, reader.spec, where="x").tensors
    with pytest.raises(ArtifactError, match="x: mask ends at byte"):
        unpack(member[:-2], reader.spec, where="x")
    with pytest.raises(ArtifactError, match="accounts for"):
        unpack(member + b"\0\0", reader.spec, where="x")
    with pytest.raises(ArtifactError, match="taps"):
        unpack(member, spec_of("bf16"), where="x")
    with pytest.raises(ArtifactError, match="not a safetensors file"):
        unpack(bytearray(100), reader.spec, where="x")
