"""One run of the train stage: opens everything, hands the loop its pieces, publishes the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pipeline.chain import StageContext
from pipeline.config import Config
from pipeline.distributed import Ranks
from pipeline.draft.interface import Drafter
from pipeline.draft.io import DESCRIPTION, TENSORS, save_drafter
from pipeline.frozen import Frozen, load_frozen
from pipeline.progress import say
from pipeline.speculative.weights import describe
from pipeline.training import checkpoint, setup
from pipeline.training.batches import Schedule
from pipeline.training.checkpoint import restore_random
from pipeline.training.journal import METRICS
from pipeline.training.loader import Reader
from pipeline.training.loop import Run
from pipeline.training.objective import Objective
from pipeline.training.optimizer import LearningRate, adamw
from pipeline.training.plots import draw
from pipeline.training.recentre import bias_step, recentred
from pipeline.training.recorder import Recorder, publish
from pipeline.training.resume import Point, check_frozen, find
from pipeline.training.rows import CachedRows, Split
from pipeline.training.sources import Source
from pipeline.training.state import Snapshot, load_moments, load_weights, shapes
from pipeline.training.terms import Terms


@dataclass
class Session:
    """What `open` found and made, the same on every rank."""

    context: StageContext
    ranks: Ranks
    rows: CachedRows
    split: Split
    point: Point
    drafter: Drafter
    frozen: Frozen
    coverage: float | None
    notes: list[str]

    @property
    def config(self) -> Config:
        return self.context.config

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.split.count, self.config.train.global_batch_size, self.split.order)

    @property
    def total(self) -> int:
        """Optimizer steps of the whole run; epochs are planned with their ragged last step."""
        train = self.config.train
        return train.steps or train.epochs * self.schedule.steps_per_epoch

    @classmethod
    def open(cls, context: StageContext, ranks: Ranks, reader: Source) -> Session:
        """Read what training needs, check it, and build the drafter as it starts or as it was saved."""
        config = context.config
        dtype = getattr(torch, config.train.precision)
        split = Split(reader.index, config.train.validation_fraction, config.seed)
        setup.check_rows(split, len(reader))
        rows = CachedRows(reader, dtype, ranks.device)
        point = find(context.artifact, config, ranks)
        frozen = load_frozen(
            str(context.target_path),
            revision=config.target.revision,
            trust_remote_code=config.target.trust_remote_code,
            dtype=dtype,
            device=ranks.device,
        )
        check_frozen(point, setup.frozen_digest(frozen))
        tokens = context.chain["tokens"].manifest()
        words = None
        if config.draft.vocabulary is not None and (point.folder is None or point.first == point.start):
            words = setup.draft_vocabulary(config.draft, rows, split, tokens, reader.spec.vocab_size)
        token_ids = point.token_ids if point.token_ids is not None else None if words is None else words.token_ids
        drafter, notes = setup.make_drafter(context, tuple(reader.summary["layers"]), token_ids)
        if words is not None and token_ids is not None and not torch.equal(words.token_ids, token_ids):
            fresh = len(set(words.token_ids.tolist()) - set(token_ids.tolist()))
            notes.append(f"the draft vocabulary is the checkpoint's; {fresh} tokens of today's rows would differ")
        coverage = words.coverage if words is not None else point.fact("coverage")
        return cls(context, ranks, rows, split, point, drafter, frozen, coverage, notes)

    def summary(self) -> list[str]:
        """What a person should see before the first step."""
        train, ranks, schedule = self.config.train, self.ranks, self.schedule
        weights = sum(parameter.numel() for parameter in self.drafter.parameters())
        lines = [
            f"train: {self.drafter.config.kind}, {weights / 1e6:.2f} M weights, {train.precision}, "
            f"{ranks.engine} on {ranks.world} rank(s), {ranks.device}",
            f"train: {self.split.count} rows ({len(self.split.validation)} held out), {self.total} steps, "
            f"{schedule.steps_per_epoch} an epoch; gradients clipped at {train.max_grad_norm:g}",
            f"train: slot weights {describe(self.config.draft.block_size, train.position_decay)}",
        ]
        if self.coverage is not None:
            lines.append(f"train: draft vocabulary covers {self.coverage:.1%} of the supervised tokens")
        if self.point.snapshot is not None:
            lines.append(f"train: goes on after step {self.point.start} from {self.point.folder}")
        return [*lines, *(f"train: {note}" for note in self.notes)]

    def prepare(self, advance: Callable[..., None]) -> tuple[Run, Recorder]:
        """Wrap the drafter for the engine, put the saved state into it, and make what the loop needs."""
        config, train, point = self.config, self.config.train, self.point
        dtype = getattr(torch, train.precision)
        reason = self.drafter.configure(
            attention=train.attention,
            device=self.ranks.device,
            compile=train.compile,
            activation_checkpointing=train.activation_checkpointing,
        )
        say(f"train: attention {reason}")
        terms = Terms.of(train)
        objective = Objective(self.drafter, terms, dtype)
        expected = shapes(objective)
        if point.snapshot is not None:
            load_weights(objective, point.snapshot, str(point.folder))
        objective.to(self.ranks.device)
        token_ids = None if self.drafter.rows is None else self.drafter.rows.cpu()
        engine = self.ranks.prepare(objective, adamw(objective, train))
        if point.snapshot is not None:
            load_moments(engine, point.snapshot, point.updates)
        facts = {
            "fingerprint": self.context.artifact.fingerprint,
            "frozen": setup.frozen_digest(self.frozen),
            "first": point.first,
            "token_ids": None if token_ids is None else token_ids.tolist(),
            "coverage": self.coverage,
        }
        recorder = Recorder(
            engine, self.context.artifact.path, start=point.start, keep=train.keep_checkpoints, shapes=expected,
            facts=facts, tracker=self.context.tracker, advance=advance, spread=train.sharded_checkpoints,
            begun=point.begun,
        )  # fmt: skip
        recipe = setup.recipe_of(
            config, self.frozen.vocab_size, token_ids, last_hidden=self.drafter.config.uses_last_hidden
        )
        frozen = setup.frozen_tensors(self.frozen, token_ids)
        run = Run(
            engine=engine, frozen=frozen, schedule=self.schedule, reader=Reader(self.rows, recipe, frozen.head),
            validation=self.split.validation.tolist(), terms=terms,
            rate=LearningRate.of(train, self.total - point.first), events=recorder, start=point.start, stop=self.total,
            first=point.first, dtype=dtype, budget=train.micro_batch_tokens, workers=train.workers,
            validate_every=train.validate_every, save_every=train.save_every, begun=recorder.begun,
        )  # fmt: skip
        return run, recorder

    def restore_random(self) -> None:
        """This rank's random generators as saved, where the run goes on with as many ranks."""
        saved = self.point.fact("random") or []
        if len(saved) == self.ranks.world:
            restore_random(saved[self.ranks.rank])

    def _saved(self) -> Snapshot | None:
        """The newest checkpoint on disk: what a sharded save, or a run that had nothing left to do, ends with."""
        folder = checkpoint.latest(self.context.artifact.path / "checkpoints")
        return None if folder is None else checkpoint.load(folder)

    def publish(self, recorder: Recorder) -> None:
        """Write `draft/`, the curves and the manifest (rank 0, after the last step)."""
        context, artifact = self.context, self.context.artifact
        snapshot = recorder.last or self._saved()
        assert snapshot is not None and snapshot.step == self.total
        moved = bias_step(artifact.path / METRICS, self.total) if self.config.train.recentre_confidence else 0.0
        if moved:
            say(f"train: confidence moved by {moved:+.3f} (logit), to the mean that held-out rows show")
        tables = {name: value for name, value in self.drafter.named_buffers() if name in ("d2t", "t2d")}
        tokens = context.chain["tokens"].manifest()
        meta = {
            "template": tokens["template"],
            "stop_ids": tokens["stop_ids"],
            "target": artifact.request.get("target"),
            "fingerprint": artifact.fingerprint,
            "steps": self.total,
            "coverage": self.coverage,
        }
        write = partial(
            _write_draft, drafter=self.drafter, meta=meta, tensors={**recentred(snapshot.weights, moved), **tables}
        )
        publish(artifact.path / "draft", write)
        plots = draw(artifact.path, artifact.path / "plots")
        for path in plots:
            context.tracker.file(path, "plots")
        context.tracker.file(artifact.path / METRICS, "train")
        files = [f"draft/{TENSORS}", f"draft/{DESCRIPTION}", METRICS]
        artifact.finish(
            files=files, draft=self.drafter.config.to_dict(), steps=self.total, rows=self.split.count,
            validation_rows=len(self.split.validation), template=tokens["template"], coverage=self.coverage,
            best=recorder.best, confidence_moved=moved,
        )  # fmt: skip


def _write_draft(folder: Path, *, drafter: Drafter, meta: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    save_drafter(folder, drafter, meta, tensors=tensors)
