"""Training without a finished cache on two real ranks: the losses of one, and the disk within its budget."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pipeline import stopping
from pipeline.artifact import Artifact, read_json
from pipeline.chain import active, resolve
from pipeline.config import Config
from pipeline.errors import ArtifactError, DsparkError, Stopped, StorageError
from pipeline.runner import run_stage
from pipeline.shards.feeder import Feeder
from pipeline.shards.reader import ShardReader
from pipeline.shards.rolling import RollingReader
from pipeline.shards.writer import ShardWriter
from pipeline.training import checkpoint
from pipeline.training.recorder import Recorder
from tests.ranks import RankFailure, run_ranks
from tests.stages.test_rolling import BUDGET, RECIPE, SIZES, losses
from tests.stages.token_rows import prepare
from tests.store import Store, serving

NEEDS = ("accelerate", "transformers.models.qwen3.modeling_qwen3", "transformers.generation")
EXACT = ("targets.taps=bf16", "targets.logits=last_hidden")  # what a live target computes


def train_on_ranks(work_dir: str, *overrides: str) -> None:
    config = prepare(Path(work_dir), *overrides, sizes=SIZES)
    run_stage(config, "train", resolve(config))
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def watched(folder: Path) -> Iterator[list[int]]:
    """Bytes of the shards below a folder, half-written ones included, looked at all the time."""
    done, most = threading.Event(), [0]

    def look() -> None:
        while not done.wait(0.005):
            total = 0
            for path in folder.rglob("*.tar"):
                try:
                    total += path.stat().st_size
                except FileNotFoundError:
                    continue
            most[0] = max(most[0], total)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("mode", ["live", "rolling", "streamed"])
def test_two_ranks_give_the_losses_of_one(mode: str, tmp_path: Path) -> None:
    recipe = [*RECIPE, f"targets.mode={mode}", f"targets.max_bytes={BUDGET}", *(EXACT if mode == "live" else ())]
    with serving(_cache(tmp_path) if mode == "streamed" else tmp_path) as store:
        recipe.append(f"targets.url={store.url}")
        found = []
        for world in (1, 2):
            work_dir = tmp_path / f"on-{world}"
            config = prepare(work_dir, *recipe, sizes=SIZES)
            if "targets" in active(config):
                run_stage(config, "targets", resolve(config))
            engine = f"train.engine={'ddp' if world == 2 else 'single'}"
            with watched(work_dir / "targets") as most:
                run_ranks(train_on_ranks, world, str(work_dir), *recipe, engine, timeout=240, needs=NEEDS)
            found.append(losses(config))
            assert (most[0] == 0) if mode == "live" else (0 < most[0] <= BUDGET)
    alone, both = found
    assert len(alone) == len(both) > 20
    for ours, theirs in zip(both, alone, strict=True):
        assert ours.pop("split") == theirs.pop("split")
        norms = [line.pop("grad_norm", 0.0) for line in (ours, theirs)]  # feels the order of sums more than losses do
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)


@pytest.mark.case("LDR-03")
def test_one_shard_feeds_two_ranks_with_two_readers_each(tmp_path: Path) -> None:
    """Six rows in one shard, for four readers: split by sample, so nothing hangs and nothing is missing."""
    recipe = [*RECIPE, "train.steps=3", "train.validation_fraction=0.0", "train.engine=ddp"]
    config = prepare(tmp_path, *recipe, sizes=(6,))
    run_stage(config, "targets", resolve(config))
    run_ranks(train_on_ranks, 2, str(tmp_path), *recipe, timeout=240, needs=NEEDS)
    assert [line["step"] for line in losses(config)] == [1, 2, 3]
    assert resolve(config)["train"].manifest()["rows"] == 6


def _stopped_while_waiting(work_dir: str, asked: str, *overrides: str) -> None:
    """SIGUSR1 to the ranks `asked` when they wait for their third shard; shards come slowly."""
    build, waiting, waits = Feeder.step, RollingReader._waiting_for, itertools.count(1)

    def slow(self: Feeder) -> bool:
        time.sleep(0.2)
        return build(self)

    def signalled(self: RollingReader, shard: int) -> Any:
        if next(waits) == 3 and os.environ["RANK"] in asked:
            os.kill(os.getpid(), signal.SIGUSR1)
        return waiting(self, shard)

    Feeder.step, RollingReader._waiting_for = slow, signalled  # type: ignore[method-assign]
    stopping.install()
    train_on_ranks(work_dir, *overrides)


@pytest.mark.case("SLM-01")
@pytest.mark.parametrize("mode", ["rolling", "streamed"])
@pytest.mark.parametrize("asked", ["1", "01"], ids=["one rank", "both"])
def test_a_stop_while_a_shard_is_awaited_saves_on_all_ranks(
    mode: str, asked: str, whole: dict[str, Config], store: Store, tmp_path: Path
) -> None:
    """The shard still comes, the step ends, and the same command goes on to the losses of an uninterrupted run."""
    recipe = recipe_of(mode, store)
    config = prepare(tmp_path, *recipe, sizes=SIZES)
    run_stage(config, "targets", resolve(config))
    found = run_ranks(_stopped_while_waiting, 2, str(tmp_path), asked, *recipe, timeout=240, needs=NEEDS, catch=True)
    assert [type(end) for end in found] == [Stopped, Stopped]
    folder = resolve(config)["train"].path
    assert (folder / "stopped.json").exists() and not (folder / "failed.json").exists()
    latest = checkpoint.latest(folder / "checkpoints")
    assert latest is not None and checkpoint.load(latest).step == losses(config)[-1]["step"] < 20
    run_ranks(train_on_ranks, 2, str(tmp_path), *recipe, timeout=240, needs=NEEDS)
    assert losses(config) == losses(whole[mode])


def _stopped_without_shards(work_dir: str, *overrides: str) -> None:
    """SIGUSR1 to rank 1 when it waits for a shard; none comes any more."""
    waiting = RollingReader._waiting_for

    def signalled(self: RollingReader, shard: int) -> Any:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGUSR1)
        return waiting(self, shard)

    Feeder.step, RollingReader._waiting_for = lambda self: False, signalled  # type: ignore[method-assign]
    stopping.install()
    train_on_ranks(work_dir, *overrides)


@pytest.mark.case("SLM-01")
def test_a_stop_of_one_rank_ends_both_when_no_shard_comes(tmp_path: Path) -> None:
    """Half of the grace time later they leave with what was saved before; the rank that was not asked leaves too."""
    recipe = (*RECIPE, "targets.mode=rolling", f"targets.max_bytes={BUDGET}", "train.engine=ddp")
    config = prepare(tmp_path, *recipe, sizes=SIZES)
    run_stage(config, "targets", resolve(config))
    more = (*recipe, "launch.grace_seconds=2")
    ends = run_ranks(_stopped_without_shards, 2, str(tmp_path), *more, needs=NEEDS, catch=True, grace=30)
    assert [type(end) for end in ends] == [Stopped, Stopped]
    folder = resolve(config)["train"].path
    assert (folder / "stopped.json").exists() and not (folder / "failed.json").exists()


def _killed(work_dir: str, victims: str, *overrides: str) -> None:
    """SIGKILL to some ranks once step 9 is done, in the middle of an epoch."""
    stepped = Recorder.stepped

    def dies(self: Recorder, done: int, *rest: Any) -> None:
        stepped(self, done, *rest)
        if done == 9 and os.environ["RANK"] in victims:
            os.kill(os.getpid(), signal.SIGKILL)

    Recorder.stepped = dies  # type: ignore[method-assign]
    train_on_ranks(work_dir, *overrides, "train.save_every=4")


@pytest.mark.case("DST-03")
@pytest.mark.parametrize("mode", ["rolling", "streamed"])
def test_killed_ranks_go_on_where_they_saved(mode: str, whole: dict[str, Config], store: Store, tmp_path: Path) -> None:
    """kill -9 of the rank that feeds, then of the other one, then of both."""
    recipe = recipe_of(mode, store)
    config = prepare(tmp_path, *recipe, sizes=SIZES)
    run_stage(config, "targets", resolve(config))
    for victims in ("0", "1", "01"):
        ends = run_ranks(_killed, 2, str(tmp_path), victims, *recipe, timeout=120, needs=NEEDS, catch=True, grace=20)
        for rank, end in enumerate(ends):
            killed = f"rank {rank} ended without a result: killed by SIGKILL"
            assert (str(end) == killed) is (str(rank) in victims) and isinstance(end, Exception), end
        found = checkpoint.latest(resolve(config)["train"].path / "checkpoints")
        assert found is not None and checkpoint.load(found).step in (4, 8)
    run_ranks(train_on_ranks, 2, str(tmp_path), *recipe, timeout=240, needs=NEEDS)
    assert losses(config) == losses(whole[mode])


def _with_a_copy_of_its_own(work_dir: str, *overrides: str) -> None:
    """Rank 1's node sees train-00003.tar cut, or, while it rolls, with a byte of a header changed."""
    opened, pread = ShardReader.open.__func__, os.pread  # type: ignore[attr-defined]

    def cut(cls: type[ShardReader], artifact: Artifact) -> ShardReader:
        here = Artifact(Path(work_dir) / "node-1", artifact.stage, artifact.request)
        path = Path(shutil.copytree(artifact.path, here.path)) / "train-00003.tar"
        os.truncate(path, path.stat().st_size // 2)
        return opened(cls, here)  # type: ignore[no-any-return]

    def changed(handle: int, size: int, offset: int) -> bytes:
        data = bytearray(pread(handle, size, offset))
        data[100] ^= Path(f"/proc/self/fd/{handle}").readlink().name == "train-00003.tar"
        return bytes(data)

    if os.environ["RANK"] == "1":
        ShardReader.open, os.pread = classmethod(cut), changed  # type: ignore[assignment, method-assign]
    train_on_ranks(work_dir, *overrides)


@pytest.mark.case("LDR-01")
@pytest.mark.case("DST-12")
@pytest.mark.parametrize("mode", ["cached", "rolling", "streamed"])
def test_a_shard_damaged_for_one_rank_ends_all_with_its_name(mode: str, store: Store, tmp_path: Path) -> None:
    """Within a minute, by themselves; before the first step where the cache is finished."""
    recipe = (*RECIPE, "train.engine=ddp") if mode == "cached" else recipe_of(mode, store)
    config = prepare(tmp_path, *recipe, sizes=SIZES)
    run_stage(config, "targets", resolve(config))
    ends = run_ranks(
        _with_a_copy_of_its_own, 2, str(tmp_path), *recipe, timeout=120, needs=NEEDS, catch=True, grace=60
    )  # fmt: skip
    assert isinstance(ends[1], ArtifactError) and "train-00003.tar" in str(ends[1])
    assert isinstance(ends[0], DsparkError) and "train-00003.tar" in str(ends[0]), "not only that its peer is gone"
    failed = read_json(resolve(config)["train"].path / "failed.json")
    assert failed["exit_code"] == 4 and "train-00003.tar" in failed["error"]


def _on_a_full_disk(work_dir: str, *overrides: str) -> None:
    """Room for the validation rows and two shards."""
    add, files = ShardWriter.add, set[str]()

    def full(self: ShardWriter, **fields: Any) -> None:
        files.add(self._file.name)
        if len(files) > 3:
            raise OSError(28, "No space left on device")
        add(self, **fields)

    ShardWriter.add = full  # type: ignore[method-assign]
    train_on_ranks(work_dir, *overrides)


@pytest.mark.case("DST-12")
@pytest.mark.parametrize("mode", ["rolling", "streamed"])
def test_a_disk_that_fills_up_under_the_shards_ends_all_ranks(
    mode: str, whole: dict[str, Config], store: Store, tmp_path: Path
) -> None:
    """Within a minute, saying so; with room again, the same command goes on."""
    recipe = recipe_of(mode, store)
    config = prepare(tmp_path, *recipe, sizes=SIZES)
    run_stage(config, "targets", resolve(config))
    ends = run_ranks(_on_a_full_disk, 2, str(tmp_path), *recipe, timeout=120, needs=NEEDS, catch=True, grace=60)
    assert isinstance(ends[0], StorageError) and "rolling/train-" in str(ends[0])
    assert isinstance(ends[1], Exception) and not isinstance(ends[1], RankFailure)
    assert read_json(resolve(config)["train"].path / "failed.json")["exit_code"] == StorageError.exit_code
    run_ranks(train_on_ranks, 2, str(tmp_path), *recipe, timeout=240, needs=NEEDS)
    assert losses(config) == losses(whole[mode])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with serving(_cache(tmp_path_factory.mktemp("store"))) as found:
        yield found


@pytest.fixture(scope="module")
def whole(store: Store, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Config]:
    """Uninterrupted runs of two ranks."""
    found = {}
    for mode in ("rolling", "streamed"):
        work_dir, recipe = tmp_path_factory.mktemp(mode), recipe_of(mode, store)
        found[mode] = prepare(work_dir, *recipe, sizes=SIZES)
        run_stage(found[mode], "targets", resolve(found[mode]))
        run_ranks(train_on_ranks, 2, str(work_dir), *recipe, timeout=240, needs=NEEDS)
    return found


def recipe_of(mode: str, store: Store) -> tuple[str, ...]:
    more = (f"targets.mode={mode}", f"targets.max_bytes={BUDGET}", f"targets.url={store.url}", "train.engine=ddp")
    return (*RECIPE, *more)


def _cache(folder: Path) -> Path:
    """A finished cache, as it would lie in a store."""
    config = prepare(folder / "elsewhere", *RECIPE, sizes=SIZES)
    run_stage(config, "targets", resolve(config))
    shutil.copytree(resolve(config)["targets"].path, folder / "public")
    return folder / "public"
