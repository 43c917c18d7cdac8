"""`evaluate`: accepted length, curves and speed of a drafter on prompts it has not seen (S20-S23).

    dspark evaluate -c FILE

Decodes every prompt with the drafter and without, scores prompt lookup on the same outputs, replays the scheduler lab,
and writes `report.json`, `report.md`, `lab.json` and plots. Chunks of prompts are the units of work: shared by ranks
and array tasks, kept when killed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.artifact import read_json, sha256_file
from pipeline.chain import StageContext, share
from pipeline.corpus.prompts import Prompt, calibration_prompts, choose, distinct, load_prompts
from pipeline.decoding.calibration import read_calibration
from pipeline.decoding.lab_report import lab_of
from pipeline.decoding.playing import Player
from pipeline.decoding.policies import Calibrated, policy_for
from pipeline.decoding.summary import gather, make_report, taus, tell, write_files
from pipeline.decoding.units import Unit, plan, run_unit
from pipeline.draft.config import DraftConfig
from pipeline.draft.io import TENSORS, read_description
from pipeline.progress import progress, say


def run(context: StageContext) -> None:
    """Publish this process's units; whoever finds all of them there writes report and manifest."""
    config, artifact = context.config, context.artifact
    described, _ = read_description(context.inputs["train"].path / "draft")
    for temperature in config.evaluate.temperatures:
        _policy(context, described, temperature)  # what can be refused is refused before weights are read
    sets = {
        name: choose(load_prompts(name, data=context.inputs["data"]), config.evaluate.num_prompts)
        for name in config.evaluate.prompt_sets
    }
    _warn_of_fitted(context, sets)
    units = plan(config.evaluate, sets)
    names = [unit.file for unit in units]
    wanted = set(artifact.missing(names if config.target.tensor_parallel else share(names)))
    if mine := [unit for unit in units if unit.file in wanted]:
        _decode(context, described, mine)
    if not artifact.missing(names):
        _finish(context, described, units)


def _warn_of_fitted(context: StageContext, sets: Mapping[str, Sequence[Prompt]]) -> None:
    """Prompts that were calibrated on under another name stay in the measurement, and are counted."""
    settings = context.config.calibrate
    if settings.records is not None or not context.inputs["calibrate"].manifest()["calibrated"]:
        return
    fitted = choose(distinct(calibration_prompts(settings, context.inputs["data"])), settings.num_prompts)
    known = {prompt.turns for prompt in fitted}
    for name, prompts in sets.items():
        if again := sum(prompt.turns in known for prompt in prompts):
            say(
                f"evaluate: {again} of {len(prompts)} prompts of {name} ask what calibrate asked, too: "
                "what reads calibrated scores looks better on them than it is",
                warning=True,
            )


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
        expected = {
            "checkpoint": sha256_file(context.inputs["train"].path / "draft" / TENSORS), "temperature": temperature,
            "block_size": described.block_size, "layout": described.layout,
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
    if artifact.complete:  # another rank came first
        return
    sps = read_json(context.inputs["profile"].path / "sps.json")
    first_prompt = (artifact.row(units[0].file) or {})["first_prompt"]
    groups = gather(artifact, units)
    report = make_report(config, described, groups, first_prompt=first_prompt, sps_source=sps["source"])
    lab = lab_of(context.inputs["calibrate"].path, sps, config.evaluate.temperatures, seed=config.seed)
    files = write_files(artifact.path, report, lab)
    context.tracker.metrics({f"tau/{name}": value for name, value in taus(report).items() if value is not None})
    for file in files:
        context.tracker.file(artifact.path / file, "evaluate")
    tell(report, lab)
    artifact.finish([unit.file for unit in units], files, tau=taus(report))
