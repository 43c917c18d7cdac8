"""`targets.mode: rolling`: the same training, through a cache that stays within its budget and is gone afterwards."""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from pipeline.chain import resolve
from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.operations import feed
from pipeline.runner import run_stage
from pipeline.shards.feeder import Feeder
from pipeline.shards.supply import Computed
from pipeline.shards.writer import ShardWriter
from tests.ranks import run_ranks
from tests.stages.token_rows import prepare

RECIPE = (
    "targets.taps=int8", "train.steps=20", "train.global_batch_size=4", "train.num_anchors=8", "train.validate_every=6",
    "train.save_every=100", "draft.init=random", "draft.markov_rank=4", "tracking.enabled=false", "train.workers=2",
    "train.validation_fraction=0.1",
)  # fmt: skip
BUDGET = 360_000
ROLLING = (*RECIPE, "targets.mode=rolling", f"targets.max_bytes={BUDGET}")
SIZES = (8,) * 7


def losses(config: Config) -> list[dict[str, Any]]:
    lines = (resolve(config)["train"].path / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if "second" not in k} for line in lines]


def test_with_few_shards_the_losses_are_those_of_a_finished_cache(work_dir: Path) -> None:
    """Few enough to lie in one window of either order."""
    cached, rolling = prepare(work_dir, *RECIPE), prepare(work_dir, *ROLLING)
    for config in (cached, rolling):
        for stage in ("targets", "train"):
            run_stage(config, stage, resolve(config))
    manifest = resolve(rolling)["targets"].manifest()
    assert manifest["mode"] == "rolling" and manifest["shards"] == []
    assert losses(rolling) == losses(cached)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["thread", "dspark feed"])
def test_a_small_budget_changes_no_loss_and_is_kept(
    elsewhere: bool, work_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven shards, room for four: against a budget that holds them all."""
    roomy = prepare(work_dir.parent / "roomy", *ROLLING, "targets.max_bytes=9000000", sizes=SIZES)
    for stage in ("targets", "train"):
        run_stage(roomy, stage, resolve(roomy))
    config = prepare(work_dir, *ROLLING, sizes=SIZES)
    artifacts = resolve(config)
    run_stage(config, "targets", artifacts)
    folder = artifacts["targets"].path
    most, built = [], []
    step, build = Feeder.step, Computed._build

    def watched(self: Feeder) -> bool:
        worked = step(self)
        most.append(sum(path.stat().st_size for path in (folder / "rolling").rglob("*.tar")))
        return worked

    def counted(self: Computed, name: str, *rest: Any) -> None:
        built.append(name)
        build(self, name, *rest)

    monkeypatch.setattr(Feeder, "step", watched)
    monkeypatch.setattr(Computed, "_build", counted)
    other = threading.Thread(target=feed.run, args=(config, argparse.Namespace()))
    if elsewhere:
        other.start()
        while not (folder / "feeder.json").exists():
            other.join(0.05)
    run_stage(config, "train", artifacts)
    if elsewhere:
        other.join(30)
    assert losses(config) == losses(roomy)
    assert 0 < max(most) <= BUDGET
    assert len(built) > len(SIZES) + 1, "shards were deleted and built again"
    _gone(folder / "rolling")


def _feed(work_dir: str, killed_in: int | None) -> None:
    """`dspark feed`, which is killed in the midst of the shard with that number, counted from 1."""
    begun, add = list[Path](), ShardWriter.add

    def dies(self: ShardWriter, **fields: Any) -> None:
        if self._file not in begun:
            begun.append(self._file)
        add(self, **fields)
        if len(begun) == killed_in:
            os.kill(os.getpid(), signal.SIGKILL)

    ShardWriter.add = dies  # type: ignore[method-assign]
    feed.run(prepare(Path(work_dir), *ROLLING, sizes=SIZES), argparse.Namespace())


def test_a_killed_feeder_is_started_again_beside_the_training_that_waits_for_it(work_dir: Path) -> None:
    """kill -9 of `dspark feed` inside a shard: no loss changes, and nothing of it stays."""
    roomy = prepare(work_dir.parent / "roomy", *ROLLING, "targets.max_bytes=9000000", sizes=SIZES)
    config = prepare(work_dir, *ROLLING, sizes=SIZES)
    for settings in (roomy, config):
        run_stage(settings, "targets", resolve(settings))
    run_stage(roomy, "train", resolve(roomy))
    artifacts, ends = resolve(config), []
    folder = artifacts["targets"].path

    def feeders() -> None:
        ends.extend(run_ranks(_feed, 1, str(work_dir), 7, catch=True))
        ends.append([json.loads((folder / "feeder.json").read_text())["pid"], *(folder / "rolling" / ".tmp").iterdir()])
        ends.extend(run_ranks(_feed, 1, str(work_dir), None, catch=True, timeout=120))

    beside = threading.Thread(target=feeders)
    beside.start()
    while beside.is_alive() and not (folder / "feeder.json").exists():
        beside.join(0.05)
    run_stage(config, "train", artifacts)
    beside.join(60)
    killed, (pid, *left), ended = ends
    assert str(killed).endswith("killed by SIGKILL") and pid != os.getpid() and len(left) == 1 and ended is None
    assert losses(config) == losses(roomy)
    assert not (folder / "feeder.json").exists() and not list((folder / "rolling").rglob("*.tar*"))


def _gone(folder: Path) -> None:
    """The feeder notices the finished drafter and deletes what rolled."""
    for _ in range(100):
        if not list(folder.glob("*.tar")):
            return
        threading.Event().wait(0.1)
    raise AssertionError(f"{list(folder.iterdir())} left behind")


def test_a_budget_too_small_ends_training_before_the_first_step(work_dir: Path) -> None:
    config = prepare(work_dir, *ROLLING, "targets.max_bytes=1000")
    run_stage(config, "targets", resolve(config))
    with pytest.raises(ConfigError, match="targets.max_bytes"):
        run_stage(config, "train", resolve(config))


def test_only_a_rolling_cache_is_fed(work_dir: Path) -> None:
    with pytest.raises(ConfigError, match="targets.mode is cached"):
        feed.run(prepare(work_dir, *RECIPE), argparse.Namespace())
