"""Building shards: same content whatever the batches, bad rows left out, nothing half-published."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.errors import StorageError
from pipeline.shards.builder import Builder
from pipeline.shards.codecs import decode_taps
from pipeline.shards.reader import ShardReader
from pipeline.shards.writer import ShardWriter
from tests.unit.shards.cache import ToyTarget, artifact_of, build, finish, rows_of, shard_names, spec_of


@pytest.mark.case("CAB-02")
def test_each_row_holds_its_own_states(tmp_path: Path) -> None:
    """Against the network run on the row alone, for every row of a padded, bucketed build."""
    spec, target = spec_of("bf16", "last_hidden", positions="all"), ToyTarget()
    reader = ShardReader.open(build(tmp_path, spec, batch_tokens=10_000))
    rows = {row.id: row for number, size in enumerate((8, 8, 5)) for row in rows_of(size, seed=number)}
    assert len(reader) == 21 and target.calls == 0
    for number in range(len(reader)):
        sample = reader[number]
        row = rows.pop(sample.id)
        alone = target.forward(torch.from_numpy(row.ids).long()[None])
        assert sample.ids_T.tolist() == row.ids.tolist() and sample.mask_T.tolist() == (row.mask == 1).tolist()
        assert (sample.source, sample.turn) == (row.source, row.turn)
        assert torch.equal(sample.taps_TLD, alone.taps_BTLD[0].to(torch.bfloat16).float())
        assert torch.allclose(sample.teacher.hidden_PD, alone.last_hidden_BTD[0], atol=1e-6)
    assert not rows


@pytest.mark.parametrize("taps", ["bf16", "int8", "int4"])
def test_batch_size_does_not_change_a_row(taps: str, tmp_path: Path) -> None:
    small = ShardReader.open(build(tmp_path, spec_of(taps), batch_tokens=1, tag="1"))
    large = ShardReader.open(build(tmp_path, spec_of(taps), batch_tokens=10_000, tag="16"))
    where = {name: number for number, name in enumerate(large.index.ids)}
    for number, name in enumerate(small.index.ids):
        one, other = small[number], large[where[name]]
        assert torch.allclose(one.taps_TLD, other.taps_TLD, atol=1e-4)
        assert torch.equal(one.teacher.ids_Pn, other.teacher.ids_Pn)
        assert torch.allclose(one.teacher.logprobs_Pn, other.teacher.logprobs_Pn, atol=1e-2)


def test_encoded_taps_decode_to_the_networks_states_for_every_codec(tmp_path: Path) -> None:
    target = ToyTarget()
    for taps, limit in (("bf16", 0.004), ("fp8", 0.04), ("int8", 0.02), ("int4", 0.12), ("int3", 0.2), ("int2", 0.4)):
        reader = ShardReader.open(build(tmp_path, spec_of(taps)))
        sample = reader[0]
        exact = target.forward(sample.ids_T[None]).taps_BTLD[0]
        assert (sample.taps_TLD - exact).norm() / exact.norm() < limit, taps
        assert torch.equal(sample.taps_TLD, decode_taps(reader.encoded(0).tensors, reader.spec))


@pytest.mark.case("CAB-04")
def test_rows_that_are_not_finite_are_left_out_counted_and_listed(tmp_path: Path) -> None:
    rows = rows_of(8, seed=0)
    bad = int(rows[5].ids[0])
    poisoned = {row.id for row in rows if bad in row.ids.tolist()}
    spec = spec_of("int8")
    artifact = artifact_of(tmp_path, spec)
    with Builder(ToyTarget(poison=frozenset({bad})), spec, batch_tokens=256) as builder:
        builder.build(artifact, "train-00000.tar", shard=0, rows=rows)
    finish(artifact, spec, 1)
    row = artifact.row("train-00000.tar")
    assert row is not None and row["skipped"] == {"not_finite": len(poisoned)} and row["left_out"] == sorted(poisoned)
    assert artifact.manifest()["skipped"] == {"not_finite": len(poisoned)}
    reader = ShardReader.open(artifact)
    assert set(reader.index.ids) == {row.id for row in rows} - poisoned
    assert all(torch.isfinite(reader[number].taps_TLD).all() for number in range(len(reader)))


def test_a_shard_without_rows_is_a_shard(tmp_path: Path) -> None:
    """All rows of a token shard may have been skipped before."""
    reader = ShardReader.open(build(tmp_path, sizes=(3, 0, 2)))
    assert len(reader) == 5 and sorted(reader.order(0, 0).tolist()) == list(range(5))
    assert [len(stored) for stored in (reader.batch([]), reader.batch([4]))] == [0, 1]


def test_two_builds_are_equal_byte_for_byte(tmp_path: Path) -> None:
    hashes = [[fact["sha256"] for fact in build(tmp_path / name).manifest()["shards"]] for name in ("one", "two")]
    assert hashes[0] == hashes[1]


@pytest.mark.case("CAB-06")
def test_a_forward_that_fails_publishes_nothing_and_what_was_finished_stays(tmp_path: Path) -> None:
    class Failing(ToyTarget):
        def forward(self, ids_BT: torch.Tensor) -> Any:
            if self.calls == 2:
                raise RuntimeError("device lost")
            return super().forward(ids_BT)

    spec = spec_of()
    artifact = artifact_of(tmp_path, spec)
    with pytest.raises(RuntimeError, match="device lost"), Builder(Failing(), spec, batch_tokens=4096) as builder:
        for number in range(3):
            builder.build(artifact, shard_names(3)[number], shard=number, rows=rows_of(8, seed=number)[:2])
    assert artifact.missing(shard_names(3)) != shard_names(3), "the first shard was finished before"
    assert artifact.missing(shard_names(3))
    for name in artifact.missing(shard_names(3)):
        assert not (artifact.path / name).exists()


def test_a_full_disk_ends_the_build_with_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer runs in a thread; its error must reach the caller, who must not wait for it forever."""

    def full(self: ShardWriter, **facts: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    spec = spec_of()
    artifact = artifact_of(tmp_path, spec)
    monkeypatch.setattr(ShardWriter, "add", full)
    with (
        pytest.raises(StorageError, match="Finished files are intact"),
        Builder(ToyTarget(), spec, batch_tokens=64) as builder,
    ):
        for number in range(3):
            builder.build(artifact, shard_names(3)[number], shard=number, rows=rows_of(8, seed=number))
    assert not list(artifact.path.glob("*.tar"))
