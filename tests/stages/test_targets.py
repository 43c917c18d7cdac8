"""The targets stage: right content, resumable, on any number of ranks, never more than the disk holds."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeline import chain as chain_table
from pipeline import stopping
from pipeline.artifact import Artifact
from pipeline.config import load
from pipeline.corpus.tokens import read_tokens
from pipeline.errors import DataError, Stopped, StorageError
from pipeline.shards import builder, plan
from pipeline.shards.layout import Spec
from pipeline.shards.reader import ShardReader
from pipeline.stages import targets
from pipeline.target import Target
from tests.conftest import Proof
from tests.ranks import RankFailure, run_ranks
from tests.stages.token_rows import context_of, prepare

NAMES = ["train-00000.tar", "train-00001.tar", "train-00002.tar"]
# Imported by the launcher once, instead of by every rank.
NEEDS = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.generation",
)
Usage = namedtuple("Usage", "total used free")


def run(work_dir: Path, *overrides: str, sizes: tuple[int, ...] = (8, 8, 8)) -> Artifact:
    context = context_of(prepare(work_dir, *overrides, sizes=sizes))
    targets.run(context)
    return context.artifact


def hashes(artifact: Artifact) -> dict[str, str]:
    return {fact["file"]: fact["sha256"] for fact in artifact.manifest()["shards"]}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """One uninterrupted build."""
    return run(tmp_path_factory.mktemp("built") / "work")


# ------------------------------------------------------------------------------------------------ content


@pytest.mark.case("CAB-02")
@pytest.mark.case("CAB-03")
@pytest.mark.case("CAB-09")
@pytest.mark.parametrize("batch_tokens", [1, 4096])
def test_every_row_equals_the_target_run_on_it_alone(batch_tokens: int, work_dir: Path) -> None:
    overrides = ["targets.taps=bf16", "targets.logits=last_hidden", "targets.positions=all"]
    artifact = run(work_dir, *overrides, f"targets.batch_tokens={batch_tokens}")
    config = prepare(work_dir, *overrides)
    target = Target.load(str(context_of(config).target_path), layers=(0, 2))
    reader = ShardReader.open(artifact)
    assert reader.summary["layers"] == [0, 2] and reader.summary["post_norm"] is True
    for number in range(len(reader)):
        sample = reader[number]
        out = target.forward(sample.ids_T[None])
        assert sample.teacher.hidden_PD is not None
        error = (sample.teacher.hidden_PD - out.last_hidden_BTD[0]).norm(dim=-1) / out.last_hidden_BTD[0].norm(dim=-1)
        assert error.max() < 5e-6
        assert torch.allclose(sample.taps_TLD, out.taps_BTLD[0], rtol=2.0**-8, atol=1e-6)
        with torch.no_grad():
            own = target.model(sample.ids_T[None]).logits[0]
        assert torch.allclose(target.frozen.logits(sample.teacher.hidden_PD), own, atol=1e-4)


@pytest.mark.case("CAB-01")
@pytest.mark.parametrize("taps", ["bf16", "fp8", "int8", "int4", "int3", "int2"])
@pytest.mark.parametrize("logits", ["topk", "last_hidden"])
def test_the_plan_is_within_three_percent_of_the_disk(taps: str, logits: str, work_dir: Path) -> None:
    artifact = run(work_dir, f"targets.taps={taps}", f"targets.logits={logits}")
    config = prepare(work_dir, f"targets.taps={taps}", f"targets.logits={logits}")
    rows = [chain_table.resolve(config)["tokens"].row(name.replace(".tar", ".parquet")) or {} for name in NAMES]
    counts = [sum(row[key] for row in rows) for key in ("samples", "tokens", "supervised")]
    estimated = plan.estimate(Spec.of(artifact.manifest()["targets"]), *counts, shards=3)
    actual = sum(fact["bytes"] for fact in artifact.manifest()["shards"])
    # A tar ends on a whole 10,240-byte record: at 24 rows that alone is some percent, so it is left out on both sides.
    slack = 3 * 10_240 / 2
    assert abs(estimated - actual) <= 0.03 * actual + slack


def test_channel_rms_is_stored_once_and_used_for_decoding(work_dir: Path) -> None:
    artifact = run(work_dir, "targets.taps=int4", "targets.channel_rms=true")
    assert [fact["file"] for fact in artifact.manifest()["files"]] == ["channel_rms.safetensors"]
    reader = ShardReader.open(artifact)
    exact = {s.id: s for s in _samples(run(work_dir, "targets.taps=bf16"))}
    for number in range(0, len(reader), 5):
        sample = reader[number]
        reference = exact[sample.id].taps_TLD
        assert (sample.taps_TLD - reference).norm() / reference.norm() < 0.15


def _samples(artifact: Artifact) -> list[Any]:
    reader = ShardReader.open(artifact)
    return [reader[number] for number in range(len(reader))]


# ------------------------------------------------------------------------------------------------ resuming


@pytest.mark.case("CAB-06")
@pytest.mark.case("CAB-11")
def test_a_stop_between_shards_keeps_the_finished_ones(
    built: Artifact, work_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = context_of(prepare(work_dir))
    monkeypatch.setattr(stopping._State, "reason", None)
    build = builder.Builder.build

    def stop_after_one(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        stopping.request("test")

    with monkeypatch.context() as patch:
        patch.setattr(builder.Builder, "build", stop_after_one)
        with pytest.raises(Stopped):
            targets.run(context)
    monkeypatch.setattr(stopping._State, "reason", None)
    assert context.artifact.missing(NAMES) == NAMES[1:] and not context.artifact.complete
    kept = (context.artifact.path / NAMES[0]).stat().st_mtime_ns
    targets.run(context)
    assert (context.artifact.path / NAMES[0]).stat().st_mtime_ns == kept
    assert hashes(context.artifact) == hashes(built)
    assert len(ShardReader.open(context.artifact)) == 24


@pytest.mark.case("CAB-05")
@pytest.mark.parametrize(
    "change",
    ["targets.layers=[0, 1]", "targets.taps=fp8", "targets.topk=8", "targets.positions=all", "targets.dtype=bfloat16",
     "tokens.max_length=128", "template.system_prompt=x", "seed=1"],
)  # fmt: skip
def test_a_changed_result_field_never_mixes_with_finished_shards(change: str, work_dir: Path) -> None:
    context = context_of(prepare(work_dir))
    before = context.artifact.fingerprint
    after = chain_table.resolve(load_again(context, change))["targets"]
    assert after.fingerprint != before and after.path != context.artifact.path
    assert after.missing(NAMES) == NAMES


def load_again(context: Any, change: str) -> Any:
    settings = context.config.model_dump(mode="json")
    import yaml

    path = context.config.work_dir / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return load(path, [change])


def test_execution_fields_find_the_same_artifact(work_dir: Path) -> None:
    context = context_of(prepare(work_dir))
    changed = load_again(context, "targets.batch_tokens=77")
    assert chain_table.resolve(changed)["targets"].fingerprint == context.artifact.fingerprint


# ------------------------------------------------------------------------------------------------ bad rows


@pytest.mark.case("CAB-04")
def test_rows_that_are_not_finite_cost_themselves_only_up_to_a_share(
    work_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = context_of(prepare(work_dir, "targets.max_skip_fraction=0.01"))
    row = list(read_tokens(strict.inputs["tokens"].path / "train-00000.parquet"))[5]
    forward = Target.forward

    def poisoned(self: Target, ids_BT: torch.Tensor, **options: Any) -> Any:
        out = forward(self, ids_BT, **options)
        wanted = torch.from_numpy(row.ids.copy()).long()
        for index, ids in enumerate(ids_BT):
            if torch.equal(ids[: len(wanted)], wanted):
                out.taps_BTLD[index, 1, 0, 3] = float("inf")
        return out

    monkeypatch.setattr(Target, "forward", poisoned)
    with pytest.raises(DataError, match="1 of 24 rows"):
        targets.run(strict)
    assert not strict.artifact.complete
    assert NAMES[2] in strict.artifact.missing(NAMES), "the build stops where the share is exceeded, not at its end"
    context = context_of(prepare(work_dir, "targets.max_skip_fraction=0.2"))
    assert context.artifact.missing(NAMES) == strict.artifact.missing(NAMES) != NAMES, "and goes on from there"
    targets.run(context)
    assert context.artifact.manifest()["skipped"] == {"not_finite": 1}
    assert (context.artifact.row(NAMES[0]) or {})["left_out"] == [row.id]
    assert len(ShardReader.open(context.artifact)) == 23


# ------------------------------------------------------------------------------------------------ disk


@pytest.mark.case("CAB-01")
def test_a_disk_that_cannot_hold_it_is_refused_before_weights_are_read(
    work_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = context_of(prepare(work_dir))
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda path: Usage(10**9, 10**9, 20_000))
    monkeypatch.setattr(Target, "load", lambda *args, **options: pytest.fail("weights were read"))
    with pytest.raises(StorageError, match=r"need \d+\.\d kB, 20\.0 kB are free"):
        targets.run(context)


def test_a_disk_that_fills_up_stops_cleanly_and_goes_on_after_space_is_freed(
    built: Artifact, work_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a small tmpfs of our own (needs the right to mount)."""
    small = work_dir.parent / "small"
    small.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "none", str(small)], capture_output=True, check=False
    )
    if made.returncode != 0:
        pytest.skip("may not mount a tmpfs")
    try:
        context = context_of(prepare(work_dir))
        shutil.rmtree(context.artifact.path)
        context.artifact.path.parent.mkdir(exist_ok=True)
        (small / "targets").mkdir()
        context.artifact.path.symlink_to(small / "targets")
        context.artifact.create()
        ballast = small / "ballast"
        first = next(fact["bytes"] for fact in built.manifest()["shards"])
        free = shutil.disk_usage(small).free
        ballast.write_bytes(b"x" * (free - first - 70_000))
        monkeypatch.setattr(targets, "refuse_without_space", lambda folder, needed: None)
        with pytest.raises(StorageError, match="Finished files are intact"):
            targets.run(context)
        assert NAMES[0] not in context.artifact.missing(NAMES) and context.artifact.missing(NAMES)
        ballast.unlink()
        targets.run(context)
        assert hashes(context.artifact) == hashes(built)
    finally:
        subprocess.run(["umount", str(small)], check=False)


# ------------------------------------------------------------------------------------------------ ranks


def stage_on_ranks(work_dir: str, *overrides: str) -> str:
    config = prepare(Path(work_dir), *overrides)
    targets.run(context_of(config))
    if dist.is_initialized():
        dist.destroy_process_group()
    return chain_table.resolve(config)["targets"].fingerprint


@pytest.mark.case("CAB-08")
def test_two_ranks_share_the_shards_and_end_without_meeting(built: Artifact, work_dir: Path) -> None:
    prepare(work_dir)
    run_ranks(stage_on_ranks, 2, str(work_dir), needs=NEEDS)
    assert hashes(chain_table.resolve(prepare(work_dir))["targets"]) == hashes(built)


@pytest.mark.case("CAB-08")
def test_more_ranks_than_shards(work_dir: Path) -> None:
    prepare(work_dir, sizes=(7,))
    run_ranks(stage_on_ranks, 2, str(work_dir), needs=NEEDS)
    assert len(ShardReader.open(chain_table.resolve(prepare(work_dir))["targets"])) == 7


def test_tensor_parallel_ranks_agree_with_one(built: Artifact, work_dir: Path) -> None:
    """Both ranks run every forward, one writes. Head counts of the tiny target divide by two."""
    overrides = ("targets.taps=bf16", "targets.logits=last_hidden")
    prepare(work_dir, *overrides)
    run_ranks(stage_on_ranks, 2, str(work_dir), *overrides, "target.tensor_parallel=true", needs=NEEDS)
    ours = {sample.id: sample for sample in _samples(chain_table.resolve(prepare(work_dir, *overrides))["targets"])}
    shutil.copytree(work_dir / "models", work_dir.parent / "alone" / "models")
    alone = run(work_dir.parent / "alone", *overrides)
    for sample in _samples(alone):
        reference, split = sample.teacher.hidden_PD, ours[sample.id].teacher.hidden_PD
        assert (split - reference).norm() / reference.norm() < 5e-6
        assert torch.allclose(ours[sample.id].taps_TLD, sample.taps_TLD, rtol=2.0**-7, atol=1e-5)


def stopped_on_one_rank(work_dir: str) -> str:
    """Rank 1 alone is asked to stop, after its first shard."""
    build = builder.Builder.build

    def asked(self: builder.Builder, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        if os.environ["RANK"] == "1":
            stopping.request("test")

    builder.Builder.build = asked  # type: ignore[method-assign]
    try:
        return stage_on_ranks(work_dir, "target.tensor_parallel=true")
    except Stopped as stop:
        return str(stop)


@pytest.mark.case("CAB-08")
def test_tensor_parallel_ranks_stop_together(work_dir: Path) -> None:
    """One that left alone would leave the other in a forward that never ends."""
    prepare(work_dir)
    reasons = run_ranks(stopped_on_one_rank, 2, str(work_dir), needs=NEEDS)
    assert reasons == ["another rank was asked to stop", "test"]
    assert chain_table.resolve(prepare(work_dir))["targets"].missing(NAMES) == NAMES[1:]


def test_a_device_map_agrees_with_one_device(built: Artifact, work_dir: Path) -> None:
    assert hashes(run(work_dir, "target.device_map=cpu")) == hashes(built)


# ------------------------------------------------------------------------------------------------ kill -9


def build_until_killed(work_dir: str, delays: list[float]) -> None:
    """Run the stage; this process is killed without warning some time after it began to build."""
    delay = delays[int(os.environ["RANK"])]
    enter = builder.Builder.__enter__

    def entered(self: builder.Builder) -> builder.Builder:
        timer = threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
        return enter(self)

    builder.Builder.__enter__ = entered  # type: ignore[method-assign]
    stage_on_ranks(work_dir)
    time.sleep(delay)  # a build that was quicker dies when everything is published


@pytest.mark.case("CAB-06")
def test_killed_builds_end_in_the_same_shards(built: Artifact, work_dir: Path, proof: Proof) -> None:
    """kill -9 of two ranks at random moments, then the same command: keys and hashes of an uninterrupted build."""
    config = prepare(work_dir)
    chance = random.Random(0)
    kills, dead, halfway = proof.size(3, 50), 0, 0
    for _ in range(kills):
        artifact = chain_table.resolve(config)["targets"]
        if not artifact.missing(NAMES):
            shutil.rmtree(artifact.path)
        delays = [chance.uniform(0, 0.6) for _ in range(2)]
        ends = run_ranks(build_until_killed, 2, str(work_dir), delays, catch=True, grace=5, needs=NEEDS)
        dead += sum(isinstance(end, RankFailure) for end in ends)
        halfway += bool(artifact.missing(NAMES))
    run_ranks(stage_on_ranks, 2, str(work_dir), needs=NEEDS)
    artifact = chain_table.resolve(config)["targets"]
    assert hashes(artifact) == hashes(built)
    assert len(ShardReader.open(artifact)) == 24 and not artifact.verify()
    assert dead >= kills
    note = f"{kills} builds, {dead} ranks killed, {halfway} builds left unfinished"
    proof.note("kill -9 of a 2-rank build, then resume: keys and hashes equal", note)
