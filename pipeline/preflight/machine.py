"""Settings that this machine cannot serve: no GPU, a package that is not installed, no compiler. Imports no torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from pipeline.chain import STAGES
from pipeline.config import Config

_GPU_DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd")
_FLASH_PACKAGES = ("flash_attn", "kernels")  # transformers takes its kernels from either


def has_gpu() -> bool:
    """An NVIDIA or AMD device, as far as this can be told without torch."""
    return any(Path(name).exists() for name in _GPU_DEVICES)


def problems(config: Config, stages: Sequence[str]) -> Iterator[str]:
    """What of the settings needs more than this machine has, where one of `stages` would use them here."""
    if any(STAGES[name].computes(config) for name in stages):
        yield from _target(config)
    streamed = "targets" in stages and config.targets.mode == "streamed"
    if streamed and (problem := transport_problem(str(config.targets.url))):
        yield f"targets.url: {problem}"
    if "train" in stages and config.train.published is None:
        yield from _train(config)


def _target(config: Config) -> Iterator[str]:
    target = config.target
    flash, placed = target.attention == "flash_attention_2", (target.device_map or "").startswith("cuda")
    if flash and not has_gpu():
        yield "target.attention: flash_attention_2 needs a GPU, this machine has none; use auto"
    if flash and not any(find_spec(name) for name in _FLASH_PACKAGES):
        yield "target.attention: flash_attention_2 needs the package flash-attn (or kernels), not installed; use auto"
    if placed and not has_gpu():
        yield f"target.device_map: {target.device_map} needs a GPU, this machine has none; leave it out"


def _train(config: Config) -> Iterator[str]:
    train = config.train
    if train.engine in ("zero1", "zero2", "zero3") and find_spec("deepspeed") is None:
        yield f"train.engine: {train.engine} needs DeepSpeed, which is not installed (pip install deepspeed)"
    if not train.compile:
        return
    if has_gpu():
        if find_spec("triton") is None:
            yield "train.compile: torch.compile needs Triton on a GPU, and it is not installed; set it to false"
    elif shutil.which(compiler := os.environ.get("CXX", "g++")) is None:
        yield f"train.compile: torch.compile needs a C++ compiler, and {compiler} (CXX) is not there; set it to false"


def transport_problem(url: str) -> str | None:
    """Why nothing can be read from a URL here; None when its transport is installed. Asks no server."""
    scheme = urlsplit(url).scheme
    if scheme in ("", "file", "pipe"):
        return None
    if scheme in ("http", "https"):
        return None if shutil.which("curl") else f"{scheme}:// goes through curl, which is not installed"
    from fsspec.registry import get_filesystem_class

    try:
        get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:  # its package is not installed, or nobody knows the scheme
        return f"{scheme}:// cannot be read here ({error}); or read through a command: pipe:COMMAND {{}}"
    return None
