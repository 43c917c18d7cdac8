"""One configuration's artifacts as the report reads them: what is finished, what is not, and why."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.artifact import Artifact, read_json
from pipeline.chain import STAGES
from pipeline.config import Config
from pipeline.operations.report.page import Figure, Link, Note, Part
from pipeline.operations.status import describe


@dataclass(frozen=True)
class Story:
    config: Config
    chain: Mapping[str, Artifact]

    @property
    def folder(self) -> Path:
        """Where the report lies; links are relative to it."""
        return self.config.work_dir / "runs" / self.config.experiment

    @cached_property
    def states(self) -> dict[str, dict[str, Any]]:
        """`dspark status` of every stage."""
        return {name: describe(artifact) for name, artifact in self.chain.items()}

    def manifest(self, stage: str) -> dict[str, Any] | None:
        """A finished stage's manifest. Raises ArtifactError when it is damaged."""
        return self.chain[stage].manifest() if stage in self.chain and self.chain[stage].complete else None

    def read(self, stage: str, name: str) -> Any:
        return read_json(self.chain[stage].path / name)

    def missing(self, stage: str) -> Note:
        """Why there is nothing to show."""
        if stage not in self.chain:
            return Note(f"Stage {stage} is off in this configuration.", "missing")
        state = self.states[stage]
        return Note(f"Nothing to show yet: stage {stage} is {state['state']} ({state['note']}).", "missing")

    def figures(self, stage: str, captions: Mapping[str, str]) -> Iterator[Figure]:
        """Pictures a stage left in its folder, in the order of `captions`: name without .png -> caption."""
        for name, caption in captions.items():
            path = self.chain[stage].path / "plots" / f"{name}.png"
            if path.exists():
                yield Figure.of(path, caption)

    def link(self, path: Path, text: str = "") -> Link:
        """A file or folder, relative to the report."""
        return Link(text or self.short(path), os.path.relpath(path.absolute(), self.folder.absolute()))

    def short(self, path: Path) -> str:
        """A path as people know it: below the work directory where it is."""
        full, home = path.absolute(), self.config.work_dir.absolute()
        return str(full.relative_to(home)) if full.is_relative_to(home) else str(full)


def flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """(dotted name, value as text) of nested settings; what is not set is left out."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flat(item, f"{name}.{key}" if name else str(key))
    elif value is not None:
        yield name, ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def reasons(counts: Mapping[str, int]) -> str:
    """Skip counts, largest first; a dash where nothing was left out."""
    order = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} {count:,}" for name, count in order) or "–"


def in_order(stages: Sequence[str]) -> list[str]:
    return [name for name in STAGES if name in stages]


Parts = Iterator[Part]
