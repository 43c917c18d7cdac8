"""The scheduler lab on a chain's own artifacts: records and STS of calibrate, the table of profile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.artifact import read_json
from pipeline.decoding.calibration import halves, read_records
from pipeline.decoding.lab import Trace, run_lab, shortfalls, threshold_sweep
from pipeline.decoding.plots import lab_plot, sweep_plot
from pipeline.speculative.scheduler import SpsTable


def concurrencies(sps: dict[str, Any]) -> list[int]:
    """Powers of two up to the largest measured batch."""
    return [1 << power for power in range(int(sps["max_batch_tokens"]).bit_length())][:10]


def report_trace(folder: Path, temperature: float) -> Trace | None:
    """Rounds of the report prompts, calibrated with what was fitted on the others; None where nothing was recorded."""
    path, fitted = folder / f"records-T{temperature:g}.npz", folder / f"sts-T{temperature:g}.json"
    if not path.exists() or not fitted.exists():
        return None
    records, prompt, header = read_records(path)
    _, side = halves([domain for _, domain, _ in header["prompts"]])
    index = torch.from_numpy(np.flatnonzero(np.isin(prompt, side)))
    return Trace.of(records.take(index), torch.from_numpy(prompt)[index], read_json(fitted)["temperatures"])


def lab_of(folder: Path, sps: dict[str, Any], temperatures: Sequence[float], *, seed: int) -> dict[str, Any]:
    """Lab rows, shortfalls and threshold sweep per temperature that was calibrated; says which SPS table it used."""
    table = SpsTable.read(sps)
    out: dict[str, Any] = {"sps_source": sps["source"], "temperatures": {}}
    for temperature in temperatures:
        trace = report_trace(folder, temperature)
        if trace is None or not len(trace.accepted_N):
            continue
        rows = run_lab(trace, table, concurrencies=concurrencies(sps), seed=seed)
        out["temperatures"][f"T{temperature:g}"] = {
            "rounds": len(trace.accepted_N),
            "rows": rows,
            "shortfalls": shortfalls(rows, trace, table, seed=seed),
            "thresholds": threshold_sweep(trace),
        }
    return out


def lab_plots(lab: dict[str, Any], folder: Path) -> list[Path]:
    """A lab figure per temperature and one threshold sweep."""
    found = lab["temperatures"]
    paths = [
        lab_plot(section["rows"], f"{name}, SPS {lab['sps_source']}", folder / f"lab-{name}.png")
        for name, section in found.items()
    ]
    if found:
        sweeps = {name: section["thresholds"] for name, section in found.items()}
        paths.append(sweep_plot(sweeps, folder / "thresholds.png"))
    return paths
