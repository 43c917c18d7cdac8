"""Checkpoints of drafters too large to gather: every rank writes its own part (`train.sharded_checkpoints`).

The same folder, `latest` and facts as a gathered checkpoint, with the tensors in torch.distributed.checkpoint's form
below `sharded/`. `checkpoint.load` reads either, whole, on any engine and number of ranks.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as read_parts
from torch.distributed.checkpoint.state_dict_saver import save as write_parts

from pipeline.artifact import atomic_path, fsync_dir
from pipeline.distributed import Engine
from pipeline.errors import ConfigError
from pipeline.training.state import MOMENTS, torch_state

FOLDER = "sharded"
ENGINES = ("single", "ddp", "fsdp2")


def refuse(engine: str, wanted: bool) -> None:
    """Raise ConfigError where an engine keeps its state in a form that only gathers."""
    if wanted and engine not in ENGINES:
        raise ConfigError(
            f"train.sharded_checkpoints: {engine} checkpoints are gathered; use {', '.join(ENGINES)}, "
            "or set it to false"
        )


def save(engine: Engine, root: Path, name: str, facts: Mapping[str, Any]) -> None:
    """Write the folder `root/name`; a collective. It appears by rename, after every rank has written its part."""
    part = root / f".part-{name}"
    if engine.ranks.rank == 0:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    engine.ranks.barrier()
    write_parts(torch_state(engine), checkpoint_id=str(part / FOLDER), no_dist=engine.ranks.world == 1)
    if engine.ranks.rank == 0:
        (part / "state.json").write_text(json.dumps(dict(facts), sort_keys=True), encoding="utf-8")
        shutil.rmtree(root / name, ignore_errors=True)
        part.rename(root / name)
        fsync_dir(root)
        with atomic_path(root / "latest") as temporary:
            temporary.write_text(name + "\n", encoding="utf-8")
    engine.ranks.barrier()


def load(folder: Path, shapes: Mapping[str, list[int]]) -> dict[str, dict[str, Tensor]]:
    """Whole fp32 tensors by kind and name, without a process group."""
    wanted = {kind: {name: torch.empty(shape) for name, shape in shapes.items()} for kind in ("weights", *MOMENTS)}
    read_parts(wanted, checkpoint_id=str(folder / FOLDER), no_dist=True)
    return wanted
