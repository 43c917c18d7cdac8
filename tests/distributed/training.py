"""What a rank runs in the tests of this folder: some steps of the small world under one engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline import stopping
from pipeline.distributed import Engine, Ranks, started
from pipeline.training import checkpoint
from pipeline.training.loop import Run, train
from pipeline.training.optimizer import LearningRate, adamw
from pipeline.training.recorder import Recorder
from pipeline.training.resume import Point
from pipeline.training.state import load_moments, load_weights, shapes
from tests.distributed import hooks
from tests.unit.training.world import World, world

STEPS = 12
CLIP = 0.3  # below every step's norm, so that clipping acts


def prepare(ranks: Ranks, made: World, folder: Path) -> tuple[Engine, Recorder, int]:
    """Engine and recorder, with the latest checkpoint of `folder` in them; and the step to go on from."""
    found = checkpoint.latest(folder / "checkpoints")
    snapshot = None if found is None else checkpoint.load(found)
    if snapshot is not None:
        load_weights(made.objective, snapshot, str(found))
    expected = shapes(made.objective)
    engine = ranks.prepare(made.objective, adamw(made.objective, made.train))
    start = 0
    if snapshot is not None:
        start = snapshot.step
        load_moments(engine, snapshot, start)
    recorder = Recorder(
        engine, folder, start=start, keep=2, shapes=expected, spread=made.train.sharded_checkpoints,
        begun=Point(snapshot, start).begun,
    )  # fmt: skip
    return engine, recorder, start


def steps(
    engine: str,
    folder: str,
    stop: int,
    dtype: torch.dtype = torch.float32,
    hook: str = "",
    validation: Sequence[int] = (0, 1, 2),
    **options: Any,
) -> tuple[list[dict[str, float]], dict[str, Tensor] | None]:
    """Train to step `stop`, going on from what `folder` holds; (numbers of each step, final weights on rank 0).

    `hook` is `name` or `name:argument`: a function of `tests.distributed.hooks`, called with (rank, finished steps,
    argument) before the first step and after every step.
    """
    stopping.install()
    made = world(dtype=dtype, engine=engine, rows=22, batch=5, learning_rate=0.02, max_grad_norm=CLIP, **options)
    lines: list[dict[str, float]] = []
    with started(made.train) as ranks:
        prepared, recorder, start = prepare(ranks, made, Path(folder))
        seen: Callable[..., None] = recorder.stepped
        name, _, argument = hook.partition(":")
        happen = getattr(hooks, name) if name else lambda *_: None
        happen(ranks.rank, start, argument)

        def stepped(done: int, numbers: dict[str, float], timing: dict[str, float]) -> None:
            seen(done, numbers, timing)
            lines.append(numbers)
            happen(ranks.rank, done, argument)

        recorder.stepped = stepped  # type: ignore[method-assign]
        run = Run(
            engine=prepared, frozen=made.frozen, schedule=made.schedule, reader=made.reader, validation=validation,
            terms=made.terms, rate=LearningRate.of(made.train, STEPS), events=recorder, start=start, stop=stop,
            dtype=dtype, budget=60, workers=int(os.environ.get("TEST_WORKERS", "1")), validate_every=6,
            save_every=3, begun=recorder.begun,
        )  # fmt: skip
        try:
            train(run)
        finally:
            recorder.close()
        weights = recorder.last.weights if recorder.last is not None else None
    return lines, weights
