"""Training without a finished cache on two real ranks: the losses of one, and the disk within its budget."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from pipeline.chain import active, resolve
from pipeline.runner import run_stage
from tests.ranks import run_ranks
from tests.stages.test_rolling import BUDGET, RECIPE, SIZES, losses
from tests.stages.token_rows import prepare
from tests.store import serving

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


def _cache(folder: Path) -> Path:
    """A finished cache, as it would lie in a store."""
    config = prepare(folder / "elsewhere", *RECIPE, sizes=SIZES)
    run_stage(config, "targets", resolve(config))
    shutil.copytree(resolve(config)["targets"].path, folder / "public")
    return folder / "public"
