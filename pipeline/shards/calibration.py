"""What a fixed sample of rows says of the taps: static per-channel RMS, and how much the codec loses."""

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
from pipeline.shards.codecs import channel_rms, decode_taps, encode_taps
from pipeline.shards.layout import Spec

RMS_FILE = "channel_rms.safetensors"
SAMPLE_TOKENS = 8192
ERROR_TOKENS = 1024


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
    """RMS [L, D] of the first 8,192 tokens."""
    return channel_rms(torch.cat(_sample(target, rows, SAMPLE_TOKENS)))


def codec_errors(target: Any, rows: Iterable[Any], spec: Spec, channel_rms_LD: Tensor | None) -> list[float]:
    """Mean of |x' - x| / |x| over the first 1,024 tokens, per tapped layer; empty where no row is finite."""
    sample = _sample(target, rows, ERROR_TOKENS)
    if not sample:
        return []
    taps_NLD = torch.cat(sample)
    error_NLD = decode_taps(encode_taps(taps_NLD, spec, channel_rms_LD), spec, channel_rms_LD) - taps_NLD
    ratio_NL = error_NLD.norm(dim=-1) / taps_NLD.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return [float(value) for value in ratio_NL.mean(0)]


def _sample(target: Any, rows: Iterable[Any], tokens: int) -> list[Tensor]:
    """Taps [T, L, D] in fp32 of rows forwarded one by one until enough tokens are seen, without rows not finite."""
    taps: list[Tensor] = []
    seen = 0
    for row in rows:
        ids = torch.from_numpy(np.asarray(row.ids[: tokens - seen], dtype=np.int64))[None].to(target.device)
        part = target.forward(ids).taps_BTLD[0].float()
        if torch.isfinite(part).all():
            taps.append(part)
            seen += len(part)
        if seen >= tokens:
            break
    return taps
