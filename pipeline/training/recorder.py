"""What happens around the steps of a run: lines in the journal, curves in the tracker, checkpoints, the best so far."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.artifact import atomic_path, read_json
from pipeline.distributed import Engine
from pipeline.training.checkpoint import FORMAT, Saver, folder_of, random_state
from pipeline.training.journal import METRICS, TIMINGS, Journal
from pipeline.training.sharded import PartsWriter
from pipeline.training.state import MOMENTS, Snapshot, gather
from pipeline.training.validation import Begun

Advance = Callable[..., None]
_SHOWN = ("loss", "acceptance", "expected_tau")


class Recorder:
    """Implements `loop.Events`. Every rank has one; only rank 0 writes."""

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        *,
        start: int,
        keep: int,
        shapes: dict[str, list[int]],
        facts: dict[str, Any] | None = None,
        tracker: Any = None,
        advance: Advance | None = None,
        spread: bool = False,
        begun: Begun | None = None,
    ) -> None:
        """`facts` go into every checkpoint's state.json; `advance(1, **shown)` moves a progress bar; with `spread`
        every rank writes its own part of a checkpoint, and moments are never gathered; `begun` is what the checkpoint
        of step `start` says of a validation that was broken off."""
        self.spread, self.shapes, self.start, self.begun = spread, dict(shapes), start, begun
        self.engine, self.folder, self.tracker, self.advance = engine, folder, tracker, advance
        self.facts = facts or {}
        self.first = engine.ranks.rank == 0
        self.journal = Journal(folder, start, validated=begun is None) if self.first else None
        self.saver = Saver(folder / "checkpoints", keep, shapes) if self.first else None
        self.parts = PartsWriter(engine, self.saver) if spread else None
        self.last: Snapshot | None = None
        self.best = self._read_best(start)

    def stepped(self, done: int, numbers: dict[str, float], timing: dict[str, float]) -> None:
        if self.journal is None:
            return
        self.journal.write(METRICS, {"step": done, "split": "train", **numbers})
        self.journal.write(TIMINGS, {"step": done, **timing})
        if self.tracker is not None:
            named = {f"train/{name}": value for name, value in {**numbers, **timing}.items()}
            self.tracker.metrics(named, step=done)
        if self.advance is not None:
            shown = {name: numbers[name] for name in _SHOWN if name in numbers}
            self.advance(1, **shown, tokens_per_second=round(timing["tokens_per_second"]))

    def validated(self, done: int, numbers: dict[str, float]) -> None:
        if self.journal is not None:
            self.journal.write(METRICS, {"step": done, "split": "validation", **numbers})
            if self.tracker is not None:
                named = {f"validation/{name}": value for name, value in numbers.items()}
                self.tracker.metrics(named, step=done)
        if numbers["loss"] < self.best.get("loss", float("inf")):
            self.best = {"step": done, "loss": numbers["loss"]}
            if self.parts is not None:
                self.parts.wait()  # on every rank: what one of them met in the save before ends all here
            snapshot = self._snapshot(done)
            if self.saver is not None:
                self.saver.submit_best(snapshot, self.best)

    def save(self, done: int, begun: Begun | None = None) -> None:
        validation = None if begun is None else asdict(begun)
        if done == self.start:  # the step this run began with: its checkpoint stands
            if self.saver is not None:
                self.saver.amend(done, validation=validation)
        elif self.parts is not None:
            facts = {"format": FORMAT, "shapes": self.shapes, **self._facts(done), "validation": validation}
            self.parts.submit(folder_of(self.folder / "checkpoints", done), facts)
        else:
            self.last = self._snapshot(done)
            self.last.facts["validation"] = validation
            if self.saver is not None:
                self.saver.submit(self.last)

    def flush(self) -> None:
        """Until nothing is being written; raises what the last save raised."""
        writer = self.parts or self.saver
        if writer is not None:
            writer.wait()

    def _snapshot(self, done: int) -> Snapshot:
        """The state after `done` steps; a collective."""
        if self.last is not None and self.last.step == done:
            return self.last
        snapshot = gather(self.engine, () if self.spread else MOMENTS)
        snapshot.facts = self._facts(done)
        return snapshot

    def _facts(self, done: int) -> dict[str, Any]:
        random = self.engine.ranks.gather(random_state())
        return {**self.facts, "step": done, "engine": self.engine.ranks.engine, "random": random}

    def _read_best(self, start: int) -> dict[str, Any]:
        path = self.folder / "checkpoints" / "best" / "best.json"
        found = self.engine.ranks.first(read_json(path) if self.first and path.exists() else {})
        return dict(found) if found.get("step", 0) <= start else {}

    def close(self) -> None:
        """Finish writing; raises what the last save raised."""
        if self.journal is not None:
            self.journal.close()
        writer = self.parts or self.saver
        if writer is not None:
            writer.close()


def publish(folder: Path, write: Callable[[Path], None]) -> None:
    """Make `folder` whole: `write` fills a temporary one."""
    with atomic_path(folder) as temporary:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        write(temporary)
