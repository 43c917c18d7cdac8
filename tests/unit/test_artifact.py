"""Artifacts: content addresses, atomic publication, the manifest as the only proof of completion."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from pathlib import Path

import pytest

from pipeline.artifact import Artifact, atomic_path, digest, read_json
from pipeline.errors import ArtifactError, StorageError


def make(tmp_path: Path, **config: object) -> Artifact:
    return Artifact(tmp_path, "tokens", {"stage": "tokens", "format": 1, "config": config, "inputs": {}})


def publish(artifact: Artifact, name: str, text: str, **row: object) -> None:
    with artifact.shard(name) as shard:
        shard.path.write_text(text)
        shard.row.update(row)


def test_equal_requests_share_a_folder_and_a_changed_one_gets_its_own(tmp_path: Path) -> None:
    assert make(tmp_path, a=1, b=2).path == make(tmp_path, b=2, a=1).path
    assert make(tmp_path, a=1).path != make(tmp_path, a=2).path


def test_manifest_sums_rows_and_is_what_complete_means(tmp_path: Path) -> None:
    artifact = make(tmp_path)
    artifact.create()
    publish(artifact, "a.txt", "one", samples=1, skipped={"empty": 2})
    publish(artifact, "b.txt", "three", samples=3, skipped={"empty": 1, "null": 1})
    assert not artifact.complete
    artifact.finish(["a.txt", "b.txt"], skipped={"null": 1}, note="x")
    manifest = artifact.manifest()
    assert artifact.complete
    assert [row["samples"] for row in manifest["shards"]] == [1, 3]
    assert manifest["skipped"] == {"empty": 3, "null": 2}
    assert manifest["note"] == "x"
    assert artifact.verify() == []


def test_finish_refuses_an_unpublished_shard(tmp_path: Path) -> None:
    artifact = make(tmp_path)
    artifact.create()
    with pytest.raises(ArtifactError, match=r"b\.txt: not published"):
        artifact.finish(["b.txt"])
    assert not artifact.complete


@pytest.mark.case("CAB-06")
def test_a_shard_counts_only_when_file_and_row_are_whole(tmp_path: Path) -> None:
    artifact = make(tmp_path)
    artifact.create()
    publish(artifact, "a.txt", "whole", samples=1)
    (artifact.path / "b.txt").write_text("file without a row")
    publish(artifact, "c.txt", "cut later", samples=1)
    (artifact.path / "c.txt").write_text("cut")
    publish(artifact, "d.txt", "row cut later", samples=1)
    (artifact.path / "rows" / "d.txt.json").write_text('{"file": "d.t')
    assert artifact.missing(["a.txt", "b.txt", "c.txt", "d.txt", "e.txt"]) == ["b.txt", "c.txt", "d.txt", "e.txt"]


def test_a_failing_write_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    target = tmp_path / "x.json"
    target.write_text("old")
    with pytest.raises(ValueError, match="boom"), atomic_path(target) as temporary:
        temporary.write_text("half")
        raise ValueError("boom")
    assert target.read_text() == "old"
    assert list((tmp_path / ".tmp").iterdir()) == []


def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="Finished files are intact"), atomic_path(tmp_path / "x"):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_folder_somebody_reads_is_not_replaced_by_its_equal(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with atomic_path(target, keep_existing=True) as mine:
        mine.mkdir()
        (mine / "a").write_text("same")
        child = os.fork()
        if child == 0:
            with atomic_path(target, keep_existing=True) as theirs:
                theirs.mkdir()
                (theirs / "a").write_text("same")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        before = (target / "a").stat().st_ino
    assert (target / "a").stat().st_ino == before


def test_publishing_twice_is_harmless(tmp_path: Path) -> None:
    artifact = make(tmp_path)
    artifact.create()
    publish(artifact, "a.txt", "same", samples=1)
    first = artifact.row("a.txt")
    publish(artifact, "a.txt", "same", samples=1)
    assert artifact.row("a.txt") == first


def test_changed_content_is_found_by_verify_and_changed_length_by_check_sizes(tmp_path: Path) -> None:
    artifact = make(tmp_path)
    artifact.create()
    publish(artifact, "a.txt", "abcd", samples=1)
    artifact.finish(["a.txt"])
    artifact.check_sizes()
    (artifact.path / "a.txt").write_text("abXd")
    artifact.check_sizes()
    assert artifact.verify() == ["a.txt"]
    (artifact.path / "a.txt").write_text("abc")
    with pytest.raises(ArtifactError, match="3 bytes, the manifest says 4"):
        artifact.check_sizes()


@pytest.mark.case("CAB-05")
def test_a_folder_whose_request_does_not_hash_to_its_name_is_refused(tmp_path: Path) -> None:
    artifact = make(tmp_path, max_length=10)
    artifact.create()
    request = read_json(artifact.path / "request.json")
    request["config"]["max_length"] = 20
    (artifact.path / "request.json").write_text(json.dumps(request))
    with pytest.raises(ArtifactError, match="not to its folder's name"):
        artifact.create()


def test_a_manifest_of_another_artifact_is_refused(tmp_path: Path) -> None:
    one, two = make(tmp_path, a=1), make(tmp_path, a=2)
    one.create()
    two.create()
    one.finish()
    two.manifest_path.write_text(one.manifest_path.read_text())
    with pytest.raises(ArtifactError, match="belongs to"):
        two.manifest()


@pytest.mark.case("CAB-06")
def test_kill_at_any_moment_never_leaves_a_wrong_shard(tmp_path: Path) -> None:
    """A child publishes shards in a loop and is killed; what counts as published always has its content."""
    names = [f"{index}.txt" for index in range(400)]
    artifact = make(tmp_path)
    artifact.create()
    for delay in (0.02, 0.05, 0.1):
        child = os.fork()
        if child == 0:
            for name in artifact.missing(names):
                publish(artifact, name, name * 2000, samples=1)
            os._exit(0)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for name in names:
            if artifact.row(name) is not None:
                assert (artifact.path / name).read_text() == name * 2000
    for name in artifact.missing(names):
        publish(artifact, name, name * 2000, samples=1)
    artifact.finish(names)
    assert artifact.verify() == []
    assert not (artifact.path / ".tmp").exists()


def test_digest_is_stable() -> None:
    assert digest({"b": [1, 2.5, None], "a": "é"}) == digest({"a": "é", "b": [1, 2.5, None]})
    assert digest({"a": 1}) != digest({"a": 1.5})
