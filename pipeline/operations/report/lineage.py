"""The sections about where results come from: stages and their links, neighbours, versions, settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline import usage
from pipeline.artifact import Artifact, digest
from pipeline.chain import STAGES
from pipeline.config import Config, dump
from pipeline.operations.report.page import Cell, Fold, Note, Table
from pipeline.operations.report.story import Parts, Story
from pipeline.tracking import redact_text
from pipeline.tracking.journal import Sent
from pipeline.tracking.places import reuse_folder, store_uri


def lineage(story: Story) -> Parts:
    """Every stage with its fingerprint, inputs, folder and MLflow run."""
    rows: list[list[Cell]] = []
    for name, artifact in story.chain.items():
        inputs = ", ".join(f"{source} {mark}" for source, mark in artifact.request["inputs"].items())
        inputs = inputs or ("sources" if "sources" in artifact.request else "target")
        state = story.states[name]["state"]
        rows.append([
            name, artifact.fingerprint, state, inputs, _output(story, name), _run(story.config, artifact),
            story.link(artifact.path),
        ])  # fmt: skip
    yield Table(["stage", "fingerprint", "state", "made from", "output", "MLflow run", "folder"], rows)
    yield Note(
        f"Work directory {story.config.work_dir.absolute()}, tracking store {redact_text(store_uri(story.config))}."
    )
    sources = story.chain["data"].request.get("sources", [])
    yield Table(["source", "identity"], [[str(place), str(source)] for place, source in enumerate(sources)], "Sources")
    if neighbours := list(_neighbours(story)):
        yield Table(["experiment", "shares"], neighbours, "Other experiments on these artifacts")


def _output(story: Story, stage: str) -> str:
    manifest = story.manifest(stage)
    if manifest is None:
        return story.states[stage]["note"]
    size = sum(fact["bytes"] for fact in [*manifest["shards"], *manifest["files"]])
    return f"{len(manifest['shards'])} shards, {len(manifest['files'])} files, {size / 1e6:,.1f} MB"


def _run(config: Config, artifact: Artifact) -> str:
    """Id of the MLflow run that shows this artifact in this experiment."""
    for folder in (reuse_folder(config, artifact), artifact.path / "tracking"):
        if run_id := Sent(folder, digest(store_uri(config))).facts.get("run_id"):
            return str(run_id)
    return "–"


def _neighbours(story: Story) -> Iterator[list[Cell]]:
    """Experiments of the work directory that link to the same artifacts."""
    for folder in sorted(story.folder.parent.iterdir() if story.folder.parent.exists() else ()):
        if folder.name == story.config.experiment or not folder.is_dir():
            continue
        shared = [
            name for name in STAGES if name in story.chain and _goal(folder / name) == _goal(story.chain[name].path)
        ]
        if shared:
            report = folder / "report.html"
            yield [story.link(report if report.exists() else folder, folder.name), ", ".join(shared)]


def _goal(path: Path) -> Path:
    return path.resolve()


def environment(story: Story) -> Parts:
    """Versions and code revision of every finished stage, and what each cost."""
    found: dict[str, Any] = {name: m for name in story.chain if (m := story.manifest(name)) is not None}
    if not found:
        yield Note("No stage is finished.", "missing")
        return
    names = list(dict.fromkeys(name for manifest in found.values() for name in manifest["versions"]))
    rows = [
        [stage, str(manifest["git_revision"] or "–"), *(manifest["versions"].get(name, "–") for name in names)]
        for stage, manifest in found.items()
    ]
    yield Table(["stage", "revision", *names], rows, "Versions")
    costs = [[name, *cost] for name, artifact in story.chain.items() if (cost := _cost(artifact.path))]
    if costs:
        yield Table(
            ["stage", "attempts", "wall s", "CPU s", "peak memory GB"], costs, "What each stage cost, all ranks"
        )


def _cost(folder: Path) -> list[str]:
    lines = usage.read(folder)
    if not lines:
        return []
    attempts = sum(line["rank"] == 0 for line in lines)
    wall = sum(line["wall_seconds"] for line in lines if line["rank"] == 0)
    cpu, peak = sum(line["cpu_seconds"] for line in lines), max(line["peak_memory_bytes"] for line in lines)
    return [str(attempts), f"{wall:,.1f}", f"{cpu:,.1f}", f"{peak / 1e9:,.2f}"]


def settings(story: Story) -> Parts:
    yield Fold("The whole configuration, defaults included", redact_text(dump(story.config)))
