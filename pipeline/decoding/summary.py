"""From published evaluation units to the files and lines a person reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.artifact import Artifact, atomic_path, write_json
from pipeline.config import Config
from pipeline.decoding.lab_report import lab_plots
from pipeline.decoding.markdown import page, tau_text
from pipeline.decoding.plots import acceptance_plot, tau_plot
from pipeline.decoding.report import DEFINITIONS, Group, Setting, build
from pipeline.decoding.units import Unit
from pipeline.draft.config import DraftConfig
from pipeline.progress import say

_NEAR_TIES_EXPECTED = 0.01  # S22


def gather(artifact: Artifact, units: Sequence[Unit]) -> list[Group]:
    """Lines and facts of all units, by prompt set and temperature."""
    groups = []
    for name, temperature in dict.fromkeys((unit.prompt_set, unit.temperature) for unit in units):
        files = [unit.file for unit in units if (unit.prompt_set, unit.temperature) == (name, temperature)]
        lines = [
            json.loads(line)
            for file in files
            for line in (artifact.path / file).read_text(encoding="utf-8").splitlines()
        ]
        groups.append(Group(name, temperature, lines, [artifact.row(file) or {} for file in files]))
    return groups


def make_report(
    config: Config, described: DraftConfig, groups: Sequence[Group], *, first_prompt: str, sps_source: str
) -> dict[str, Any]:
    """report.json: the settings, the definitions, and one record per drafter, prompt set, domain and temperature."""
    settings = config.evaluate
    setting = Setting(
        described.kind, described.block_size, settings.batch_size, settings.bootstrap, config.seed, settings.policy
    )
    report = {
        "drafter": described.kind, "layout": described.layout, "block_size": described.block_size,
        "target": config.target.model or "tiny", "batch_size": settings.batch_size, "dtype": settings.dtype,
        "policy": settings.policy, "max_new_tokens": settings.max_new_tokens, "top_p": settings.top_p,
        "top_k": settings.top_k, "definitions": DEFINITIONS, "records": build(groups, setting),
        "first_prompt": first_prompt,
    }  # fmt: skip
    if settings.policy in ("early_stop", "lagged_global"):
        report["sps_source"] = sps_source
    return report


def write_files(folder: Path, report: dict[str, Any], lab: dict[str, Any]) -> list[str]:
    """report.json, report.md, lab.json and the plots; returns their names below the folder."""
    write_json(folder / "report.json", report)
    write_json(folder / "lab.json", lab)
    with atomic_path(folder / "report.md") as path:
        path.write_text(page(report, lab), encoding="utf-8")
    records, below = report["records"], folder / "plots"
    plots = [
        tau_plot(records, below / "tau.png"),
        acceptance_plot(records, below / "acceptance.png"),
        *lab_plots(lab, below),
    ]
    return ["report.json", "report.md", "lab.json", *(f"plots/{plot.name}" for plot in plots if plot is not None)]


def taus(report: dict[str, Any]) -> dict[str, float | None]:
    """Accepted length of every pooled record, by a short name."""
    pooled = [record for record in report["records"] if record["domain"] is None]
    return {
        f"{record['drafter']}/{Path(record['prompts']).stem}/T{record['temperature']:g}": record["tau"]
        for record in pooled
    }


def tell(report: dict[str, Any], lab: dict[str, Any]) -> None:
    """Console lines: the first prompt as rendered (EVA-06), results of pooled prompts, and what is wrong."""
    say(f"evaluate: first prompt as rendered: {report['first_prompt']!r}")
    for record in report["records"]:
        if record["domain"] is not None:
            continue
        speed, vanilla = record.get("tokens_per_second"), record.get("vanilla_tokens_per_second")
        say(
            f"evaluate {record['prompts']} T={record['temperature']:g}: {record['drafter']} tau {tau_text(record)}"
            + (f", {speed:.1f} tokens/s" if speed else "")
            + (f" against {vanilla:.1f} without" if vanilla else "")
        )
        found = record.get("lossless", {"compared": 0, "near_ties": (), "faults": ()})
        if len(found["near_ties"]) > max(1, _NEAR_TIES_EXPECTED * found["compared"]):
            say(
                f"evaluate {record['prompts']}: {len(found['near_ties'])} of {found['compared']} greedy outputs part "
                "at a near-tie; more than 1 % hints at a numerical fault (bfloat16 parts more often)",
                warning=True,
            )
        for fault in found["faults"]:
            say(f"evaluate: greedy output of {fault['id']} differs from the target's own: {fault}", warning=True)
    for name, section in lab["temperatures"].items():
        for text in section["shortfalls"]:
            say(f"evaluate: scheduler lab {name}: {text}")
