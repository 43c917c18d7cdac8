"""Static per-channel RMS of the taps, from a fixed sample, the same for every shard of an artifact."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.artifact import fsync_dir
from pipeline.shards.codecs import channel_rms

RMS_FILE = "channel_rms.safetensors"
SAMPLE_TOKENS = 8192


def shared_channel_rms(folder: Path, target: Any, rows: Iterable[Any]) -> Tensor:
    """RMS values [L, D] for the artifact in `folder`, from the first 8,192 tokens of `rows`.

    Whoever publishes first decides: the file is linked into place without replacing an existing one and read back, so
    ranks on unlike devices, whose sums may differ in the last bit, still encode all shards with the same values.
    """
    path = folder / RMS_FILE
    if not path.exists():
        temporary = folder / ".tmp" / f"{os.getpid()}.{RMS_FILE}"
        temporary.parent.mkdir(exist_ok=True)
        save_file({"channel_rms": measure(target, rows).cpu()}, temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
        temporary.unlink()
        fsync_dir(folder)
    return load_file(path)["channel_rms"]


def measure(target: Any, rows: Iterable[Any]) -> Tensor:
    """Forward rows one by one until 8,192 tokens are seen."""
    taps: list[Tensor] = []
    seen = 0
    for row in rows:
        ids = torch.from_numpy(np.asarray(row.ids[: SAMPLE_TOKENS - seen], dtype=np.int64))[None].to(target.device)
        part = target.forward(ids).taps_BTLD[0].float()
        if torch.isfinite(part).all():
            taps.append(part)
            seen += len(part)
        if seen >= SAMPLE_TOKENS:
            break
    return channel_rms(torch.cat(taps))
