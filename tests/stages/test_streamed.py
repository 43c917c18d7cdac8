"""`targets.mode: streamed`: training from a finished cache behind a URL, without a target, within a budget of disk."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import stopping
from pipeline.artifact import Artifact
from pipeline.chain import active, finished_cache, resolve
from pipeline.config import Config
from pipeline.errors import ArtifactError, ConfigError, DataError, Stopped
from pipeline.runner import run_chain, run_stage
from pipeline.shards import remote as remote_files
from pipeline.shards.feeder import Feeder
from pipeline.target import Target
from pipeline.training.recorder import Recorder
from tests.ranks import RankFailure, run_ranks
from tests.stages.test_rolling import BUDGET, RECIPE, SIZES, losses
from tests.stages.token_rows import prepare
from tests.store import Store, serving

NEEDS = ("accelerate", "transformers.models.qwen3.modeling_qwen3", "transformers.generation")


def trained(config: Config) -> list[dict[str, Any]]:
    for stage in ("targets", "train"):
        run_stage(config, stage, resolve(config))
    return losses(config)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The cache somebody built with the same configuration."""
    config = prepare(tmp_path_factory.mktemp("elsewhere"), *RECIPE, sizes=SIZES)
    run_stage(config, "targets", resolve(config))
    return resolve(config)["targets"]


@pytest.fixture(scope="module")
def rolled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Losses of the same run through a rolling cache that holds everything."""
    recipe = (*RECIPE, "targets.mode=rolling", "targets.max_bytes=9000000")
    return trained(prepare(tmp_path_factory.mktemp("rolled"), *recipe, sizes=SIZES))


@pytest.fixture
def store(elsewhere: Artifact, tmp_path: Path) -> Iterator[Store]:
    shutil.copytree(elsewhere.path, tmp_path / "public")
    with serving(tmp_path / "public") as found:
        yield found


def streamed(work_dir: Path, store: Store, *overrides: str) -> Config:
    mode = ("targets.mode=streamed", f"targets.url={store.url}", f"targets.max_bytes={BUDGET}")
    return prepare(work_dir, *RECIPE, *mode, *overrides, sizes=SIZES)


@pytest.mark.parametrize("indexed", [True, False], ids=["with index rows", "without"])
def test_losses_are_those_of_a_rolling_cache_and_the_budget_is_kept(
    indexed: bool, rolled: list[dict[str, Any]], store: Store, work_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven shards, room for four, a store that stumbles, and no target model anywhere."""
    if not indexed:
        shutil.rmtree(store.folder / "rows")
    monkeypatch.setattr(remote_files, "_DELAYS", (0.0, 0.0))
    monkeypatch.setattr(Target, "load", lambda *args, **options: pytest.fail("the target was loaded"))
    store.refuse["train-00002.tar"] = 1
    store.cut["train-00004.tar"] = 2
    config = streamed(work_dir, store)
    folder, most, step = resolve(config)["targets"].path, [], Feeder.step

    def watched(self: Feeder) -> bool:
        worked = step(self)
        most.append(sum(path.stat().st_size for path in (folder / "rolling").rglob("*.tar")))
        return worked

    monkeypatch.setattr(Feeder, "step", watched)
    assert trained(config) == rolled
    assert 0 < max(most) <= BUDGET
    assert len([name for name in store.asked if name.endswith(".tar")]) > 2 * len(SIZES), "shards came more than once"
    assert resolve(config)["targets"].manifest()["mode"] == "streamed" and "targets" in active(config)


@pytest.mark.case("LDR-08")
def test_a_stopped_run_goes_on_as_if_nothing_had_been(
    rolled: list[dict[str, Any]], store: Store, work_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped inside an epoch, twice, and in the next one (of 13 steps); what was fetched stays for the next start."""
    config = streamed(work_dir, store)
    run_stage(config, "targets", resolve(config))
    monkeypatch.setattr(stopping._State, "reason", None)
    stepped, stops = Recorder.stepped, [15, 7, 1]

    def asked(self: Recorder, done: int, *rest: Any) -> None:
        stepped(self, done, *rest)
        if stops and done >= stops[-1]:
            stopping.request(f"test, after step {stops.pop()}")

    monkeypatch.setattr(Recorder, "stepped", asked)
    for _ in range(3):
        with pytest.raises(Stopped):
            run_stage(config, "train", resolve(config))
        stopping._State.reason = None
        assert (resolve(config)["targets"].path / "rolling" / "validation.tar").exists()
    run_stage(config, "train", resolve(config))
    assert losses(config) == rolled


def _killed(work_dir: str, url: str, after: int) -> None:
    stepped = Recorder.stepped

    def dies(self: Recorder, done: int, *rest: Any) -> None:
        stepped(self, done, *rest)
        if done == after:
            os.kill(os.getpid(), signal.SIGKILL)

    Recorder.stepped = dies  # type: ignore[method-assign]
    store = Store(Path("unused"))
    store.url = url
    config = streamed(Path(work_dir), store, "train.save_every=4")
    run_stage(config, "train", resolve(config))


def test_killed_in_mid_epoch_it_goes_on(rolled: list[dict[str, Any]], store: Store, work_dir: Path) -> None:
    """kill -9, feeder and all; the leases, half-written files and marks it leaves behind stop nobody."""
    config = streamed(work_dir, store, "train.save_every=4")
    run_stage(config, "targets", resolve(config))
    for after in (3, 14):
        (end,) = run_ranks(_killed, 1, str(work_dir), store.url, after, catch=True, needs=NEEDS)
        assert isinstance(end, RankFailure)
    run_stage(config, "train", resolve(config))
    last = {(line["step"], line["split"]): line for line in losses(config)}
    assert list(last.values()) == rolled


@pytest.mark.case("LDR-01")
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_shard_that_is_not_the_manifests_ends_training_with_its_name(
    damage: str, store: Store, work_dir: Path
) -> None:
    path = store.folder / "train-00003.tar"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    config = streamed(work_dir, store)
    run_stage(config, "targets", resolve(config))
    path.write_bytes(data if damage == "flipped" else data[: len(data) // 2])
    with pytest.raises((ArtifactError, DataError), match="train-00003.tar"):
        run_stage(config, "train", resolve(config))
    assert not resolve(config)["train"].complete


@pytest.mark.case("CAB-05")
def test_another_cache_is_refused_before_anything_runs(store: Store, work_dir: Path) -> None:
    config = streamed(work_dir, store, "targets.taps=fp8")
    shutil.rmtree(work_dir / "tokens")
    with pytest.raises(ConfigError) as refused:
        run_chain(config, ["data", "tokens", "targets"])
    assert finished_cache(config).fingerprint in str(refused.value)
    assert 'targets.taps ("int8" there, "fp8" here)' in str(refused.value)
    assert not (work_dir / "data").exists()
    store.url += "/nowhere"
    with pytest.raises(ArtifactError, match=r"nowhere/manifest\.json"):
        run_chain(streamed(work_dir, store), ["targets"])


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (("targets.mode=streamed", "targets.max_bytes=1000"), "targets.mode streamed needs targets.url"),
        (("targets.mode=streamed", "targets.url=/x"), "targets.mode streamed needs targets.max_bytes"),
        (("targets.url=pipe:cat /x",), "needs {}"),
    ],
)
def test_incomplete_settings_are_refused(wrong: tuple[str, ...], named: str, work_dir: Path) -> None:
    with pytest.raises(ConfigError, match=named):
        prepare(work_dir, *wrong)


def test_the_url_is_no_part_of_what_a_run_is(store: Store, work_dir: Path) -> None:
    ours, moved = (resolve(streamed(work_dir, store, *more)) for more in ((), ("targets.url=/mnt/copy",)))
    assert ours["train"].fingerprint == moved["train"].fingerprint
    assert ours["targets"].fingerprint != resolve(prepare(work_dir, *RECIPE))["targets"].fingerprint
