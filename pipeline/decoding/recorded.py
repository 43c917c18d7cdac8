"""Calibration records taken by a serving engine, turned into ours.

SGLang (`SGLANG_DSPARK_STS_COLLECT_PATH=stem`) leaves `stem.<rank>.<n>.pt` files of {"logits": [n, K], "prefix_mask":
[n, K]}: confidence logits, and whether slots 1..k were all accepted. They name no prompts and no stops, so every file
counts as one prompt (a single file as two halves), and fit and report take alternate ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.artifact import atomic_path
from pipeline.decoding.calibration import HEADER
from pipeline.errors import DataError
from pipeline.identity import recorded_files


def read_shard(path: Path, block_size: int) -> tuple[Tensor, Tensor]:
    """(logits [n, K] fp32, accepted [n]) of one shard.

    Raises DataError when it is something else: other keys, another block size, a threshold, a mask with holes (CAL-02).
    """
    try:
        shard = dict(torch.load(path, map_location="cpu", weights_only=True))
        logits, mask = shard["logits"].float(), shard["prefix_mask"].bool()
    except Exception as error:  # noqa: BLE001 - what a file that is something else raises depends on what it is
        raise DataError(f"{path}: not a shard of logits and prefix_mask ({type(error).__name__}: {error})") from error
    if logits.shape != mask.shape or logits.ndim != 2 or logits.shape[1] != block_size:
        raise DataError(
            f"{path}: logits {list(logits.shape)} and prefix_mask {list(mask.shape)}; both must be [n, {block_size}], "
            "the drafter's block size"
        )
    threshold = shard.get("threshold")
    if (threshold is not None and torch.as_tensor(threshold).any()) or shard.get("temperatures") is not None:
        raise DataError(f"{path}: recorded with a threshold or with STS temperatures; record without either")
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        raise DataError(f"{path}: prefix_mask has slots accepted after a rejected one: not a prefix mask")
    if not bool(torch.isfinite(logits).all()):
        raise DataError(f"{path}: logits are not finite")
    return logits, mask.sum(1)


def import_shards(pattern: str, path: Path, identity: Mapping[str, Any]) -> int:
    """Write one records file from all shards a glob names; returns the number of records. Raises DataError."""
    files = recorded_files(pattern)
    if not files:
        raise DataError(f"calibrate.records: no file matches {pattern}")
    shards = [read_shard(file, int(identity["block_size"])) for file in files]
    names = [file.name for file in files]
    if len(shards) == 1:
        (logits, accepted), middle = shards[0], len(shards[0][1]) // 2
        shards = [(logits[:middle], accepted[:middle]), (logits[middle:], accepted[middle:])]
        names = [f"{names[0]} (first half)", f"{names[0]} (second half)"]
    header = {**HEADER, **identity, "prompts": [[name, "recorded by SGLang", None] for name in names]}
    accepted = torch.cat([part for _, part in shards])
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.savez(
            file,
            header=np.array(json.dumps(header, sort_keys=True)),
            logits=torch.cat([part for part, _ in shards]).numpy(),
            accepted=accepted.to(torch.int16).numpy(),
            stopped=np.zeros(len(accepted), dtype=bool),
            prompt=np.concatenate([np.full(len(part), place, np.int32) for place, (_, part) in enumerate(shards)]),
        )
    return len(accepted)
