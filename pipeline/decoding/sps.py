"""Steps per second by forward batch in tokens, on this engine (S28).

    table = measure(target, grid("full", 512), context_length=256, repeats=5)

A step is what a verify round costs the target: one forward over B = sum(1 + scheduled) tokens through the ragged cache,
and the head at every one of them. Rows hold at most eight tokens each (an anchor and seven drafts), shared out evenly.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from pipeline import stopping
from pipeline.decoding.cache import RaggedCache
from pipeline.decoding.portions import ROW_TOKENS, WARM_UP, rows_of
from pipeline.progress import progress

LOOKUP = "floor: between samples the value of the next smaller one holds"


def table(tokens: Sequence[int], speeds: Sequence[float], *, source: str, context_length: int | None) -> dict[str, Any]:
    """The SPS file: SGLang's three keys, and how it was made."""
    return {
        "sample_batch_tokens": list(tokens),
        "sample_steps_per_sec": [float(f"{speed:.6g}") for speed in speeds],
        "max_batch_tokens": tokens[-1],
        "lookup": LOOKUP,
        "source": source,
        "context_length": context_length,
        "rows": [rows_of(size) for size in tokens],
    }


def synthetic(name: str, sizes: Sequence[int]) -> dict[str, Any]:
    """A named curve: `constant` 100, `sqrt` 100/sqrt(B), `staircase` 100 halved at every 16 tokens' worth of work."""
    curves = {
        "constant": lambda size: 100.0,
        "sqrt": lambda size: 100.0 / size**0.5,
        "staircase": lambda size: 100.0 / -(-size // 16),
    }
    speeds = [curves[name](size) for size in sizes]
    return table(sizes, speeds, source=f"synthetic: {name}", context_length=None)


@torch.inference_mode()
def measure(target: Any, sizes: Sequence[int], *, context_length: int, repeats: int) -> dict[str, Any]:
    """Median steps per second at each size, after a warm-up.

    Repetitions go round the whole grid, so that a slow moment of the machine touches many sizes once and no size often.
    """
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    cache = RaggedCache(target.config)
    cache.reserve(rows_of(sizes[-1]), context_length + ROW_TOKENS)
    _fill(target, cache, rows_of(sizes[-1]), context_length)
    with progress(len(sizes) * (repeats + 1), what="sps", unit="steps") as bar:
        for repeat in range(repeats + 1):
            for size in sizes:
                stopping.check()
                for _ in range(WARM_UP if repeat == 0 else 0):
                    _step(target, cache, size, context_length)
                seconds[size].append(_step(target, cache, size, context_length))
                bar.advance()
    speeds = [1.0 / statistics.median(seconds[size][1:]) for size in sizes]
    return table(sizes, speeds, source=f"measured: {_device_name(target.device)}", context_length=context_length)


def _fill(target: Any, cache: RaggedCache, rows: int, length: int) -> None:
    """Put a context into the cache, a few rows at a time."""
    for start in range(0, rows, 8):
        slots = torch.arange(start, min(start + 8, rows), device=target.device)
        ids = torch.arange(len(slots) * length, device=target.device).view(len(slots), length) % target.vocab_size
        positions = torch.arange(length, device=target.device).expand(len(slots), length)
        mask = cache.place(positions, slots)
        target.forward(ids, positions_BT=positions, mask=mask, cache=cache)


def _step(target: Any, cache: RaggedCache, size: int, context_length: int) -> float:
    """Seconds of one verify forward over `size` tokens."""
    rows = rows_of(size)
    counts = torch.full((rows,), size // rows, device=target.device)
    counts[: size % rows] += 1
    steps = torch.arange(int(counts.max()), device=target.device)
    positions = (context_length + steps).expand(rows, len(steps))
    ids = (positions * 31 + torch.arange(rows, device=target.device)[:, None]) % target.vocab_size
    started = _now(target.device)
    mask = cache.place(positions)
    seen = target.forward(ids, positions_BT=positions, mask=mask, cache=cache)
    target.frozen.logits(seen.last_hidden_BTD[steps < counts[:, None]]).argmax(-1).tolist()
    return _now(target.device) - started


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} CPU threads"
