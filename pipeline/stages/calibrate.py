"""`calibrate`: record rounds on calibration prompts, fit STS on half of them, report on the other half (S24, S25).

The prompts are the corpus' calibration split, or sets of your own (`calibrate.prompt_sets`): scores are worth most on
the traffic that will be served.

    dspark calibrate -c FILE

One file per served temperature: `sts-T<t>.json`, beside the records it came from. Killed anywhere, the same command
goes on from the chunks that exist; ranks and array tasks share them.
"""

from __future__ import annotations

from typing import Any

from pipeline.artifact import Artifact, sha256_file, write_json
from pipeline.chain import StageContext, share
from pipeline.corpus.prompts import Prompt, calibration_prompts, choose, distinct
from pipeline.decoding.calibration import calibrate, join, mean, save_records
from pipeline.decoding.playing import Player
from pipeline.decoding.plots import reliability_plot
from pipeline.decoding.portions import CHUNK
from pipeline.decoding.recorded import import_shards
from pipeline.draft.io import TENSORS, read_description
from pipeline.errors import DataError
from pipeline.progress import progress, say


def run(context: StageContext) -> None:
    """Publish this process's chunks of records; whoever finds all of them fits and writes the manifest."""
    config, artifact = context.config, context.artifact
    folder = context.inputs["train"].path / "draft"
    described, _ = read_description(folder)
    if not described.confidence:
        say(f"calibrate: a {described.kind} drafter without a confidence head has nothing to calibrate")
        artifact.finish(calibrated=False)
        return
    identity = {
        "checkpoint": sha256_file(folder / TENSORS), "block_size": described.block_size, "layout": described.layout,
    }  # fmt: skip
    if config.calibrate.records is not None:
        _import(context, identity)
        return
    prompts = choose(_prompts(context), config.calibrate.num_prompts)
    if len(prompts) < 2:
        raise DataError(
            "calibrate: fewer than two prompts; raise data.calibration_fraction or name calibrate.prompt_sets"
        )
    units = _units(context, prompts)
    mine = artifact.missing(list(units) if config.target.tensor_parallel else share(list(units)))
    if mine:
        player = Player.load(config, context.target_path, dtype=config.calibrate.dtype, drafter=folder)
        total = sum(len(prompt.turns) for name in mine for prompt in units[name][1])
        with progress(total, what="calibrate", unit="answers") as bar:
            for name in mine:
                temperature, chunk = units[name]
                with artifact.shard(name) as shard:
                    played = player.play(
                        chunk, temperature=temperature, max_new_tokens=config.calibrate.max_new_tokens,
                        batch_size=config.calibrate.batch_size, on_answer=lambda answer: bar.advance(),
                    )  # fmt: skip
                    shard.row["samples"] = save_records(shard.path, played, {**identity, "temperature": temperature})
    if not artifact.missing(units):
        for temperature in config.calibrate.temperatures:
            parts = [artifact.path / file for file, (at, _) in units.items() if at == temperature]
            join(parts, artifact.path / f"records-T{temperature:g}.npz")
        _finish(context, artifact, list(units))


def _prompts(context: StageContext) -> list[Prompt]:
    """Prompts that differ: one that is asked twice would be fitted on and reported on (S25)."""
    found = calibration_prompts(context.config.calibrate, context.inputs["data"])
    apart = distinct(found)
    if len(apart) < len(found):
        say(f"calibrate: {len(found) - len(apart)} of {len(found)} prompts ask what another one asks; left out")
    return apart


def _import(context: StageContext, identity: dict[str, Any]) -> None:
    """Records taken by a serving engine at the one configured temperature, instead of decoding."""
    settings = context.config.calibrate
    (temperature,) = settings.temperatures
    path = context.artifact.path / f"records-T{temperature:g}.npz"
    count = import_shards(str(settings.records), path, {**identity, "temperature": temperature})
    say(f"calibrate: {count} recorded rounds from {settings.records}")
    _finish(context, context.artifact, [])


def _units(context: StageContext, prompts: list[Prompt]) -> dict[str, tuple[float, list[Prompt]]]:
    return {
        f"records/T{temperature:g}-{start // CHUNK:03d}.npz": (temperature, prompts[start : start + CHUNK])
        for temperature in context.config.calibrate.temperatures
        for start in range(0, len(prompts), CHUNK)
    }


def _finish(context: StageContext, artifact: Artifact, shards: list[str]) -> None:
    if artifact.complete:  # another rank came first
        return
    files, summary = [], {}
    for temperature in context.config.calibrate.temperatures:
        name = f"T{temperature:g}"
        records = artifact.path / f"records-{name}.npz"
        found = calibrate(records, bins=context.config.calibrate.bins)
        write_json(artifact.path / f"sts-{name}.json", found)
        plot = reliability_plot(found, artifact.path / "plots" / f"reliability-{name}.png")
        files += [records.name, f"sts-{name}.json", *([f"plots/{plot.name}"] if plot else [])]
        summary[name] = _tell(context, name, found)
    for file in files:
        context.tracker.file(artifact.path / file, "calibrate")
    artifact.finish(shards, files, calibrated=True, ece=summary)


def _tell(context: StageContext, name: str, found: dict[str, Any]) -> dict[str, Any]:
    before, after = mean(found["ece_before"]), mean(found["ece_after"])
    for warning in found["warnings"]:
        say(f"calibrate {name}: worse on {warning}", warning=True)
    shown = ["no data" if value is None else f"{value:.4f}" for value in (before, after)]
    say(f"calibrate {name}: mean ECE on report prompts {shown[0]} -> {shown[1]}{_certainty(found)}; "
        f"temperatures {', '.join(f'{value:.2f}' for value in found['temperatures'])}")  # fmt: skip
    known = {f"ece_before_{name}": before, f"ece_after_{name}": after}
    context.tracker.metrics({key: value for key, value in known.items() if value is not None})
    return {"before": before, "after": after, "change_interval": found["ece_change_interval"]}


def _certainty(found: dict[str, Any]) -> str:
    """The interval of the change, and whether so few prompts could tell it from none."""
    if found["ece_change_interval"] is None:
        return ""
    low, high = found["ece_change_interval"]
    doubt = ", which may be no change at all" if low <= 0 <= high else ""
    return f" ({low:+.4f} ... {high:+.4f}, 95 % over {found['report_prompts']} prompts{doubt})"
