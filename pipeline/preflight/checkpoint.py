"""The checkpoint that `train.published` takes as it is, or `train.init_from` starts from: what its description tells.

It is compared again, tensor by tensor, where it is loaded; but that is after the targets are built.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.architecture import activation_of
from pipeline.artifact import read_json
from pipeline.config import Config
from pipeline.draft.config import BLOCK_KINDS, DraftConfig
from pipeline.draft.description import DESCRIPTION, read_description, unfit
from pipeline.errors import ArtifactError, ConfigError
from pipeline.layouts.read_config import read_config
from pipeline.preflight.drafter import default_layers
from pipeline.preflight.facts import TargetFacts


def problems(config: Config, facts: TargetFacts) -> Iterator[str]:
    """What of a checkpoint's own description does not go with the target, nor with the drafter that starts from it."""
    for setting in ("published", "init_from"):
        named = getattr(config.train, setting)
        if named is None or not any((Path(named) / name).exists() for name in (DESCRIPTION, "config.json")):
            continue  # a folder without either is told by the stage table
        try:
            found = _description(Path(named), facts)
        except ArtifactError as error:
            yield f"train.{setting}: {error}"
            continue
        differing = unfit(found, facts.text)
        if setting == "init_from":
            differing += _other_drafter(found, config, facts)
        yield from (f"train.{setting}: {named}: {problem}" for problem in differing)


def _description(folder: Path, facts: TargetFacts) -> DraftConfig:
    if (folder / DESCRIPTION).exists():
        return read_description(folder)[0]
    path = folder / "config.json"
    return read_config(read_json(path, ours=False), where=str(path), target=facts.text).config


def _other_drafter(have: DraftConfig, config: Config, facts: TargetFacts) -> Iterator[str]:
    """Settings under which the checkpoint's weights would mean something else."""
    draft, text = config.draft, facts.text
    tapped = config.targets.layers
    with contextlib.suppress(ConfigError):  # too shallow for default layers, which is told elsewhere
        tapped = tapped or default_layers(facts.num_layers)
    wanted: dict[str, Any] = {
        "layout": draft.layout,
        "layers": draft.layers,
        "taps": draft.taps,
        "target_layer_ids": tapped,
        "intermediate_size": draft.intermediate_size or text.get("intermediate_size"),
        "heads": draft.heads or text.get("num_attention_heads"),
        "kv_heads": draft.kv_heads or text.get("num_key_value_heads"),
        "activation": draft.activation or activation_of(text),
    }
    if not {have.kind, draft.kind} <= set(BLOCK_KINDS):
        wanted["kind"] = draft.kind
    for name, value in wanted.items():
        if value is not None and getattr(have, name) != value:
            yield f"{name}: {getattr(have, name)!r} in the checkpoint, {value!r} here"
