"""Speed and memory of the training step against the reference's way of computing it (`tools/bench_baseline.py`).

    python -m tools.bench [--quick] [--json FILE] [--device cpu|cuda] [--repeats N]

`make bench ARGS=...` runs this, then `tools.bench_targets`, and `tools.bench_decoding` where `make run` left a drafter.
Every comparison is paired and interleaved (ours, reference, ours, ...); the medians of the pairs are reported, so a
machine that slows down in between slows both. Memory is the peak above what was resident before the step: the resident
set on a CPU, allocated bytes on CUDA. Two CPU cores need about ten minutes and 12 GB for everything.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pipeline.artifact import git_revision
from tools.bench_cases import Case, Shape, make

FLOORS = {"memory": 12.0, "growth": 1.15, "bf16": 2.0, "fp32": 1.4, "sparse": 3.0}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small shapes: does it run, and do both losses agree")
    parser.add_argument("--json", type=Path, default=Path("work/bench/train.json"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"--repeats: at least 1, found {options.repeats}")
    if options.device not in ("cpu", "cuda") or (options.device == "cuda" and not torch.cuda.is_available()):
        parser.error(f"--device: {options.device} is not available here")
    bench = Bench(torch.device(options.device), options.repeats)
    records = quick(bench) if options.quick else full(bench)
    report = {
        "device": bench.name(), "threads": torch.get_num_threads(), "torch": torch.__version__,
        "revision": git_revision(), "records": records,
    }  # fmt: skip
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(table(report) + f"\n{options.json}\n")
    return 0


def quick(bench: Bench) -> list[dict[str, Any]]:
    shape = Shape(hidden=128, vocabulary=2048, anchors=32, tokens=128)
    return [bench.step(shape), bench.loss(shape), bench.step(replace(shape, supervised=0.15, anchors=64))]


def full(bench: Bench) -> list[dict[str, Any]]:
    """The floors of the project, then scaling in anchors and vocabulary."""
    middle = Shape()
    large = Shape(hidden=256, vocabulary=151_936)
    return [
        bench.step(large, repeats=1, floor=("memory_ratio", FLOORS["memory"])),
        bench.growth(large, (64, 512), floor=FLOORS["growth"]),
        bench.step(replace(middle, dtype=torch.bfloat16), floor=("speed_ratio", FLOORS["bf16"])),
        bench.step(middle, floor=("speed_ratio", FLOORS["fp32"])),
        bench.step(replace(middle, anchors=512, supervised=0.15), floor=("speed_ratio", FLOORS["sparse"])),
        bench.loss(replace(middle, dtype=torch.bfloat16)),
        bench.loss(middle),
        *(bench.loss(replace(middle, anchors=anchors), repeats=2) for anchors in (64, 512)),
        *(bench.loss(replace(middle, vocabulary=vocabulary), repeats=2) for vocabulary in (4096, 65_536)),
    ]


class Bench:
    """Measures on one device."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats

    def name(self) -> str:
        return torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu"

    def step(
        self, shape: Shape, *, repeats: int | None = None, floor: tuple[str, float] | None = None
    ) -> dict[str, Any]:
        """The whole step: forward, backward, clip, AdamW."""
        case = make(shape, self.device)
        first = float(case.our_step()), float(case.reference_step())
        if not math.isclose(*first, rel_tol=2e-2 if shape.dtype == torch.bfloat16 else 1e-3):
            raise AssertionError(f"{shape.label()}: losses differ before any step: {first}")
        found = self._compare(case.our_step, case.reference_step, repeats)
        found["model_flops_utilisation"] = case.flops() / found["seconds"] / self.matmul_peak(shape.dtype)
        return self._record("step", shape, found, floor, case)

    def loss(self, shape: Shape, *, repeats: int | None = None) -> dict[str, Any]:
        """Loss and heads alone, forward and backward."""
        case = make(shape, self.device)
        return self._record("loss", shape, self._compare(*case.losses(), repeats), None, case)

    def growth(self, shape: Shape, anchors: tuple[int, int], *, floor: float) -> dict[str, Any]:
        """Peak of our loss alone, above inputs and parameter gradients, at two numbers of anchors."""
        peaks = []
        for count in anchors:
            case = make(replace(shape, anchors=count), self.device)
            ours, _ = case.losses()
            ours()  # parameter gradients exist from here on
            peaks.append(self.peak(ours))
        found = {"bytes": peaks[1], "bytes_before": peaks[0], "growth": peaks[1] / peaks[0]}
        label = replace(shape, anchors=anchors[1]).label()
        return {"what": f"loss peak, {anchors[0]} -> {anchors[1]} anchors", "shape": label, **found, "floor": floor,
                "passes": found["growth"] < floor}  # fmt: skip

    def _compare(self, ours: Callable[[], Any], reference: Callable[[], Any], repeats: int | None) -> dict[str, Any]:
        pairs = []
        for _ in range(repeats or self.repeats):
            pairs.append((self.seconds(ours), self.seconds(reference)))
        memory = self.peak(ours), self.peak(reference)
        return {
            "seconds": statistics.median(a for a, _ in pairs),
            "reference_seconds": statistics.median(b for _, b in pairs),
            "speed_ratio": statistics.median(b / a for a, b in pairs),
            "bytes": memory[0],
            "reference_bytes": memory[1],
            "memory_ratio": memory[1] / max(memory[0], 1),
        }

    def _record(
        self, what: str, shape: Shape, found: dict[str, Any], floor: tuple[str, float] | None, case: Case
    ) -> dict[str, Any]:
        record = {"what": what, "shape": shape.label(), "slots": int(case.batch.slots_S.numel()), **found}
        if floor is not None:
            record |= {"floor": f"{floor[0]} >= {floor[1]}", "passes": found[floor[0]] >= floor[1]}
        return record

    def seconds(self, function: Callable[[], Any]) -> float:
        self._settle()
        began = time.perf_counter()
        function()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def peak(self, function: Callable[[], Any]) -> int:
        """Highest memory while the function runs, above what was there before."""
        self._settle()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            function()
            return torch.cuda.max_memory_allocated() - before
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forgets the earlier peak
        before = _status("VmRSS")
        function()
        return _status("VmHWM") - before

    def _settle(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        elif sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)

    def matmul_peak(self, dtype: torch.dtype) -> float:
        """Multiply-adds times two per second of a large square product, the best of five."""
        size = 8192 if self.device.type == "cuda" else 2048
        a, b = (torch.randn(size, size, device=self.device, dtype=dtype) for _ in range(2))
        best = min(self.seconds(lambda: a @ b) for _ in range(5))
        return 2.0 * size**3 / best


def _status(name: str) -> int:
    """A memory line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def table(report: dict[str, Any]) -> str:
    """The records as a Markdown table."""
    lines = [
        f"{report['device']}, {report['threads']} threads, torch {report['torch']}",
        "",
        "| what | shape | ours | reference | speed | ours, peak | reference, peak | memory | FLOP use | floor |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for record in report["records"]:
        passes = {True: "ok", False: "MISSED", None: ""}[record.get("passes")]
        cells = [
            record["what"], record["shape"], _seconds(record.get("seconds")), _seconds(record.get("reference_seconds")),
            _ratio(record.get("speed_ratio")), _bytes(record.get("bytes")),
            _bytes(record.get("reference_bytes", record.get("bytes_before"))),
            _ratio(record.get("memory_ratio", record.get("growth"))),
            f"{record['model_flops_utilisation']:.0%}" if "model_flops_utilisation" in record else "",
            f"{record['floor']} {passes}" if "floor" in record else "",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def _bytes(value: float | None) -> str:
    return "" if value is None else f"{value / 1e6:,.0f} MB"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} x"


if __name__ == "__main__":
    sys.exit(main())
