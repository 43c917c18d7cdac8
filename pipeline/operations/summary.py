"""The table at the end of `dspark run`: what came out, in figures, and where everything lies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.artifact import Artifact, read_json
from pipeline.config import Config

Record = dict[str, Any]


def summary(config: Config, artifacts: dict[str, Artifact]) -> str:
    """Plain text, made from the manifests and report.json alone."""
    lines = ["", f"experiment {config.experiment}", ""]
    if "evaluate" in artifacts:
        records = read_json(artifacts["evaluate"].path / "report.json")["records"]
        lines += [*_tau(records), "", *_positions(records), ""]
    lines += [*_facts(config, artifacts), "", *_places(config, artifacts)]
    return "\n".join(lines)


def _tau(records: list[Record]) -> Iterator[str]:
    """Accepted length, drafter beside prompt lookup on the same outputs."""
    yield "accepted length tau [95 % interval], tokens per verify step, target's own token included"
    head = f"  {'prompts':24s} {'T':>4s} {'n':>5s}  {'drafter':>20s}  {'prompt lookup':>20s}"
    yield f"{head}  {'tokens/s':>9s} {'vanilla':>8s}"
    lookup = {_key(record): record for record in records if record["drafter"] == "prompt-lookup"}
    for record in records:
        if record["drafter"] == "prompt-lookup":
            continue
        name = record["prompts"] + (f" / {record['domain']}" if record["domain"] else "")
        speed = [_number(record.get(key), 1) for key in ("tokens_per_second", "vanilla_tokens_per_second")]
        yield (
            f"  {name:24.24s} {record['temperature']:4g} {record['num_prompts']:5d}  {_interval(record):>20s}  "
            f"{_interval(lookup.get(_key(record))):>20s}  {speed[0]:>9s} {speed[1]:>8s}"
        )


def _key(record: Record) -> tuple[Any, ...]:
    return record["prompts"], record["domain"], record["temperature"]


def _interval(record: Record | None) -> str:
    if record is None or record["tau"] is None:
        return "no data"
    low, high = record.get("tau_interval") or (None, None)
    return f"{record['tau']:.2f}" + (f" [{low:.2f}, {high:.2f}]" if low is not None else "")


def _positions(records: list[Record]) -> Iterator[str]:
    """P(slot k accepted | slots before it were), pooled over all prompts of a set."""
    yield "conditional acceptance by slot"
    for record in records:
        if record["drafter"] != "prompt-lookup" and record["domain"] is None:
            row = " ".join(_number(value, 2) for value in record["conditional_acceptance"])
            yield f"  {record['prompts']:24.24s} {record['temperature']:4g}  {row}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _facts(config: Config, artifacts: dict[str, Artifact]) -> Iterator[str]:
    if "calibrate" in artifacts:
        for name, ece in (artifacts["calibrate"].manifest().get("ece") or {}).items():
            before, after = _number(ece["before"], 4), _number(ece["after"], 4)
            interval = ece["change_interval"]
            change = "" if interval is None else f" (95 % of the change {interval[0]:+.4f} ... {interval[1]:+.4f})"
            yield f"mean ECE of survival at {name}, report prompts: {before} before calibration, {after} after{change}"
    if "targets" in artifacts:
        facts = artifacts["targets"].manifest()["targets"]
        per_token = facts["bytes"] / max(facts["tokens"], 1)
        codec = f"{facts['taps']} taps of layers {facts['layers']}, {facts['logits']} logits"
        yield f"target cache: {per_token:,.0f} bytes per token ({codec}), {facts['bytes'] / 1e6:,.1f} MB"
    if "train" in artifacts:
        facts = artifacts["train"].manifest()
        yield f"drafter: {facts['steps']} steps on {facts['rows']} rows"


def _places(config: Config, artifacts: dict[str, Artifact]) -> Iterator[str]:
    here = Path.cwd()
    for name, artifact in artifacts.items():
        yield f"{name:10s} {_short(artifact.path, here)}"
    if "evaluate" in artifacts:
        yield f"{'report':10s} {_short(artifacts['evaluate'].path / 'report.md', here)}"
    yield f"{'page':10s} {_short(config.work_dir / 'runs' / config.experiment / 'report.html', here)}"
    if config.tracking.enabled:
        yield f"{'MLflow':10s} make ui   (experiment {config.experiment})"


def _short(path: Path, here: Path) -> str:
    full = path.resolve()
    return os.path.relpath(full, here) if full.is_relative_to(here) else str(full)
