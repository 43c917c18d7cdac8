"""Our own checkpoint of a drafter: `draft.safetensors` and `draft.json`, read back strictly.

    save_drafter(folder, drafter, {"template": {...}, "target": {...}})
    drafter, meta = load_drafter(folder)

The tensors are the drafter's own parameters in fp32 and, under a draft vocabulary, its tables `d2t` and `t2d` (S30): a
drafter without its tables would take draft ids for target ids. The target's embedding and head are not in the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.draft.build import empty_drafter
from pipeline.draft.config import DraftConfig
from pipeline.draft.description import DESCRIPTION, FORMAT, LAYER_CONVENTION, read_description
from pipeline.draft.interface import Drafter
from pipeline.errors import ArtifactError

__all__ = [
    "DESCRIPTION",
    "TENSORS",
    "check_tensors",
    "drafter_from_tensors",
    "load_drafter",
    "read_description",
    "save_drafter",
]

TENSORS = "draft.safetensors"


def save_drafter(
    folder: str | Path, drafter: Drafter, meta: Mapping[str, Any], *, tensors: Mapping[str, Tensor] | None = None
) -> None:
    """Write a drafter into an existing folder.

    `meta` (plain data: template, target identity, …) is returned by `load_drafter`. `tensors` replaces the drafter's
    own state where its parameters are spread over ranks.
    """
    folder = Path(folder)
    state = drafter.state_dict() if tensors is None else tensors
    stored = {name: _stored(value) for name, value in sorted(state.items())}
    check_tensors(drafter, stored, where=str(folder))
    save_file(stored, str(folder / TENSORS))
    description = {
        "format": FORMAT,
        "config": drafter.config.to_dict(),
        "layer_convention": LAYER_CONVENTION,
        "meta": dict(meta),
    }
    text = json.dumps(description, indent=2, sort_keys=True, ensure_ascii=False)
    (folder / DESCRIPTION).write_text(text + "\n", encoding="utf-8")


def _stored(value: Tensor) -> Tensor:
    value = value.detach().to("cpu")
    return (value.float() if value.is_floating_point() else value).contiguous()


def load_drafter(folder: str | Path) -> tuple[Drafter, dict[str, Any]]:
    """(drafter on the CPU in fp32, meta).

    Raises ArtifactError naming every missing, unexpected and misshapen tensor, an unreadable file, an unknown format or
    layer convention, and anything wrong in the configuration, an unknown or missing layout included (S1).
    """
    folder = Path(folder)
    config, meta = read_description(folder)
    try:
        tensors = load_file(str(folder / TENSORS))
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{folder / TENSORS}: cannot be read ({error})") from error
    return drafter_from_tensors(config, tensors, where=str(folder / TENSORS)), meta


def drafter_from_tensors(config: DraftConfig, tensors: Mapping[str, Tensor], *, where: str) -> Drafter:
    """A drafter in fp32 holding exactly `tensors`. Raises ArtifactError as `load_drafter` does."""
    token_ids = None
    if config.draft_vocab_size is not None and "d2t" in tensors:
        token_ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    elif config.draft_vocab_size is not None:
        raise ArtifactError(f"{where}: missing d2t: without its table, draft ids would be taken for target ids (S30)")
    try:
        drafter = empty_drafter(config, token_ids)
    except ValueError as error:
        raise ArtifactError(f"{where}: d2t: {error}") from error
    check_tensors(drafter, tensors, where=where)
    if drafter.t2d is not None and not torch.equal(drafter.t2d, tensors["t2d"]):
        raise ArtifactError(f"{where}: t2d does not mark the tokens that d2t names (S30)")
    drafter.load_state_dict({name: _stored(value) for name, value in tensors.items()}, strict=True)
    return drafter


def check_tensors(drafter: Drafter, tensors: Mapping[str, Tensor], *, where: str) -> None:
    """Raise ArtifactError unless `tensors` are exactly the drafter's, by name and shape."""
    wanted = {name: tuple(value.shape) for name, value in drafter.state_dict().items()}
    problems = [f"missing {name} {wanted[name]}" for name in sorted(wanted.keys() - tensors.keys())]
    problems += [f"unexpected {name} {tuple(tensors[name].shape)}" for name in sorted(tensors.keys() - wanted.keys())]
    problems += [
        f"{name} has shape {tuple(tensors[name].shape)}, {shape} is expected"
        for name, shape in sorted(wanted.items())
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    if problems:
        raise ArtifactError(f"{where}: these tensors do not fit the drafter:\n  " + "\n  ".join(problems))
