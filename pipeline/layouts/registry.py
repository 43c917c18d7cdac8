"""What a model registry is told about an export. The tracker calls this; nothing here knows MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.artifact import read_json
from pipeline.layouts import files


@dataclass(frozen=True)
class ModelEntry:
    """A registered model version: `folder` holds the files, `description` the card's text, `tags` plain strings."""

    name: str
    folder: Path
    description: str
    tags: Mapping[str, str]


def model_entry(folder: str | Path, *, name: str, lineage: Mapping[str, str]) -> ModelEntry:
    """The registry entry of one published folder.

    Args:
        name: of the registered model, e.g. the experiment's.
        lineage: stage -> fingerprint; becomes tags, so that a version leads back to its run.
    Raises:
        ArtifactError: the folder is no unchanged export.
    """
    folder = Path(folder)
    files.check_hashes(folder)
    manifest: dict[str, Any] = read_json(folder / files.HASHES)
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    if text.startswith("---\n"):
        text = text.split("\n---\n", 1)[1].lstrip()
    tags = {"layout": str(manifest["layout"]), "bytes": str(manifest["bytes"]), "tensors": str(manifest["tensors"])}
    tags |= {f"artifact.{stage}": fingerprint for stage, fingerprint in lineage.items()}
    return ModelEntry(name, folder, text, tags)
