"""The sections of a run configuration, field by field. `pipeline.config` loads and validates them.

Every field is marked *result* (it changes what is computed, so it takes part in fingerprints) or *execution* (it only
changes how: ranks, workers, batch shapes, paths). The description of each field is its documentation.

A `max_skip_fraction` is of the second kind: it only decides whether a stage may finish. Raised, the same command goes
on with what was computed; lowered, it is not asked of an artifact that has finished: that one stays in use.

    base.py       what sections are made of                   training.py    targets, draft, train
    corpus.py     target, template, data, answers, tokens     measuring.py   calibrate, profile, evaluate, export
    running.py    tracking, launch                            here           all together, and what must fit between
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from pipeline.schema.base import FIELDS_ONLY, Clash, Natural, Section, execution, result
from pipeline.schema.corpus import (
    Answers,
    Data,
    Decontaminate,
    NearDuplicates,
    Source,
    Target,
    Template,
    TinyTarget,
    Tokens,
)
from pipeline.schema.measuring import Calibrate, Evaluate, Export, Profile
from pipeline.schema.running import Launch, Tracking
from pipeline.schema.training import Draft, Targets, Train

__all__ = [
    "BETWEEN", "FIELDS_ONLY", "Answers", "Calibrate", "Clash", "Config", "Data", "Decontaminate", "Draft", "Evaluate",
    "Export", "Launch", "NearDuplicates", "Profile", "Section", "Source", "Target", "Targets", "Template", "TinyTarget",
    "Tokens", "Tracking", "Train",
]  # fmt: skip


def _one_process(train: Train, launch: Launch) -> Iterator[str]:
    if train.engine == "single" and launch.processes_per_node * launch.nodes > 1:
        yield "train.engine single is one process: leave launch.nodes and launch.processes_per_node at 1"


def _exact_last_hidden(draft: Draft, targets: Targets) -> Iterator[str]:
    if draft.kind in ("mtp", "medusa") and (targets.logits, targets.positions) != ("last_hidden", "all"):
        yield (
            f"draft.kind {draft.kind} reads the exact last hidden state everywhere: "
            "set targets.logits: last_hidden and targets.positions: all"
        )


def _served_model(answers: Answers, target: Target) -> Iterator[str]:
    if answers.enabled and answers.backend == "openai" and answers.model is None and target.model is None:
        yield "answers.model: name the model as the server knows it (target.tiny has no name)"


def _slots(draft: Draft, train: Train, evaluate: Evaluate, tokens: Tokens) -> Iterator[str]:
    if train.published is not None:
        return  # the checkpoint says how long its block is
    slots, length = draft.block_size, evaluate.policy_length or 0
    if slots >= tokens.max_length:
        yield f"draft.block_size: {slots} slots do not fit in rows of tokens.max_length {tokens.max_length}"
    if evaluate.policy == "static_length" and length > slots:
        yield f"evaluate.policy_length: {length} is more than the {slots} slots of draft.block_size"


def _fitted_apart(calibrate: Calibrate, evaluate: Evaluate) -> Iterator[str]:
    measured = {Path(name) for name in evaluate.prompt_sets}
    if both := [name for name in calibrate.prompt_sets or () if Path(name) in measured]:
        yield (
            f"calibrate.prompt_sets: {', '.join(both)} stands in evaluate.prompt_sets, too: scores are fitted on other "
            "prompts than they are measured on"
        )


# What must fit between sections, and which ones: a wrong field silences only the checks of its own section.
BETWEEN: tuple[tuple[tuple[str, ...], Callable[..., Iterator[str]]], ...] = (
    (("train", "launch"), _one_process),
    (("draft", "targets"), _exact_last_hidden),
    (("answers", "target"), _served_model),
    (("draft", "train", "evaluate", "tokens"), _slots),
    (("calibrate", "evaluate"), _fitted_apart),
)


class Config(Section):
    experiment: str = execution("default", "name of the run group", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    work_dir: Path = execution(Path("work"), "everything is written below it")
    seed: Natural = result(0, "of every random choice")
    target: Target = result(doc="the frozen model")
    template: Template = result(Template(), "chat rendering")
    data: Data = result(doc="corpus")
    answers: Answers = result(Answers(), "regenerated answers")
    tokens: Tokens = result(Tokens(), "token ids and loss masks")
    targets: Targets = result(Targets(), "hidden states and distributions")
    draft: Draft = result(Draft(), "the drafter")
    train: Train = result(Train(), "optimisation")
    calibrate: Calibrate = result(Calibrate(), "STS")
    profile: Profile = result(Profile(), "SPS")
    evaluate: Evaluate = result(Evaluate(), "acceptance and speed")
    export: Export = result(Export(), "published checkpoints")
    tracking: Tracking = execution(Tracking(), "MLflow")
    launch: Launch = execution(Launch(), "processes and Slurm")

    def problems(self) -> Iterator[str]:
        for names, check in BETWEEN:
            yield from check(*(getattr(self, name) for name in names))
