"""The chain from prompts to export: it walks, it reuses, and it survives being killed anywhere."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from pipeline.artifact import read_json, sha256_file
from tests.conftest import Proof
from tests.stages import whole_chain


@pytest.mark.case("CFG-05")
def test_every_stage_finishes_and_the_run_ends_in_a_table(finished: Path) -> None:
    output = (finished.parent / "output.txt").read_text(encoding="utf-8")
    assert {path.parent.parent.name for path in finished.glob("*/*/manifest.json")} == set(whole_chain.stages_of())
    for part in (
        "accepted length tau",
        "prompt lookup",
        "conditional acceptance",
        "ECE",
        "bytes per token",
        "report.md",
    ):
        assert part in output


def test_manifests_state_the_hashes_of_what_is_there(finished: Path) -> None:
    for path in finished.glob("*/*/manifest.json"):
        manifest = read_json(path)
        for fact in [*manifest["shards"], *manifest["files"]]:
            assert sha256_file(path.parent / fact["file"]) == fact["sha256"], fact["file"]


def test_webdataset_reads_the_target_shards(finished: Path) -> None:
    import webdataset

    (path,) = finished.glob("targets/*/manifest.json")
    shards = read_json(path)["shards"]
    seen = {}
    for shard in shards:
        dataset = webdataset.WebDataset(str(path.parent / shard["file"]), shardshuffle=False)
        seen[shard["file"]] = len({sample["__key__"] for sample in dataset})
    assert seen == {shard["file"]: shard["samples"] for shard in shards}
    assert sum(seen.values()) > 20


def test_experiments_link_to_their_artifacts_and_reuse_them(finished: Path) -> None:
    for stage in whole_chain.stages_of():
        assert (finished / "runs" / "debug" / stage / "manifest.json").exists()
    before = {path: path.stat().st_mtime_ns for path in finished.glob("*/*/manifest.json")}
    output = whole_chain.run(finished, "experiment=second", "draft.confidence=true")
    assert output.count("reused") == len(before)
    assert {path: path.stat().st_mtime_ns for path in finished.glob("*/*/manifest.json")} == before


@pytest.mark.prove
def test_killed_anywhere_the_same_command_ends_in_the_same_artifacts(
    finished: Path, tmp_path: Path, proof: Proof
) -> None:
    """kill -9 at random moments (5 in a proof, 1 otherwise) of one chain, each followed by the same command."""
    expected = whole_chain.results(finished)
    kills = proof.size(1, 5)
    rng = random.Random(time.time_ns())
    moments = []
    for _ in range(kills):
        process = whole_chain.start(tmp_path / "work")
        delay = rng.uniform(3.0, 35.0)
        try:
            process.wait(timeout=delay)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        alive = [path.parent.parent.name for path in (tmp_path / "work").glob("*/*/running.json")]
        moments.append(f"{delay:.1f} s in {', '.join(alive) or 'start-up'}")
    whole_chain.run(tmp_path / "work")
    proof.note("killed after", "; ".join(moments))
    assert whole_chain.results(tmp_path / "work") == expected
