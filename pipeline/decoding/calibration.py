"""Records for STS, the calibration file made from them, and reading it back only for what it was made for.

Records are taken at full block length with no threshold and no calibration, at the temperature that will be served
(S25). A calibration file is bound to checkpoint, temperature, block size and layout; anything else is refused (CAL-06).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.artifact import atomic_path, read_json
from pipeline.decoding.playing import Played
from pipeline.errors import ArtifactError, DataError
from pipeline.speculative.sts import Fitted, Records, ece_change, fit, judge

HEADER = {"threshold": 0.0, "policy": "full", "calibrated": False}


def save_records(path: Path, played: Sequence[Played], identity: Mapping[str, Any]) -> int:
    """Write the verify rounds of some prompts as .npz; returns how many. `identity`: what `bind` checks later."""
    rounds = [
        (place, step) for place, item in enumerate(played) for answer in item.answers for step in answer.rounds
    ]  # fmt: skip
    block_size = int(identity["block_size"])
    logits = np.array([step.confidence for _, step in rounds], dtype=np.float32).reshape(-1, block_size)
    header = {
        **HEADER,
        **identity,
        "prompts": [[item.prompt.id, item.prompt.domain, item.error] for item in played],
    }
    with path.open("wb") as file:
        np.savez(
            file,
            header=np.array(json.dumps(header, sort_keys=True)),
            logits=logits,
            accepted=np.array([step.accepted for _, step in rounds], dtype=np.int16),
            stopped=np.array([step.bonus == 0 for _, step in rounds], dtype=bool),
            prompt=np.array([place for place, _ in rounds], dtype=np.int32),
        )
    return len(rounds)


def read_records(path: Path) -> tuple[Records, np.ndarray, dict[str, Any]]:
    """(records, prompt of each record, header). Raises ArtifactError."""
    try:
        with np.load(path) as stored:
            header = json.loads(str(stored["header"]))
            records = Records(*(torch.from_numpy(stored[name]) for name in ("logits", "accepted", "stopped")))
            return records, stored["prompt"], header
    except (OSError, ValueError, KeyError) as error:
        raise ArtifactError(f"{path}: not a file of calibration records ({error})") from error


def join(parts: Sequence[Path], path: Path) -> None:
    """One records file out of several, in their order. Raises ArtifactError when they do not belong together."""
    headers: list[dict[str, Any]] = []
    columns: list[dict[str, Any]] = []
    prompts: list[Any] = []
    for part in parts:
        with np.load(part) as stored:
            headers.append(json.loads(str(stored["header"])))
            columns.append({**stored, "prompt": stored["prompt"] + len(prompts)})
        prompts += headers[-1].pop("prompts")
    if any(header != headers[0] for header in headers):
        raise ArtifactError(f"{path}: its parts were recorded under different conditions")
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        joined: dict[str, Any] = {
            name: np.concatenate([column[name] for column in columns])
            for name in ("logits", "accepted", "stopped", "prompt")
        }
        joined["header"] = np.array(json.dumps({**headers[0], "prompts": prompts}, sort_keys=True))
        np.savez(file, **joined)


def refuse_unfit(header: Mapping[str, Any], where: str) -> None:
    """Raise DataError for records made with a threshold, a cut schedule or calibrated confidences (CAL-02)."""
    wrong = [f"{key} {header.get(key)!r}" for key, value in HEADER.items() if header.get(key) != value]
    if wrong:
        raise DataError(
            f"{where}: recorded with {', '.join(wrong)}; later slots would look better than they are. Record at full "
            "block length, threshold 0, uncalibrated"
        )


def halves(domains: Sequence[str]) -> tuple[list[int], list[int]]:
    """Prompts to fit on and prompts to report on: alternating within each domain, so both halves hold all domains."""
    seen: dict[str, int] = {}
    sides: tuple[list[int], list[int]] = ([], [])
    for place, domain in enumerate(domains):
        sides[seen.get(domain, 0) % 2].append(place)
        seen[domain] = seen.get(domain, 0) + 1
    return sides


def calibrate(path: Path, *, bins: int) -> dict[str, Any]:
    """The calibration file of a records file: fitted on half the prompts, reported on the other half.

    `ece_change_interval` is the 95 % interval of the change of mean ECE over the report prompts (see `ece_change`).
    """
    records, prompt, header = read_records(path)
    refuse_unfit(header, str(path))
    domains = [domain for _, domain, _ in header["prompts"]]
    fit_side, report_side = (torch.from_numpy(np.isin(prompt, side)) for side in halves(domains))
    if not bool(fit_side.any()) or not bool(report_side.any()):
        raise DataError(f"{path}: {len(records)} rounds from {len(domains)} prompts are too few to fit and to report")
    fitted = fit(records.take(fit_side), bins=bins)
    reported = records.take(report_side)
    report = {"all": judge(reported, fitted, bins=bins)}
    change = ece_change(reported, torch.from_numpy(prompt)[report_side], fitted, bins=bins)
    for domain in sorted(set(domains)):
        inside = torch.from_numpy(np.isin(prompt, [i for i, name in enumerate(domains) if name == domain]))
        if bool((inside & report_side).any()):
            report[domain] = judge(records.take(inside & report_side), fitted, bins=bins)
    found = _file(fitted, report, header, bins=bins, fitted_on=int(fit_side.sum()))
    return {**found, "ece_change_interval": change, "report_prompts": len(np.unique(prompt[report_side]))}


def _file(
    fitted: Fitted, report: dict[str, Any], header: Mapping[str, Any], *, bins: int, fitted_on: int
) -> dict[str, Any]:
    """SGLang's keys (temperatures, dataset, num_samples, ece_before, ece_after) and everything that binds them."""
    whole = report["all"]
    return {
        "temperatures": fitted.temperatures,
        "dataset": ", ".join(name for name in report if name != "all"),
        "num_samples": fitted_on,
        "ece_before": whole["ece_before"],
        "ece_after": whole["ece_after"],
        "form": fitted.form,
        "bins": bins,
        "temperature": header["temperature"],
        "checkpoint": header["checkpoint"],
        "block_size": header["block_size"],
        "layout": header["layout"],
        "fit": {"n": fitted.n, "ece_raw": fitted.ece_raw, "ece_at_one": fitted.ece_at_one, "ece": fitted.ece_fitted},
        "above_raw": [
            slot
            for slot, (raw, after) in enumerate(zip(fitted.ece_raw, fitted.ece_fitted, strict=True), 1)
            if raw is not None and after is not None and after > raw
        ],
        "report": report,
        "warnings": drift(report),
    }


def mean(values: Sequence[float | None]) -> float | None:
    """Mean over the slots that have data."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def drift(report: Mapping[str, Any]) -> list[str]:
    """Data sets on which calibration made the mean ECE worse (CAL-05)."""
    found = []
    for name, judged in report.items():
        before, after = mean(judged["ece_before"]), mean(judged["ece_after"])
        if before is not None and after is not None and after > before:
            found.append(f"{name}: mean ECE {before:.4f} before calibration, {after:.4f} after")
    return found


def read_calibration(path: Path, expected: Mapping[str, Any]) -> dict[str, Any]:
    """A calibration file, if it was made for this very drafter and temperature; raises ArtifactError otherwise."""
    data = read_json(path)
    wrong = [f"{key} {data.get(key)!r}, not {value!r}" for key, value in expected.items() if data.get(key) != value]
    if len(data.get("temperatures", ())) != expected.get("block_size", len(data.get("temperatures", ()))):
        wrong.append(f"{len(data.get('temperatures', ()))} temperatures for {expected['block_size']} slots")
    if wrong:
        raise ArtifactError(f"{path}: made for another drafter or setting: {'; '.join(wrong)}; run calibrate again")
    return dict(data)
