"""The stage table: what each stage reads, and the fingerprints that follow. Imports no torch.

A fingerprint hashes the *result* fields of the sections a stage declares, the fingerprints of its inputs, the target's
identity where the stage touches the target, and the format version. So equal configuration finds the existing artifact
(also of another experiment), and a changed one gets a folder of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.artifact import FORMAT, Artifact
from pipeline.config import Config, Section, result_fields
from pipeline.errors import ConfigError
from pipeline.identity import (
    Hashes,
    prompt_sets_identity,
    recorded_files,
    source_identity,
    target_folder,
    target_identity,
)

Names = tuple[str, ...]


@dataclass(frozen=True)
class Stage:
    """One row of the table. `ranks` says who works: every rank on its share of shards, all together, or rank 0.

    `computes`: it runs a model here. The other stages work on text, ask a server or copy weights, where no GPU is.
    """

    name: str
    reads: Names
    inputs: Callable[[Config], Names]
    target: bool = False
    ranks: str = "first"
    also: Callable[[Config], dict[str, Any]] = field(default=lambda config: {})
    computes: Callable[[Config], bool] = field(default=lambda config: False)


def _corpus(config: Config) -> Names:
    return ("answers",) if config.answers.enabled else ("data",)


def _teacher(config: Config) -> Names:
    if config.train.published is not None:
        return ()
    return ("tokens",) if config.targets.mode == "live" else ("targets",)


def _together(*parts: Callable[[Config], dict[str, Any]]) -> Callable[[Config], dict[str, Any]]:
    """What all parts find. Raises ConfigError with the problems of every one of them."""

    def found(config: Config) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        problems: list[str] = []
        for part in parts:
            try:
                facts.update(part(config))
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(problems)
        return facts

    return found


def _sources(config: Config) -> dict[str, Any]:
    problems: list[str] = []
    found = []
    for index, source in enumerate(config.data.sources):
        try:
            found.append(source_identity(config, source))
        except ConfigError as error:
            problems += [f"data.sources.{index}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return {"sources": found}


def _forbidden_sets(config: Config) -> dict[str, Any]:
    names = config.data.decontaminate.prompt_sets if config.data.decontaminate else ()
    sets = prompt_sets_identity(config, names, setting="data.decontaminate.prompt_sets")
    return {key: value for key, value in sets.items() if value}


def _template_file(config: Config) -> dict[str, Any]:
    path = config.template.chat_template
    if path is None:
        return {}
    if not Path(path).is_file():
        raise ConfigError(f"template.chat_template: {path}: no such file")
    return {"chat_template": Hashes(config.work_dir).file(Path(path))}


def _live(config: Config) -> dict[str, Any]:
    if config.targets.mode != "live":
        return {}
    return {"live": {"layers": config.targets.layers, "dtype": config.targets.dtype}}


def _checkpoints(config: Config) -> dict[str, Any]:
    """Content of the checkpoints training starts from or stands back for: the same path may hold another one later."""
    found: dict[str, Any] = {}
    for key in ("init_from", "published"):
        path = getattr(config.train, key)
        if path is not None:
            folder, hashes = Path(path), Hashes(config.work_dir)
            files = sorted([*folder.glob("*.safetensors"), *folder.glob("config.json"), *folder.glob("draft.json")])
            if not files:
                raise ConfigError(f"train.{key}: {path}: no such checkpoint folder (config.json or draft.json)")
            found[key] = {file.name: hashes.file(file) for file in files}
    return found


def _prompt_sets(config: Config) -> dict[str, Any]:
    sets = prompt_sets_identity(config, config.evaluate.prompt_sets, setting="evaluate.prompt_sets", heldout=True)
    return sets if sets["benchmarks"] else {"prompt_files": sets["prompt_files"]}


def _calibration_sets(config: Config) -> dict[str, Any]:
    """Content and order of the sets, wherever their files lie; nothing where the chain's own split is used."""
    names = config.calibrate.prompt_sets
    if names is None:
        return {}
    sets = prompt_sets_identity(config, names, setting="calibrate.prompt_sets", heldout=True)
    return {"prompts": {**sets, "order": [Path(name).name for name in names]}}


def _server(config: Config) -> dict[str, Any]:
    """What a server was seen to do says nothing about this process, nor about another server."""
    return {} if config.profile.endpoint is None else {"endpoint": config.profile.endpoint}


def _recorded(config: Config) -> dict[str, Any]:
    if config.calibrate.records is None:
        return {}
    hashes = Hashes(config.work_dir)
    return {"records": [hashes.file(path) for path in recorded_files(config.calibrate.records)]}


STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage("data", ("data", "seed"), lambda config: (), ranks="shards", also=_together(_sources, _forbidden_sets)),
        Stage(
            "answers",
            ("answers", "template", "seed"),
            lambda config: ("data",),
            True,
            "shards",
            also=_template_file,
            computes=lambda config: config.answers.backend == "local",
        ),
        Stage("tokens", ("tokens", "template"), _corpus, True, "shards", also=_template_file),
        Stage("targets", ("targets",), lambda config: ("tokens",), True, "shards", computes=lambda config: True),
        Stage(
            "train",
            ("draft", "train", "seed"),
            _teacher,
            True,
            "all",
            also=_together(_live, _checkpoints),
            computes=lambda config: True,
        ),
        Stage(
            "calibrate",
            ("calibrate", "template", "seed"),
            lambda config: ("train", "data"),
            True,
            "shards",
            also=_together(_template_file, _recorded, _calibration_sets),
            computes=lambda config: config.calibrate.records is None,
        ),
        Stage(
            "profile",
            ("profile",),
            lambda config: (),
            True,
            also=_server,
            computes=lambda config: config.profile.synthetic is None and config.profile.endpoint is None,
        ),
        Stage(
            "evaluate",
            ("evaluate", "template", "seed"),
            lambda config: ("train", "data", "calibrate", "profile"),
            True,
            "shards",
            also=_together(_template_file, _prompt_sets),
            computes=lambda config: True,
        ),
        Stage("export", ("export",), lambda config: ("train", "calibrate", "profile", "evaluate"), True),
    )
}


def active(config: Config) -> list[str]:
    """Stages this configuration runs, in order."""
    off = set()
    if not config.answers.enabled:
        off.add("answers")
    if config.targets.mode == "live":
        off.add("targets")
    if config.train.published is not None:
        off |= {"answers", "tokens", "targets"}
    if not config.export.layouts:
        off.add("export")
    return [name for name in STAGES if name not in off]


def resolve(config: Config) -> dict[str, Artifact]:
    """Every active stage's artifact, finished or not. Raises ConfigError when an input cannot be identified."""
    problems: list[str] = []
    target: dict[str, Any] | None = None
    extras: dict[str, dict[str, Any]] = {}
    try:
        target = target_identity(config)
    except ConfigError as error:
        problems += error.problems
    for name in active(config):
        try:
            extras[name] = STAGES[name].also(config)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    chain: dict[str, Artifact] = {}
    for name in active(config):
        stage = STAGES[name]
        request = {
            "stage": name,
            "format": FORMAT,
            "config": {section: _read(config, section) for section in stage.reads},
            "inputs": {source: chain[source].fingerprint for source in stage.inputs(config)},
            "target": target if stage.target else None,
            **extras[name],
        }
        chain[name] = Artifact(config.work_dir, name, request)
    return chain


def finished_cache(config: Config) -> Artifact:
    """The `targets` artifact this configuration would have with `targets.mode: cached`."""
    targets = config.targets.model_copy(update={"mode": "cached"})
    return resolve(config.model_copy(update={"targets": targets}))["targets"]


def _read(config: Config, section: str) -> Any:
    value = getattr(config, section)
    return result_fields(value) if isinstance(value, Section) else value


# ------------------------------------------------------------------------------------------------ work split


def array_share() -> tuple[int, int]:
    """(index, count) of this process among all that share the work: array tasks times ranks."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    index, _, count = os.environ.get("DSPARK_ARRAY", "0/1").partition("/")
    return int(index) * world + rank, int(count) * world


def share(names: Sequence[str]) -> list[str]:
    """This process's part of the units of work: every count-th, without locks.

    Give it all units and take what is missing of the result: processes that start at different times see different
    units missing, and must agree on whose each one is.
    """
    index, count = array_share()
    return list(names[index::count])


@dataclass(frozen=True)
class StageContext:
    """What a stage's `run` receives."""

    config: Config
    artifact: Artifact
    inputs: dict[str, Artifact]
    tracker: Any
    chain: dict[str, Artifact]

    @property
    def target_path(self) -> str:
        """Local folder or hub id of the target."""
        return target_folder(self.config)
