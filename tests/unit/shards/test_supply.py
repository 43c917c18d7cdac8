"""Shards copied from a finished cache elsewhere: the same bytes, or an error that names what did not arrive."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.artifact import Artifact
from pipeline.errors import ArtifactError, ConfigError, DataError
from pipeline.shards import remote as remote_files
from pipeline.shards.builder import Builder
from pipeline.shards.reader import ShardReader
from pipeline.shards.remote import NotArrived, Remote
from pipeline.shards.rolling import VALIDATION
from pipeline.shards.stream import ShardStream
from pipeline.shards.streamed import declare
from pipeline.shards.supply import Copied
from pipeline.shards.tokenrows import TokenRows
from tests.store import Store, serving
from tests.unit.shards.cache import Row, ToyTarget, artifact_of, build, finish, rows_of, spec_of
from tests.unit.shards.test_live import SIZES, read, tokens_of

SPEC = spec_of("int8")
FILES = {f"train-{number:05d}.parquet": size for number, size in enumerate(SIZES)}
TOKENS = sum(len(row.ids) for number, size in enumerate(SIZES) for row in rows_of(size, seed=number))


@pytest.fixture(autouse=True)
def no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_files, "_DELAYS", (0.0,) * 3)


@pytest.fixture
def cache(tmp_path: Path) -> Artifact:
    return built(tmp_path / "elsewhere")


def built(folder: Path, target: ToyTarget | None = None, spec: Any = SPEC) -> Artifact:
    artifact = build(folder, spec, target=target)
    rows = [artifact.row(fact["file"]) or {} for fact in artifact.manifest()["shards"]]
    finish(artifact, spec, len(SIZES), tokens=sum(sum(row["index"]["tokens"]) for row in rows))
    return artifact


@pytest.fixture
def store(cache: Artifact, tmp_path: Path) -> Iterator[Store]:
    shutil.copytree(cache.path, tmp_path / "public")
    with serving(tmp_path / "public") as found:
        yield found


def copied(tmp_path: Path, store: Store, *, read: Any = read) -> tuple[Copied, Artifact, TokenRows]:
    rows = TokenRows(tokens_of(tmp_path), read, window=4)
    artifact = artifact_of(tmp_path, SPEC, tag="streamed")
    return Copied(rows, artifact, ShardStream.open(store.url)), artifact, rows


@pytest.mark.parametrize("indexed", [True, False], ids=["with index rows", "without"])
def test_copies_are_the_shards_to_the_byte(indexed: bool, cache: Artifact, store: Store, tmp_path: Path) -> None:
    if not indexed:
        shutil.rmtree(store.folder / "rows")
    supply, artifact, _ = copied(tmp_path, store)
    for number in range(3):
        supply.shard(number)
        ours, theirs = artifact.row(f"rolling/train-0000{number}.tar"), cache.row(f"train-0000{number}.tar")
        assert ours is not None and theirs is not None
        assert (ours["sha256"], ours["index"]) == (theirs["sha256"], theirs["index"])


def test_held_out_rows_come_from_all_shards(cache: Artifact, store: Store, tmp_path: Path) -> None:
    supply, artifact, _ = copied(tmp_path, store)
    full, numbers = ShardReader.open(cache), [1, 6, 20]
    supply.held(numbers)
    assert [name for name in store.asked if name.endswith(".tar")] == ["train-00000.tar", "train-00002.tar"]
    index = (artifact.row(VALIDATION) or {})["index"]
    ids = {place: name for place, name in zip(index["row"], index["id"], strict=True)}
    assert [ids[place] for place in range(3)] == [full.index.ids[number] for number in numbers]


def test_a_store_that_stumbles_is_asked_again(cache: Artifact, store: Store, tmp_path: Path) -> None:
    """503 twice, then a connection cut half-way, twice."""
    supply, artifact, _ = copied(tmp_path, store)
    store.refuse["train-00000.tar"] = 2
    store.cut["train-00001.tar"] = 2
    for number in (0, 1):
        supply.shard(number)
        name = f"train-0000{number}.tar"
        assert (artifact.row(f"rolling/{name}") or {})["sha256"] == (cache.row(name) or {})["sha256"]
        assert store.asked.count(name) == 3
    store.cut["train-00002.tar"] = 9
    with pytest.raises(NotArrived, match="train-00002"):
        supply.shard(2)
    assert artifact.row("rolling/train-00002.tar") is None and store.asked.count("train-00002.tar") == 4


def test_held_out_rows_are_not_doubled_by_a_second_attempt(store: Store, tmp_path: Path) -> None:
    supply, artifact, _ = copied(tmp_path, store)
    store.cut["train-00000.tar"] = 1
    supply.held([0, 1, 2, 3, 4, 5, 6, 7])
    assert sorted((artifact.row(VALIDATION) or {})["index"]["row"]) == list(range(8))


def _cut(path: Path, artifact: Artifact) -> None:
    """At a member's border: tar itself would read it as a shorter one."""
    offset = (artifact.row(path.name) or {})["index"]["offset"][5]
    path.write_bytes(path.read_bytes()[: offset - 512])


def _flipped(path: Path, artifact: Artifact) -> None:
    data = bytearray(path.read_bytes())
    data[(artifact.row(path.name) or {})["index"]["offset"][0] + 2000] ^= 1
    path.write_bytes(data)


def _gone(path: Path, artifact: Artifact) -> None:
    path.unlink()


def _swapped(path: Path, artifact: Artifact) -> None:
    shutil.copy(path.with_name("train-00000.tar"), path)


@pytest.mark.case("LDR-01")
@pytest.mark.parametrize("damage", [_cut, _flipped, _gone, _swapped])
def test_a_damaged_shard_is_named_and_not_published(damage: Any, cache: Artifact, store: Store, tmp_path: Path) -> None:
    supply, artifact, _ = copied(tmp_path, store)
    damage(store.folder / "train-00001.tar", cache)
    with pytest.raises((ArtifactError, DataError), match="train-00001"):
        supply.shard(1)
    assert artifact.row("rolling/train-00001.tar") is None
    assert not list((artifact.path / "rolling").rglob("*.tar"))


def test_rows_made_of_other_tokens_are_refused(store: Store, tmp_path: Path) -> None:
    """Equal fingerprints do not make sampled answers equal."""

    def answered_again(path: Path) -> list[Row]:
        rows = list(read(path))
        ids = rows[3].ids.copy()
        ids[-1] += 1
        return [*rows[:3], replace(rows[3], ids=ids), *rows[4:]]

    supply, artifact, _ = copied(tmp_path, store, read=answered_again)
    with pytest.raises(DataError, match="train-00001.tar: row 3 was made of other tokens"):
        supply.shard(1)
    assert artifact.row("rolling/train-00001.tar") is None


# ------------------------------------------------------------------------------------------------ declaring


def declared(folder: Path, store: Store, expected: Artifact, spec: Any = SPEC, **changes: Any) -> dict[str, Any]:
    artifact = artifact_of(folder, spec, tag="streamed")
    told = {**spec.summary(), "layers": [0, 1, 2]}
    facts = {"rows": FILES, "tokens": TOKENS, "summary": told, "template": None, **changes}
    return declare(artifact, Remote(store.url), expected, **facts)


def test_the_declaration_pins_the_shards(cache: Artifact, store: Store, tmp_path: Path) -> None:
    made = declared(tmp_path, store, cache)
    assert (made["mode"], made["shards"], made["left_out"]) == ("streamed", [], {})
    assert made["remote"] == cache.manifest()["shards"] and made["targets"] == cache.manifest()["targets"]


def test_what_is_not_the_wanted_cache_is_refused_with_both_values(
    cache: Artifact, store: Store, tmp_path: Path
) -> None:
    def problems(**changes: Any) -> str:
        with pytest.raises(ConfigError) as refused:
            declared(tmp_path, store, **{"expected": cache, **changes})
        assert not (artifact_of(tmp_path, SPEC, tag="streamed")).complete
        return str(refused.value)

    other = Artifact(tmp_path, "targets", {**cache.request, "format": 2, "inputs": {"tokens": "abc"}})
    told = {**SPEC.summary(), "layers": [0, 1, 2]}
    found = problems(expected=other, summary=told)
    assert cache.fingerprint in found and other.fingerprint in found
    assert "format (1 there, 2 here)" in found and 'inputs.tokens (null there, "abc" here)' in found
    assert 'taps ("int8" there, "fp8" here)' in problems(summary={**told, "taps": "fp8"})
    assert "layers ([0, 1, 2] there, [0, 1, 3] here)" in problems(summary={**told, "layers": [0, 1, 3]})
    assert "3 shards there, 2 token shards here" in problems(rows=dict(list(FILES.items())[:2]))
    assert "5 samples there, 4 rows here" in problems(rows={**FILES, "train-00002.parquet": 4})
    assert f"{TOKENS} tokens there, {TOKENS + 1} here" in problems(tokens=TOKENS + 1)


@pytest.mark.case("CAB-04")
@pytest.mark.parametrize("indexed", [True, False], ids=["with index rows", "without"])
def test_rows_the_cache_leaves_out_get_no_number(indexed: bool, tmp_path: Path) -> None:
    bad = rows_of(SIZES[1], seed=1)[3]
    others = [row for n, size in enumerate(SIZES) for row in rows_of(size, seed=n) if row.id != bad.id]
    poison = next(int(token) for token in bad.ids if not any(token in row.ids for row in others))
    cache = built(tmp_path / "elsewhere", ToyTarget(poison=frozenset({poison})))
    shutil.copytree(cache.path, tmp_path / "public")
    if not indexed:
        shutil.rmtree(tmp_path / "public" / "rows")
    with serving(tmp_path / "public") as store:
        made = declared(tmp_path, store, cache)
        assert made["left_out"] == {"train-00001.parquet": [3]}
        rows = TokenRows(tokens_of(tmp_path), read, left_out=made["left_out"])
        full = ShardReader.open(cache)
        assert rows.index.ids == full.index.ids and len(rows) == 20
        assert [rows.row(n).id for n in range(20)] == list(full.index.ids)


def test_channel_rms_comes_along_and_is_hashed(tmp_path: Path) -> None:
    spec = spec_of("int4", channel_rms=True)
    artifact = artifact_of(tmp_path / "elsewhere", spec)
    rms = torch.rand(3, 32) + 0.5
    save_file({"channel_rms": rms}, artifact.path / "channel_rms.safetensors")
    with Builder(ToyTarget(), spec, batch_tokens=256, channel_rms_LD=rms) as builder:
        for number, size in enumerate(SIZES):
            builder.build(artifact, f"train-{number:05d}.tar", shard=number, rows=rows_of(size, seed=number))
    names = [f"train-{number:05d}.tar" for number in range(3)]
    summary = {**build(tmp_path / "other").manifest()["targets"], **spec.summary(), "tokens": TOKENS}
    artifact.finish(names, ["channel_rms.safetensors"], targets=summary)
    with serving(artifact.path) as store:
        made = declared(tmp_path, store, artifact, spec)
        folder = artifact_of(tmp_path, spec, tag="streamed").path
        assert torch.equal(load_file(folder / "channel_rms.safetensors")["channel_rms"], rms)
        assert made["files"] == artifact.manifest()["files"]
        damaged = bytearray((artifact.path / "channel_rms.safetensors").read_bytes())
        damaged[-1] ^= 1
        (artifact.path / "channel_rms.safetensors").write_bytes(damaged)
        with pytest.raises(ArtifactError, match="channel_rms"):
            declared(tmp_path / "again", store, artifact, spec)
