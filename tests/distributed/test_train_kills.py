"""kill -9 at random moments, under every engine and from one engine to another: nothing is lost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.training import checkpoint
from pipeline.training.journal import read
from tests.conftest import Proof
from tests.distributed.test_train_engines import NEEDS, close
from tests.distributed.training import STEPS, steps
from tests.ranks import run_ranks

# Engine, ranks, sharded checkpoints.
Way = tuple[str, int, bool]
WAYS: dict[str, list[Way]] = {
    "ddp": [("ddp", 2, False)],
    "zero2": [("zero2", 2, False)],
    "zero3": [("zero3", 2, False)],
    "fsdp2": [("fsdp2", 2, False)],
    "fsdp2-sharded": [("fsdp2", 2, True)],
}
WAYS["any"] = [("single", 1, False), ("ddp", 2, True), *(way for ways in WAYS.values() for way in ways)]
ALWAYS = ("ddp", "fsdp2-sharded")


def _run(engine: str, folder: str, sharded: bool, hook: str) -> Any:
    return steps(engine, folder, STEPS, hook=hook, sharded_checkpoints=sharded)


@dataclass
class Outcome:
    weights: dict[str, Tensor]
    lines: list[dict[str, float]]


def run(way: Way, folder: Path, hook: str = "") -> Outcome:
    engine, world, sharded = way
    run_ranks(_run, world, engine, str(folder), sharded, hook, needs=NEEDS, grace=1)
    found = checkpoint.latest(folder / "checkpoints")
    assert found is not None
    return Outcome(checkpoint.load(found).weights, list(read(folder / "metrics.jsonl")))


def moment(random: Random, folder: Path, world: int) -> str:
    """Half of the kills fall into a step, half into the work on checkpoint files."""
    who = random.choice([*map(str, range(world)), "all"])
    if random.random() < 0.5:
        return f"kill_at_file:{random.randint(1, 80)}/{who}"
    found = checkpoint.latest(folder / "checkpoints")
    start = 0 if found is None else checkpoint.load(found).step
    return f"kill_in_step:{random.randint(start, min(start + 6, STEPS))}+{random.uniform(0, 1.5):.2f}/{who}"


@pytest.mark.prove
@pytest.mark.case("DST-03")
@pytest.mark.parametrize("name", WAYS)
def test_kills_at_random_moments(name: str, tmp_path: Path, proof: Proof) -> None:
    """One rank or all, in steps and in saves; each run goes on until it is killed again, and ends as if it never was.

    Bit for bit where the engine stays the same; to 1e-4 where every start takes another one.
    """
    if name not in ALWAYS and not proof.full:
        pytest.skip("the other engines are part of `make prove`")
    ways, random = WAYS[name], Random(name)
    whole = run(ways[0], tmp_path / "whole")
    kills = runs = 0
    while kills < proof.size(2, 20) or runs == 0:
        folder, way = tmp_path / str(runs), random.choice(ways)
        hook = moment(random, folder, way[1]) if kills < proof.size(2, 20) else ""
        try:
            outcome = run(way, folder, hook)
        except Exception:
            kills += 1
            continue
        runs += 1
        same(outcome, whole, exact=len(ways) == 1)
    proof.note(f"{name}: kill -9 of one rank or all; {runs} runs ended equal to the uninterrupted one", kills)


def same(found: Outcome, whole: Outcome, *, exact: bool) -> None:
    assert found.weights.keys() == whole.weights.keys()
    if exact:
        assert all(torch.equal(value, found.weights[name]) for name, value in whole.weights.items())
        assert found.lines == whole.lines
        return
    for name, value in whole.weights.items():
        assert (found.weights[name] - value).norm() <= 1e-4 * value.norm(), name
    assert [(line["step"], line["split"]) for line in found.lines] == [
        (line["step"], line["split"]) for line in whole.lines
    ]
    training = [[line for line in outcome.lines if line["split"] == "train"] for outcome in (found, whole)]
    close(*training, 1e-4)
