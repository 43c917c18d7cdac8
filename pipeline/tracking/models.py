"""An exported folder as a version of a registered model.

The version's source is the run's own artifact folder, the only place every store accepts. Files that are too large to
be sent twice stay where they are: the version's tags say which (`left_out`) and where (`folder`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.progress import say
from pipeline.tracking.redact import redact_text

MAX_FILE_BYTES = 50_000_000
_DESCRIPTION_LENGTH = 5000  # of the column in MLflow's own databases
_REST = "\n\n… (the whole card is README.md)"
# What a store answers that has no registry, or none for us. Anything else may pass and is tried again.
_NO_REGISTRY = {
    "BAD_REQUEST", "ENDPOINT_NOT_FOUND", "FEATURE_DISABLED", "INVALID_PARAMETER_VALUE", "NOT_IMPLEMENTED",
    "PERMISSION_DENIED",
}  # fmt: skip


def register(client: Any, run_id: str, model: Mapping[str, Any]) -> None:
    """Send a folder's files to the run and make its version, unless an earlier call has made it.

    Args:
        model: its `name`, and the version's `folder`, `description` and `tags`.
    """
    name, folder = model["name"], Path(model["folder"])
    if not folder.is_dir():
        say(f"tracking: {folder} was gone before it could be registered as a version of {name}", warning=True)
        return
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    large = [path for path in files if path.stat().st_size > MAX_FILE_BYTES]
    for path in files:
        if path not in large:
            place = (folder.name / path.relative_to(folder)).parent.as_posix()
            client.log_artifact(run_id, str(path), place)
    left_out = {"left_out": ", ".join(path.name for path in large)} if large else {}
    try:
        _make_version(client, run_id, model, {**model["tags"], "folder": str(folder), **left_out})
    except Exception as error:
        if getattr(error, "error_code", "") not in _NO_REGISTRY:
            raise
        reason = redact_text(str(error))[:300]
        say(f"tracking: no version of model {name} was registered ({reason}); it lies in {folder}", warning=True)


def _make_version(client: Any, run_id: str, model: Mapping[str, Any], tags: Mapping[str, str]) -> None:
    name = model["name"]
    source = f"{client.get_run(run_id).info.artifact_uri}/{Path(model['folder']).name}"
    made = client.search_model_versions(f"run_id = '{run_id}'")
    if any((version.name, version.source) == (name, source) for version in made):
        return
    try:
        client.create_registered_model(name)
    except Exception as error:
        if getattr(error, "error_code", "") != "RESOURCE_ALREADY_EXISTS":
            raise
    text = model["description"]
    if len(text) > _DESCRIPTION_LENGTH:
        text = text[: _DESCRIPTION_LENGTH - len(_REST)] + _REST
    client.create_model_version(name, source, run_id, tags=dict(tags), description=text, await_creation_for=0)
