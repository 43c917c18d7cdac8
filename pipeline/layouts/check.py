"""The self-check of an export: read the folder back from the disk alone and hold it against the trained drafter.

What it proves: every key of config.json, the complete tensor list with shapes, dtypes and finite values, and that the
reloaded drafter computes what the trained one computes. "Equal" is exact: against the trained weights rounded to the
stored dtype, the reloaded drafter gives the same bits; the distance to the unrounded ones is reported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.artifact import read_json
from pipeline.draft.config import DraftConfig
from pipeline.draft.interface import Anchors, Context, Drafter
from pipeline.draft.io import drafter_from_tensors
from pipeline.errors import ArtifactError
from pipeline.layouts import files, mtp
from pipeline.layouts.load import load_published
from pipeline.layouts.table import list_problems, table

PROBE_TOKENS, PROBE_ANCHORS = 24, (2, 9, 15)


@dataclass(frozen=True)
class Expectation:
    """What a folder must be: its config.json, stored dtype, and whether the target's embedding and head are inside."""

    layout: str
    config_json: Mapping[str, Any]
    dtype: torch.dtype
    target_tensors: bool


def self_check(folder: Path, drafter: Drafter, frozen: Any, expected: Expectation) -> dict[str, Any]:
    """Check a written folder; returns the facts proved (tensor count, bytes, largest logit difference).

    Raises ArtifactError with everything that is wrong.
    """
    problems = _config_problems(read_json(folder / "config.json"), expected.config_json)
    found = files.read_tensors(folder)
    entries = table(drafter.config, expected.layout)
    problems += list_problems(found, entries, dtype=expected.dtype)
    included = ["embed_tokens.weight", "lm_head.weight"] if expected.target_tensors else []
    included += ["t2d"] if drafter.t2d is not None else []
    missing = [name for name in included if name in entries and entries[name].optional and name not in found]
    problems += [f"missing {name}, which the export was to include" for name in missing]
    if not problems:
        problems += _target_problems(found, drafter, frozen, expected.dtype)
    if problems:
        raise ArtifactError("\n".join(f"{folder}: {problem}" for problem in problems))
    loaded, _ = load_published(folder, check=False)
    difference = _compare(folder, loaded, drafter, frozen, expected.dtype, expected.layout)
    return {
        "tensors": len(found),
        "parameters": sum(tensor.numel() for tensor in found.values()),
        "bytes": sum(path.stat().st_size for path in files.weight_files(folder)),
        "max_logit_difference": difference,
    }


def _config_problems(found: Mapping[str, Any], expected: Mapping[str, Any], path: str = "config.json") -> list[str]:
    """Every key that is missing, extra, or another value than what was to be written."""
    problems = [f"{path}: key {key!r} is missing" for key in sorted(expected.keys() - found.keys())]
    problems += [f"{path}: unexpected key {key!r}" for key in sorted(found.keys() - expected.keys())]
    for key in sorted(found.keys() & expected.keys()):
        mine, theirs = found[key], expected[key]
        if isinstance(mine, dict) and isinstance(theirs, Mapping):
            problems += _config_problems(mine, theirs, f"{path}: {key}")
        elif json.dumps(mine) != json.dumps(theirs):  # 7 is not 7.0, nor 1 true, however deep
            problems.append(f"{path}: {key} is {mine!r}, {theirs!r} expected")
    return problems


def _target_problems(found: Mapping[str, Tensor], drafter: Drafter, frozen: Any, dtype: torch.dtype) -> list[str]:
    """The target's tensors in the file, and the tables, are what the target and the drafter have."""
    rows = slice(None) if drafter.rows is None else drafter.rows
    wanted: dict[str, Tensor] = {}
    if "embed_tokens.weight" in found:
        wanted["embed_tokens.weight"] = (frozen.embed_VD * frozen.embed_scale).to(dtype)
    if "lm_head.weight" in found:
        wanted["lm_head.weight"] = (frozen.head_VD[rows] * frozen.logit_scale).to(dtype)
    if drafter.d2t is not None and drafter.t2d is not None:
        wanted |= {name: getattr(drafter, name) for name in ("d2t", "t2d") if name in found}
    return [
        f"{name} is not the one it was exported with"
        for name, tensor in wanted.items()
        if not torch.equal(found[name].to(tensor.dtype), tensor.cpu())
    ]


def _compare(folder: Path, loaded: Drafter, drafter: Drafter, frozen: Any, dtype: torch.dtype, layout: str) -> float:
    """Largest logit difference to the unrounded drafter; raises unless the rounded one is met exactly."""
    ignored = {"confidence"} if loaded.config.confidence != drafter.config.confidence else set()
    differing = [
        name for name, value in drafter.config.to_dict().items()
        if name not in ignored and value != loaded.config.to_dict()[name]
    ]  # fmt: skip
    if differing:
        told = ", ".join(f"{name} {loaded.config.to_dict()[name]!r}" for name in differing)
        raise ArtifactError(f"{folder}: reads back as another drafter: {told}")
    state = {
        name: _rounded(name, tensor, dtype, layout) if tensor.is_floating_point() else tensor
        for name, tensor in drafter.state_dict().items()
    }
    rounded = drafter_from_tensors(drafter.config, state, where=str(folder))
    trained = drafter_from_tensors(drafter.config, dict(drafter.state_dict()), where=str(folder))
    kept = loaded.state_dict()
    for name, tensor in rounded.state_dict().items():
        if name in kept and not torch.equal(kept[name], tensor):
            raise ArtifactError(f"{folder}: {name} does not hold the trained values")
    ours, theirs, exact = (probe(each, frozen) for each in (rounded, loaded, trained))
    for name, tensor in theirs.items():
        if name in ours and not torch.equal(tensor, ours[name]):
            worst = float((tensor - ours[name]).abs().max())
            raise ArtifactError(f"{folder}: reloaded {name} differ from the trained drafter's by up to {worst:.3g}")
    return float((theirs["logits"] - exact["logits"]).abs().max())


def _rounded(name: str, tensor: Tensor, dtype: torch.dtype, layout: str) -> Tensor:
    return mtp.rounded(name, tensor, dtype) if layout == "mtp" else tensor.to(dtype).float()


@torch.no_grad()
def probe(drafter: Drafter, frozen: Any) -> dict[str, Tensor]:
    """Logits [A, K, V or |D|] and confidence logits of a drafter on seeded tokens and hidden states."""
    config: DraftConfig = drafter.config
    generator = torch.Generator().manual_seed(0)
    width, slots = config.hidden_size, torch.arange(config.block_size)
    ids = torch.randint(0, config.target_vocab_size, (PROBE_TOKENS + config.block_size,), generator=generator)
    index = torch.tensor(PROBE_ANCHORS)
    length = len(ids)
    context = Context(
        ids_T=ids,
        positions_T=torch.arange(length),
        document_T=torch.zeros(length, dtype=torch.int64),
        taps_TLD=torch.randn(length, len(config.target_layer_ids), width, generator=generator),
        last_hidden_TD=torch.randn(length, width, generator=generator),
    )
    anchors = Anchors(index, ids[index[:, None] + slots], torch.ones(len(index), config.block_size, dtype=torch.bool))
    embedding = frozen.embed_VD.float()
    out = drafter.float().eval()(context, anchors, embedding * frozen.embed_scale)
    logits = frozen.logits(out.hidden_AKD.flatten(0, 1), drafter.rows).unflatten(0, out.hidden_AKD.shape[:2])
    if out.markov_AKr is not None and drafter.markov_w2 is not None:
        logits = logits + out.markov_AKr @ drafter.markov_w2.T
    found = {"logits": logits}
    if out.confidence_AK is not None:
        found["confidence"] = out.confidence_AK
    return found
