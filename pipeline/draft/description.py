"""What a checkpoint says of its drafter, read without its tensors; and whether that drafter fits a target.

    config, meta = read_description(folder)
    problems = unfit(config, target_config)

Imports no torch: a checkpoint of another target is refused before anything slow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.architecture import rope_parameters
from pipeline.draft.config import DraftConfig
from pipeline.errors import ArtifactError, ConfigError

DESCRIPTION = "draft.json"
FORMAT = 1
LAYER_CONVENTION = "id l is the raw output of decoder layer l (hidden_states[l + 1])"


def read_description(folder: str | Path) -> tuple[DraftConfig, dict[str, Any]]:
    """(config, meta) of our own checkpoint, without its tensors. Raises ArtifactError."""
    path = Path(folder) / DESCRIPTION
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path}: cannot be read ({error})") from error
    if not isinstance(description, Mapping):
        raise ArtifactError(f"{path}: holds a {type(description).__name__}, a mapping expected")
    if description.get("format") != FORMAT:
        raise ArtifactError(f"{path}: format {description.get('format')!r}; this version reads {FORMAT}")
    if description.get("layer_convention") != LAYER_CONVENTION:
        found = description.get("layer_convention")
        raise ArtifactError(f"{path}: layer_convention {found!r} is not {LAYER_CONVENTION!r} (S4)")
    try:
        return DraftConfig.from_dict(description["config"]), dict(description["meta"])
    except (ConfigError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path}: {error}") from error


def unfit(draft: DraftConfig, target: Mapping[str, Any]) -> list[str]:
    """What keeps a drafter from running on a target: vocabulary, width, depth, rotary base.

    What the target's config.json does not say is not compared.
    """
    found = {
        "target_vocab_size": (draft.target_vocab_size, target.get("vocab_size")),
        "hidden_size": (draft.hidden_size, target.get("hidden_size")),
        "target_num_layers": (draft.target_num_layers, target.get("num_hidden_layers")),
        "rope_theta": (draft.rope.get("rope_theta"), rope_parameters(target).get("rope_theta")),
    }
    return [
        f"{name} is {own}, the target has {theirs}"
        for name, (own, theirs) in found.items()
        if theirs is not None and own != theirs
    ]
