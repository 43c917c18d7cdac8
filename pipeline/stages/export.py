"""`export`: the trained drafter as checkpoints that serving engines load, each proved before it gets its name.

    dspark export -c FILE export.layouts=[deepspec,speculators]

One folder per layout: config.json, safetensors, the target's tokenizer and template, STS and SPS files, a model card
and `export_manifest.json`; in MLflow a version of the registered model named like the experiment. Refused before
anything is written: a layout that cannot carry the drafter, an engine that must serve it and cannot. Seconds on a CPU;
the target's decoder layers are not read.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from pipeline import engines, stopping
from pipeline.artifact import read_json
from pipeline.chain import StageContext
from pipeline.decoding.calibration import read_calibration
from pipeline.draft.config import DraftConfig
from pipeline.draft.interface import Drafter
from pipeline.draft.io import TENSORS, load_drafter
from pipeline.errors import ConfigError
from pipeline.frozen import Frozen, load_frozen
from pipeline.layouts import files, sidefiles
from pipeline.layouts.card import Story, card
from pipeline.layouts.config_json import Origin
from pipeline.layouts.publish import Options, facts_of, publish
from pipeline.layouts.registry import model_entry
from pipeline.progress import say
from pipeline.tracking import redact

TOLD = ("data", "answers", "tokens", "targets", "train", "calibrate", "profile", "evaluate")


def run(context: StageContext) -> None:
    """Write every layout of `export.layouts` that is not there yet, then the manifest.

    Raises ConfigError before anything is written, ArtifactError when a folder does not read back as the drafter.
    """
    config, export, artifact = context.config, context.config.export, context.artifact
    drafter, meta = load_drafter(context.inputs["train"].path / "draft")
    target = config.target
    frozen = load_frozen(str(context.target_path), revision=target.revision, trust_remote_code=target.trust_remote_code)
    facts = facts_of(drafter, frozen, target_type=frozen.config.model_type)
    engines.refuse(export.layouts, export.engines, facts)
    story, side_files = tell(context, drafter, facts)
    origin = describe(context, frozen, meta)
    lineage = {name: made.fingerprint for name, made in context.chain.items()}
    proved: dict[str, Any] = {}
    for layout in export.layouts:
        stopping.check()
        folder = artifact.path / layout
        if not folder.exists():
            options = Options(
                dtype=export.dtype,
                target_tensors=export.include_target_tensors,
                max_shard_bytes=export.max_shard_bytes,
                side_files=side_files,
                tokenizer=functools.partial(copy_tokenizer, context),
                card=functools.partial(card, story, layout),
            )
            publish(folder, drafter, layout=layout, frozen=frozen, origin=origin, options=options)
        entry = model_entry(folder, name=config.experiment, lineage=lineage)
        proved[layout] = {key: value for key, value in read_json(folder / files.HASHES).items() if key != "files"}
        served = ", ".join(engines.servers(layout, facts)) or "none"
        say(f"export: {folder} ({proved[layout]['bytes']:,} bytes; read back and equal; engines: {served})")
        context.tracker.model(entry.name, entry.folder, entry.description, entry.tags)
        context.tracker.metrics({f"{layout}.max_logit_difference": proved[layout]["max_logit_difference"]})
    written = [path for layout in export.layouts for path in (artifact.path / layout).rglob("*") if path.is_file()]
    names = sorted(path.relative_to(artifact.path).as_posix() for path in written)
    artifact.finish(files=names, layouts=proved)


def copy_tokenizer(context: StageContext, folder: Path) -> list[str]:
    """The target's tokenizer, with the chat template the drafter was trained under."""
    template = context.config.template.chat_template
    return files.copy_tokenizer(
        str(context.target_path), folder, revision=context.config.target.revision, chat_template=template
    )


def describe(context: StageContext, frozen: Frozen, meta: dict[str, Any]) -> Origin:
    """What config.json says about the target and the run."""
    text = frozen.config
    ends = {key: getattr(text, key, None) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return Origin(
        target=str(context.target_path),
        architectures=tuple(getattr(text, "architectures", None) or ()),
        max_position_embeddings=int(getattr(text, "max_position_embeddings", None) or 32768),
        ends=ends,
        meta={
            **meta,
            "target_type": text.model_type,
            "artifact": context.artifact.fingerprint,
            "drafter": context.inputs["train"].fingerprint,
        },
    )


def tell(context: StageContext, drafter: Drafter, facts: engines.Facts) -> tuple[Story, dict[str, Any]]:
    """The model card's contents, and the side files that ship (name -> JSON)."""
    inputs, export = context.inputs, context.config.export
    side_files: dict[str, Any] = {}
    names: dict[str, str] = {}
    calibration = find_calibration(context, drafter.config)
    if calibration is not None:
        names["sts"] = f"sts-T{sidefiles.temperature_name(export.temperature)}.json"
        side_files[names["sts"]] = sidefiles.sts_file(
            calibration, block_size=drafter.config.block_size, where=str(inputs["calibrate"].path)
        )
        profile_path = inputs["profile"].path / "sps.json"
        profile = read_json(profile_path)
        names["sps"] = "sps.json"
        side_files[names["sps"]] = sidefiles.sps_file(profile, where=str(profile_path))
    else:
        profile = None
    chain = context.chain
    story = Story(
        facts=facts,
        target=str(context.target_path),
        block_size=drafter.config.block_size,
        dtype=export.dtype,
        license=export.license,
        manifests={name: redact(chain[name].manifest()) for name in TOLD if name in chain and chain[name].complete},
        records=read_json(inputs["evaluate"].path / "report.json")["records"],
        calibration=calibration,
        profile=profile,
        side_files=names,
        coverage=chain["train"].manifest().get("coverage"),
    )
    return story, side_files


def find_calibration(context: StageContext, described: DraftConfig) -> dict[str, Any] | None:
    """The STS file fitted for this drafter at `export.temperature`; None when there is nothing to calibrate.

    Raises ConfigError when only other temperatures were fitted: one of those would be wrong silently (S25).
    """
    calibrate, wanted = context.inputs["calibrate"], context.config.export.temperature
    if not described.confidence:
        return None
    path = calibrate.path / f"sts-T{wanted:g}.json"
    if not path.exists():
        fitted = ", ".join(each.name for each in sorted(calibrate.path.glob("sts-T*.json"))) or "none"
        raise ConfigError(f"export.temperature: {wanted:g} was not calibrated; there are: {fitted}")
    expected = {
        "checkpoint": context.inputs["train"].facts()[f"draft/{TENSORS}"]["sha256"],
        "temperature": wanted,
        "block_size": described.block_size,
        "layout": described.layout,
    }
    return read_calibration(path, expected)
