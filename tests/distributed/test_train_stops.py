"""Runs that are stopped, killed or fail: everybody stops at the same step, and nothing is lost."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.config import Train
from pipeline.distributed import started
from pipeline.errors import ConfigError, DataError, Stopped, StorageError
from pipeline.training import checkpoint
from pipeline.training.journal import read
from pipeline.training.resume import find
from tests.distributed.training import STEPS, steps
from tests.ranks import RankFailure, run_ranks

NEEDS = ("accelerate", "torch._dynamo")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """An uninterrupted run of two ranks."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run_ranks(steps, 2, "ddp", str(folder), STEPS, needs=NEEDS)[0][1]


def metrics(folder: Path) -> list[dict[str, float]]:
    return list(read(folder / "metrics.jsonl"))


def finish(folder: Path, whole: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """Run the same thing again: its losses and weights are bit for bit those of the uninterrupted run."""
    weights = run_ranks(steps, 2, "ddp", str(folder), STEPS, needs=NEEDS)[0][1]
    assert all(torch.equal(value, weights[name]) for name, value in whole[1].items())
    assert metrics(folder) == metrics(whole[0])


@pytest.mark.case("SLM-01")
@pytest.mark.case("SLM-02")
def test_a_signal_to_one_rank_stops_both_at_the_same_step(whole, tmp_path: Path) -> None:
    """A second signal does not break the save of the first; both raise Stopped with the reason; the rest follows."""
    results = run_ranks(steps, 2, "ddp", str(tmp_path), STEPS, torch.float32, "signal_rank_1", needs=NEEDS, catch=True)
    assert [type(result) for result in results] == [Stopped, Stopped]
    assert {str(result) for result in results} == {"signal SIGUSR1"}
    folder = checkpoint.latest(tmp_path / "checkpoints")
    assert folder is not None and checkpoint.load(folder).step == 5 == len(metrics(tmp_path))
    finish(tmp_path, whole)


HELD_OUT = tuple(range(18))  # four global batches


def _validated(engine: str, folder: str, hook: str = "", validation: tuple[int, ...] = HELD_OUT) -> Any:
    return steps(engine, folder, STEPS, hook=hook, validation=validation)


def _best(folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    best = folder / "checkpoints" / "best"
    return json.loads((best / "best.json").read_text()), load_file(best / "weights.safetensors")


INTERRUPTIONS = [  # hook, step whose validation is left, its global batches that were counted (None: all)
    ("signal_in_step:6/{0}", 6, 0),
    ("signal_in_validation:6+2/{0}", 6, 2),
    ("kill_in_validation:6+4/all", 6, 2),
    ("kill_at_step:8", 6, None),
    ("signal_in_validation:12+1/{0}", 12, 1),
    ("signal_in_validation:12+2/{0}", 12, 2),
]


@pytest.mark.case("SLM-01")
@pytest.mark.case("DST-05")
@pytest.mark.parametrize("worlds", [(1, 1), (2, 2), (2, 1)], ids=str)
def test_a_stop_does_not_wait_for_a_validation(worlds: tuple[int, int], tmp_path: Path) -> None:
    """One signal after the other, and kills: metrics, weights and best step are those of the uninterrupted run."""
    first, later = worlds
    engines = {1: "single", 2: "ddp"}
    whole = run_ranks(_validated, first, engines[first], str(tmp_path / "whole"), needs=NEEDS)[0][1]
    folder = tmp_path / "cut"
    for number, (hook, step, counted) in enumerate(INTERRUPTIONS):
        world = first if number < 2 else later
        arguments = (engines[world], str(folder), hook.format(world - 1))
        results = run_ranks(_validated, world, *arguments, needs=NEEDS, catch=True, grace=1)
        kind = Stopped if hook.startswith("signal") else (RankFailure, RuntimeError)
        assert all(isinstance(result, kind) for result in results)
        latest = checkpoint.latest(folder / "checkpoints")
        assert latest is not None and latest.name == f"step-{step:06d}"
        begun = checkpoint.load(latest).facts["validation"]
        assert (None if begun is None else begun["next"]) == counted
    weights = run_ranks(_validated, later, engines[later], str(folder), needs=NEEDS)[0][1]
    assert weights is None, "nothing was left to train"
    found = checkpoint.load(latest).weights
    rows, expected = metrics(folder), metrics(tmp_path / "whole")
    assert [(row["step"], row["split"]) for row in rows] == [(row["step"], row["split"]) for row in expected]
    (best, kept), (wanted, whole_kept) = _best(folder), _best(tmp_path / "whole")
    assert best["step"] == wanted["step"]
    if first == later:
        assert rows == expected and best == wanted
        assert all(torch.equal(value, found[name]) for name, value in whole.items())
        assert all(torch.equal(value, kept[name]) for name, value in whole_kept.items())
    else:
        assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in expected], rel=1e-4)


@pytest.mark.case("SLM-01")
def test_a_stop_whose_save_fails_is_no_clean_stop(tmp_path: Path) -> None:
    """The disk is full for rank 0, which writes: rank 1 does not say that it has stopped either."""
    arguments = ("ddp", str(tmp_path), STEPS, torch.float32, "stop_on_a_full_disk:0")
    results = run_ranks(steps, 2, *arguments, needs=NEEDS, catch=True)
    assert [result.exit_code for result in results] == [StorageError.exit_code] * 2
    assert all("step-000005: cannot be written" in str(result) for result in results)
    folder = checkpoint.latest(tmp_path / "checkpoints")
    assert folder is not None and checkpoint.load(folder).step == 3


@pytest.mark.case("DST-12")
def test_what_one_rank_refuses_ends_all_with_its_exit_code() -> None:
    """A configuration that only rank 0 can judge."""
    results = run_ranks(_refused, 2, needs=NEEDS, catch=True)
    assert [result.exit_code for result in results] == [ConfigError.exit_code] * 2
    assert str(results[1]).startswith("rank 0: ") and all("too small" in str(result) for result in results)


def _refused() -> None:
    def judge() -> None:
        if os.environ["RANK"] == "0":
            raise ConfigError("too small")

    with started(Train(steps=2)) as ranks:
        ranks.together(judge)


@pytest.mark.case("DST-12")
def test_an_exception_on_one_rank_ends_both(whole, tmp_path: Path) -> None:
    """Within the minute, without a hang; the checkpoint from before is good."""
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 failed|peer|closed"):
        run_ranks(steps, 2, "ddp", str(tmp_path), STEPS, torch.float32, "raise_on_rank_1", needs=NEEDS)
    assert time.monotonic() - began < 60
    finish(tmp_path, whole)


@pytest.mark.case("DST-03")
@pytest.mark.case("DST-05")
@pytest.mark.parametrize("hook", ["kill_rank_1", "kill_all"])
def test_a_killed_run_goes_on_bit_for_bit(hook: str, whole, tmp_path: Path) -> None:
    """kill -9 of one rank or both, right after a save began; saves every 3 steps."""
    with pytest.raises((RankFailure, RuntimeError)):
        run_ranks(steps, 2, "ddp", str(tmp_path), STEPS, torch.float32, hook, needs=NEEDS)
    finish(tmp_path, whole)


@pytest.mark.case("DST-04")
@pytest.mark.case("SLM-04")
def test_a_run_stops_at_its_last_step_and_stays_there(tmp_path: Path) -> None:
    """7 steps, saved every 3: `latest` is step 7; the same command again trains nothing."""
    run_ranks(steps, 1, "single", str(tmp_path), 7, needs=NEEDS)
    folder = checkpoint.latest(tmp_path / "checkpoints")
    assert folder is not None and checkpoint.load(folder).step == 7
    before = (tmp_path / "metrics.jsonl").read_text()
    assert run_ranks(steps, 1, "single", str(tmp_path), 7, needs=NEEDS)[0][0] == []
    assert (tmp_path / "metrics.jsonl").read_text() == before


@pytest.mark.case("DST-03")
def test_all_ranks_go_on_from_the_checkpoint_rank_0_sees(tmp_path: Path) -> None:
    """On another node the new `latest`, or the folder itself, may not be visible yet."""
    run_ranks(steps, 1, "single", str(tmp_path), 2, needs=NEEDS)
    state = tmp_path / "checkpoints" / "step-000002" / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "fingerprint": "a", "first": 0}))
    assert run_ranks(_choose, 2, str(tmp_path), needs=NEEDS) == [2, 2]


def _choose(folder: str) -> int:
    if os.environ["RANK"] == "1":
        checkpoint.latest = lambda root: None
    artifact: Any = SimpleNamespace(path=Path(folder), fingerprint="a")
    config: Any = SimpleNamespace(train=SimpleNamespace(continue_from=None))
    with started(Train(steps=2)) as ranks:
        return find(artifact, config, ranks).start


@pytest.mark.case("DST-06")
def test_random_state_is_kept_per_rank(tmp_path: Path) -> None:
    folder = checkpoint.latest(_two_ranks(tmp_path) / "checkpoints")
    assert folder is not None
    states = checkpoint.load(folder).facts["random"]
    assert len(states) == 2 and states[0]["torch"] != states[1]["torch"]


def _two_ranks(folder: Path) -> Path:
    run_ranks(_seeded, 2, str(folder), needs=NEEDS)
    return folder


def _seeded(folder: str) -> None:
    torch.manual_seed(int(os.environ["RANK"]))
    steps("ddp", folder, 1)


@pytest.mark.case("DST-02")
@pytest.mark.parametrize("bare", [(0, 5, 7), tuple(range(22))])
def test_rows_without_anchors_keep_the_ranks_in_step(bare: tuple[int, ...], tmp_path: Path) -> None:
    """Rows that leave one rank, or both, with nothing to learn in a step: no hang, the losses of one rank."""
    results = run_ranks(_bare, 2, "ddp", str(tmp_path / "two"), bare, needs=NEEDS)
    alone = run_ranks(_bare, 1, "single", str(tmp_path / "one"), bare, needs=NEEDS)[0]
    for lines in results:
        assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in alone], rel=1e-5)


def _bare(engine: str, folder: str, bare: tuple[int, ...]) -> list[dict[str, float]]:
    return steps(engine, folder, 6, bare=bare)[0]


@pytest.mark.case("LDR-06")
def test_validation_counts_every_row_once(whole, tmp_path: Path) -> None:
    """3 held-out rows on 2 ranks give the numbers of 1 rank."""
    run_ranks(steps, 1, "single", str(tmp_path), STEPS, needs=NEEDS)
    one, two = (
        [line for line in metrics(folder) if line.pop("split") == "validation"] for folder in (tmp_path, whole[0])
    )
    assert len(one) == len(two) == 2
    for a, b in zip(one, two, strict=True):
        assert a == pytest.approx(b, rel=1e-4)


def test_a_loss_that_is_not_finite_names_its_samples(tmp_path: Path) -> None:
    """Every rank stops with the same message, and no checkpoint holds the step."""
    results = run_ranks(_poisoned, 2, str(tmp_path), needs=NEEDS, catch=True)
    assert {type(result) for result in results} == {DataError}
    assert "step 2: the loss is not finite" in str(results[0]) and "row-3/0" in str(results[0])
    assert str(results[0]) == str(results[1])
    assert checkpoint.latest(tmp_path / "checkpoints") is None


def _poisoned(folder: str) -> None:
    from tests.unit.training import world as module

    read = module.FakeRows.read

    def poisoned(self: module.FakeRows, rows: list[int]) -> list[object]:
        samples = read(self, rows)
        for row, sample in zip(rows, samples, strict=True):
            if row == 3:
                sample.taps_TLD[:, 0, 0] = float("nan")
        return samples

    module.FakeRows.read = poisoned  # type: ignore[method-assign]
    steps("ddp", folder, 6)
