"""Read a published drafter, ours or anybody's, strictly; start a training from one.

    drafter, meta = load_published("z-lab-folder", target=target_config)
    notes = start_from("folder", drafter)

Engines load what they find and ignore what they miss. Here every missing, unexpected and misshapen tensor is named, the
rotary base is compared with the target's, and a folder that carries its hash list must still match it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.artifact import read_json
from pipeline.draft.config import DraftConfig
from pipeline.draft.interface import Drafter
from pipeline.draft.io import DESCRIPTION, drafter_from_tensors, load_drafter
from pipeline.errors import ArtifactError
from pipeline.layouts import files
from pipeline.layouts.config_json import OWN
from pipeline.layouts.read_config import read_config, rope_problems
from pipeline.layouts.table import list_problems, table
from pipeline.layouts.tensors import from_layout


def load_published(
    folder: str | Path, *, target: Mapping[str, Any] | None = None, check: bool = True
) -> tuple[Drafter, dict[str, Any]]:
    """(drafter in fp32 on the CPU, meta) from a folder of any layout.

    Args:
        target: the target's config.json; the drafter's rotary parameters must be its (S5), in either config form. It
            also supplies what a layout may leave out (the number of target layers).
        check: compare the folder with its hash list, when it has one.
    Returns:
        meta: what the run that exported it knew (template, target identity; empty for foreign files), and `layout`.
    Raises:
        ArtifactError: everything that is wrong, by name.
    """
    folder = Path(folder)
    if check:
        files.check_hashes(folder)
    path = folder / "config.json"
    data = read_json(path, ours=False)
    reading = read_config(data, where=str(path), target=target)
    problems = [f"{path}: {item}" for item in rope_problems(reading.config.rope, target)] if target else []
    found = files.read_tensors(folder)
    entries = table(
        reading.config, reading.layout, confidence_with_markov=reading.confidence_with_markov, zero_head=False
    )
    problems += [f"{folder}: {item}" for item in list_problems(found, entries, dtype=None)]
    if problems:
        raise ArtifactError("\n".join(problems))
    config, state = from_layout(reading.config, found, reading.layout, where=str(folder))
    own = {key: value for key, value in (data.get(OWN) or {}).items() if key != "layout"}
    return drafter_from_tensors(config, state, where=str(folder)), {**own, "layout": reading.layout}


def load_any(folder: str | Path, *, target: Mapping[str, Any] | None = None) -> tuple[Drafter, dict[str, Any]]:
    """A drafter from our own checkpoint folder (`draft.json`) or from a published one (`config.json`)."""
    if (Path(folder) / DESCRIPTION).exists():
        return load_drafter(folder)
    return load_published(folder, target=target)


# ------------------------------------------------------------------------------------------------ starting points

# Set by the run, whatever the checkpoint says: no tensor depends on them.
_FREE = {"block_size", "mask_token_id", "rms_norm_eps"}
_HEADS = {"kind", "markov", "markov_rank", "confidence", "draft_vocab_size"}


def start_from(folder: str | Path, drafter: Drafter, *, target: Mapping[str, Any] | None = None) -> list[str]:
    """Put the weights of a checkpoint into `drafter` (`train.init_from`); returns what differs, one line each.

    The block size may be wider or narrower: no tensor depends on it, new slots continue the mask-token pattern. A draft
    vocabulary may be cut out of a larger one. Heads the checkpoint lacks keep the drafter's own start.

    Raises:
        ArtifactError: naming every setting that would make the weights mean something else (layout, tapped layers,
            rope, sizes), or a draft vocabulary the checkpoint does not cover.
    """
    source, _ = load_any(folder, target=target)
    have, want = source.config, drafter.config
    differing = [field.name for field in fields(DraftConfig) if getattr(have, field.name) != getattr(want, field.name)]
    wrong = [name for name in differing if name not in _FREE | _HEADS]
    if wrong:
        told = [f"{name}: {getattr(have, name)!r} in the checkpoint, {getattr(want, name)!r} here" for name in wrong]
        raise ArtifactError(f"{folder}: cannot be the start of this drafter:\n  " + "\n  ".join(told))
    notes = [f"{name} {getattr(have, name)} -> {getattr(want, name)}" for name in differing]
    state = _for_vocabulary(source, drafter, folder)
    fresh = []
    for name, value in drafter.state_dict().items():
        if name not in state or state[name].shape != value.shape:
            if not name.startswith(("markov_head.", "confidence_head.", "d2t", "t2d")):
                raise ArtifactError(f"{folder}: has no {name} of shape {list(value.shape)}")
            state[name] = value
            fresh += [name] if name not in ("d2t", "t2d") else []
    drafter.load_state_dict({name: state[name] for name in drafter.state_dict()}, strict=True)
    return [*notes, *(f"{name} is not in the checkpoint: fresh" for name in fresh)]


def _for_vocabulary(source: Drafter, drafter: Drafter, folder: str | Path) -> dict[str, Tensor]:
    """The source's state with every row-per-draft-token tensor cut to the drafter's vocabulary."""
    state = dict(source.state_dict())
    if source.config.draft_vocab_size is None and drafter.config.draft_vocab_size is None:
        return state
    everything = torch.arange(source.config.target_vocab_size)
    have = everything if source.rows is None else source.rows
    want = everything if drafter.rows is None else drafter.rows
    place = torch.full((source.config.target_vocab_size,), -1).scatter_(0, have, torch.arange(len(have)))[want]
    if bool((place < 0).any()):
        raise ArtifactError(
            f"{folder}: {int((place < 0).sum())} of this drafter's {len(want)} draft tokens are not in the "
            f"checkpoint's draft vocabulary of {len(have)}"
        )
    for name in ("markov_head.markov_w2.weight",):
        if name in state:
            state[name] = state[name][place]
    return {name: value for name, value in state.items() if name not in ("d2t", "t2d")} | {
        name: value for name, value in drafter.state_dict().items() if name in ("d2t", "t2d")
    }
