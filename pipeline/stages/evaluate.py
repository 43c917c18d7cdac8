"""`evaluate`: accepted length, curves and speed of a drafter on prompts it has not seen (S20-S23).

    dspark evaluate -c FILE

Decodes every prompt with the drafter and without, scores prompt lookup on the same outputs, and writes `report.json`,
`report.md`, `outputs.jsonl` and plots. Chunks of prompts are the units of work: shared by ranks and array tasks, kept
when killed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pipeline.artifact import Artifact, atomic_path, read_json, sha256_file, write_json
from pipeline.chain import StageContext, share
from pipeline.corpus.prompts import load_prompts
from pipeline.decoding.calibration import read_calibration
from pipeline.decoding.markdown import page, tau_text
from pipeline.decoding.playing import Player
from pipeline.decoding.plots import acceptance_plot
from pipeline.decoding.policies import Calibrated, policy_for
from pipeline.decoding.report import DEFINITIONS, Group, Setting, build
from pipeline.decoding.units import Unit, choose, plan, run_unit
from pipeline.draft.config import DraftConfig
from pipeline.draft.io import TENSORS, read_description
from pipeline.progress import progress, say


def run(context: StageContext) -> None:
    """Publish this process's units; whoever finds all of them there writes report and manifest."""
    config, artifact = context.config, context.artifact
    described, _ = read_description(context.inputs["train"].path / "draft")
    for temperature in config.evaluate.temperatures:
        _policy(context, described, temperature)
    sets = {
        name: choose(load_prompts(name, data=context.inputs["data"]), config.evaluate.num_prompts)
        for name in config.evaluate.prompt_sets
    }
    units = plan(config.evaluate, sets)
    wanted = set(artifact.missing(share([unit.file for unit in units])))
    if mine := [unit for unit in units if unit.file in wanted]:
        _decode(context, described, mine)
    if not artifact.missing([unit.file for unit in units]):
        _finish(context, described, units)


def _decode(context: StageContext, described: DraftConfig, units: Sequence[Unit]) -> None:
    config, artifact = context.config, context.artifact
    folder = context.inputs["train"].path / "draft"
    player = Player.load(config, context.target_path, dtype=config.evaluate.dtype, drafter=folder)
    total = sum(len(prompt.turns) for unit in units for prompt in unit.prompts) * (1 + config.evaluate.vanilla)
    with progress(total, what="evaluate", unit="answers") as bar:
        for unit in units:
            policy = _policy(context, described, unit.temperature)
            with artifact.shard(unit.file) as shard:
                facts = run_unit(player, unit, shard.path, policy=policy, on_answer=lambda answer: bar.advance())
                shard.row.update(facts, first_prompt=player.first_prompt(unit.prompts[0]))


def _policy(context: StageContext, described: DraftConfig, temperature: float) -> Calibrated | None:
    """The scheduling policy of a unit, with the STS temperatures made for this drafter and temperature, if any."""
    settings = context.config.evaluate
    scale = None
    if settings.policy not in ("full", "static_length") and described.confidence:
        checkpoint = sha256_file(context.inputs["train"].path / "draft" / TENSORS)
        expected = {
            "checkpoint": checkpoint, "temperature": temperature, "block_size": described.block_size,
            "layout": described.layout,
        }  # fmt: skip
        file = context.inputs["calibrate"].path / f"sts-T{temperature:g}.json"
        if file.exists():
            scale = read_calibration(file, expected)["temperatures"]
        else:
            say(
                f"evaluate: no STS file for temperature {temperature:g}; the policy reads raw confidences", warning=True
            )
    sps = read_json(context.inputs["profile"].path / "sps.json")
    return policy_for(settings, confidence=described.confidence, temperatures=scale, sps=sps)


def _finish(context: StageContext, described: DraftConfig, units: Sequence[Unit]) -> None:
    config, artifact = context.config, context.artifact
    settings = config.evaluate
    groups = _groups(artifact, units)
    setting = Setting(
        described.kind, described.block_size, settings.batch_size, settings.bootstrap, config.seed, settings.policy
    )
    report = {
        "drafter": described.kind, "layout": described.layout, "block_size": described.block_size,
        "target": config.target.model or "tiny", "batch_size": settings.batch_size, "dtype": settings.dtype,
        "policy": settings.policy, "max_new_tokens": settings.max_new_tokens, "top_p": settings.top_p,
        "top_k": settings.top_k, "definitions": DEFINITIONS, "records": build(groups, setting),
        "first_prompt": (artifact.row(units[0].file) or {})["first_prompt"],
    }  # fmt: skip
    if settings.policy in ("early_stop", "lagged_global"):
        report["sps_source"] = read_json(context.inputs["profile"].path / "sps.json")["source"]
    write_json(artifact.path / "report.json", report)
    with atomic_path(artifact.path / "report.md") as path:
        path.write_text(page(report), encoding="utf-8")
    files = ["report.json", "report.md"]
    if (plot := acceptance_plot(report["records"], artifact.path / "plots" / "acceptance.png")) is not None:
        files.append(f"plots/{plot.name}")
    for file in files:
        context.tracker.file(artifact.path / file, "evaluate")
    _tell(context, report)
    artifact.finish([unit.file for unit in units], files, tau=_taus(report))


def _groups(artifact: Artifact, units: Sequence[Unit]) -> list[Group]:
    keys = dict.fromkeys((unit.prompt_set, unit.temperature) for unit in units)
    groups = []
    for name, temperature in keys:
        files = [unit.file for unit in units if (unit.prompt_set, unit.temperature) == (name, temperature)]
        lines = [
            json.loads(line)
            for file in files
            for line in (artifact.path / file).read_text(encoding="utf-8").splitlines()
        ]
        groups.append(Group(name, temperature, lines, [artifact.row(file) or {} for file in files]))
    return groups


def _taus(report: dict[str, Any]) -> dict[str, float | None]:
    pooled = [record for record in report["records"] if record["domain"] is None]
    return {f"{record['drafter']}/{record['prompts']}/T{record['temperature']:g}": record["tau"] for record in pooled}


def _tell(context: StageContext, report: dict[str, Any]) -> None:
    context.tracker.metrics({f"tau/{name}": value for name, value in _taus(report).items() if value is not None})
    say(f"evaluate: first prompt as rendered: {report['first_prompt']!r}")
    for record in report["records"]:
        if record["domain"] is not None:
            continue
        speed = record.get("tokens_per_second")
        vanilla = record.get("vanilla_tokens_per_second")
        say(
            f"evaluate {record['prompts']} T={record['temperature']:g}: {record['drafter']} tau {tau_text(record)}"
            + (f", {speed:.1f} tokens/s" if speed else "")
            + (f" against {vanilla:.1f} without" if vanilla else "")
        )
        for fault in record.get("lossless", {}).get("faults", ()):
            say(f"evaluate: greedy output of {fault['id']} differs from the target's own: {fault}", warning=True)
