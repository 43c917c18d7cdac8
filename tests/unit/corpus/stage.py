"""Runs data, answers and tokens in this process, on files a test has made."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline import chain, config
from pipeline.artifact import Artifact
from pipeline.config import Config


class Recorder:
    """A tracker that remembers what it was given."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.numbers: dict[str, float] = {}

    def file(self, path: Path, folder: str = "") -> None:
        self.files.append(Path(path).name)

    def metrics(self, values: dict[str, float], step: int | None = None) -> None:
        self.numbers.update(values)

    def params(self, values: dict[str, Any]) -> None: ...

    def tags(self, values: dict[str, Any]) -> None: ...


def make_config(work_dir: Path, **sections: Any) -> Config:
    """A validated config over the tiny target; `sections` replace or extend the defaults."""
    tree: dict[str, Any] = {"work_dir": str(work_dir), "target": {"tiny": {"train_steps": 0}}, **sections}
    return config.validate(tree)


def run_stage(made: Config, name: str, tracker: Recorder | None = None) -> Artifact:
    """Run one stage; its inputs must have been run."""
    artifacts = chain.resolve(made)
    artifact = artifacts[name]
    artifact.create()
    inputs = {source: artifacts[source] for source in chain.STAGES[name].inputs(made)}
    context = chain.StageContext(made, artifact, inputs, tracker or Recorder(), artifacts)
    importlib.import_module(f"pipeline.stages.{name}").run(context)
    return artifact


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def rows_of(artifact: Artifact, split: str = "train") -> list[dict[str, Any]]:
    """Rows of all text shards of a split, as plain data."""
    names = [fact["file"] for fact in artifact.manifest()["shards"] if fact["file"].startswith(split)]
    return [json.loads(line) for name in names for line in (artifact.path / name).read_bytes().splitlines()]


def listing_of(artifact: Artifact) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (artifact.path / "skipped.jsonl").read_text().splitlines()]


def shard_hashes(artifact: Artifact) -> dict[str, str]:
    return {fact["file"]: fact["sha256"] for fact in artifact.manifest()["shards"]}


def chat(*turns: str, source: str | None = None) -> dict[str, Any]:
    """A ShareGPT row of alternating turns."""
    speakers = ("human", "gpt")
    row: dict[str, Any] = {"conversations": [{"from": speakers[n % 2], "value": text} for n, text in enumerate(turns)]}
    return {**row, "source": source} if source else row
