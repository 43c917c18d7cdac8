"""The model card: README.md with Hugging Face metadata, made from what the run's artifacts say.

Nothing in it is typed by hand: numbers come from `report.json`, the recipe from the manifests, the commands from
`serve.py`. A figure the run does not have is left out, never filled in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pipeline import engines
from pipeline.engines import Facts
from pipeline.identity import DATA_FORMATS
from pipeline.layouts import serve

Record = Mapping[str, Any]
_NAMES = {"dspark": "DSpark", "dflash": "DFlash", "eagle3": "Eagle3", "mtp": "MTP", "medusa": "Medusa"}


@dataclass(frozen=True)
class Story:
    """What the card tells.

    `manifests`: stage -> manifest (config read, counts, fingerprint). `records`: rows of report.json. `calibration`:
    the whole STS file of the calibrate stage, `profile` the whole sps.json. `side_files`: sts / sps -> shipped name.
    """

    facts: Facts
    target: str
    block_size: int
    dtype: str
    license: str | None = None
    manifests: Mapping[str, Record] = field(default_factory=dict)
    records: Sequence[Record] = ()
    calibration: Record | None = None
    profile: Record | None = None
    side_files: Mapping[str, str] = field(default_factory=dict)
    coverage: float | None = None


def card(story: Story, layout: str, proved: Record) -> str:
    """The whole README.md of one layout's folder."""
    parts = [
        _metadata(story),
        _title(story, layout),
        _serving(story, layout),
        _results(story.records),
        _calibration(story),
        _recipe(story),
        _checked(story, layout, proved),
        _lineage(story.manifests),
        _licence(story),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _metadata(story: Story) -> str:
    data: dict[str, Any] = {
        "license": story.license or "other",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-model", story.facts.kind],
    }
    if _is_hub_id(story.target):
        data["base_model"] = story.target
    sources = [str(source["path"]) for source in _sources(story) if _is_hub_id(source.get("path"))]
    if sources:
        data["datasets"] = sources
    return f"---\n{yaml.safe_dump(data, sort_keys=True).strip()}\n---"


def _is_hub_id(name: Any) -> bool:
    """Whether a target or data source is a repository (owner/name), and no file or folder here."""
    if not isinstance(name, str) or name.count("/") != 1 or name.startswith((".", "/", "~")) or "*" in name:
        return False
    return not name.endswith(DATA_FORMATS) and not Path(name).exists()


def _title(story: Story, layout: str) -> str:
    name, block = _NAMES[story.facts.kind], story.block_size
    fills = " in the original fill-in layout" if story.facts.family == "fill_in" else ""
    text = (
        f"# {name} drafter for {story.target}\n\n"
        f"Drafts {block} tokens per round{fills} for speculative decoding. The target verifies every token, so outputs "
        f"are the target's own. Stored in the `{layout}` layout, {story.dtype}."
    )
    if story.facts.vocabulary:
        text += " It proposes from a reduced vocabulary; the tables `d2t` and `t2d` and the cut head are in the file."
        if story.coverage is not None:
            text += f" That vocabulary covers {100 * story.coverage:.1f} % of the supervised training tokens."
    return text


def _serving(story: Story, layout: str) -> str:
    lines = ["## Serving", ""]
    for engine in engines.ENGINES:
        reason = engines.engine_problem(engine, layout, story.facts)
        if reason is not None:
            lines += [f"- **{engine}**: no: it {reason}."]
            continue
        text = serve.command(
            engine, layout=layout, facts=story.facts, target=story.target, folder="DIR", tokens=story.block_size,
            side_files=story.side_files,
        )  # fmt: skip
        since = f" ({serve.VLLM_SINCE[serve.method(story.facts)]} or newer)" if engine == "vllm" else ""
        lines += (
            [f"- **{engine}**{since}:", f"  ```\n  {_indented(text)}\n  ```"]
            if text
            else [f"- **{engine}**: loads it."]
        )
    lines += ["", "`DIR` is this folder. No engine reads the side files from the folder by itself; name them as above."]
    return "\n".join(lines)


def _indented(text: str) -> str:
    return text.replace("\n", "\n  ")


def _results(records: Sequence[Record]) -> str:
    if not records:
        return ""
    columns = {
        "drafter": "drafter", "prompts": "prompts", "domain": "domain", "temperature": "T", "num_prompts": "n",
        "num_rounds": "rounds", "tau": "τ", "tau_interval": "95 %", "tokens_per_second": "tokens/s",
        "vanilla_tokens_per_second": "vanilla tokens/s",
    }  # fmt: skip
    used = [key for key in columns if any(record.get(key) is not None for record in records)]
    rows = [[_cell(key, record.get(key)) for key in used] for record in records]
    table = _table([columns[key] for key in used], rows)
    curves = [
        [_figure(record.get("drafter")), _figure(record.get("prompts")), _figure(record.get("temperature")),
         *(_figure(value) for value in record["conditional_acceptance"])]
        for record in records
        if isinstance(record.get("conditional_acceptance"), list) and record.get("domain") is None
    ]  # fmt: skip
    text = (
        "## Measured\n\nAccepted length τ = tokens per verify step, the target's own token included, pooled over the "
        f"set, stop-aware.\n\n{table}"
    )
    if curves:
        width = max(len(curve) for curve in curves)
        head = ["drafter", "prompts", "T", *(f"slot {k}" for k in range(1, width - 2))]
        filled = [curve + ["–"] * (width - len(curve)) for curve in curves]
        text += f"\n\nChance that a slot is accepted, given that the ones before it were:\n\n{_table(head, filled)}"
    return text


def _calibration(story: Story) -> str:
    parts = []
    if story.calibration is not None and "sts" in story.side_files:
        data = story.calibration
        keys = [key for key in ("temperatures", "ece_before", "ece_after") if data.get(key)]
        names = {"temperatures": "divide logit by", "ece_before": "ECE before", "ece_after": "ECE after"}
        slots = [f"slot {k}" for k in range(1, story.block_size + 1)]
        rows = [[names[key], *(_figure(value) for value in data[key])] for key in keys]
        parts.append(
            f"`{story.side_files['sts']}`: confidence = sigmoid(logit / t), fitted at served temperature "
            f"{_figure(data.get('temperature'))} on {_figure(data.get('num_samples'))} records; use it at that "
            f"temperature only.\n\n{_table(['', *slots], rows)}"
        )
    if story.profile is not None and "sps" in story.side_files:
        source, context = story.profile.get("source", "measured"), story.profile.get("context_length")
        parts.append(
            f"`{story.side_files['sps']}`: steps per second by tokens in a forward, {source}"
            f"{f', context {context}' if context else ''}, floor lookup. Measure it again on the machine that serves."
        )
    return "## Calibration\n\n" + "\n\n".join(parts) if parts else ""


def _sources(story: Story) -> list[Record]:
    config = (story.manifests.get("data") or {}).get("config") or {}
    return list((config.get("data") or {}).get("sources") or [])


def _recipe(story: Story) -> str:
    rows: list[list[str]] = []
    for source in _sources(story):
        name = source.get("path") or source.get("demo") or source.get("name")
        rows.append(["data", f"{name}" + (f", at most {source['limit']} rows" if source.get("limit") else "")])
    for stage, section in (
        ("answers", "answers"), ("tokens", "template"), ("tokens", "tokens"), ("targets", "targets"),
        ("train", "draft"), ("train", "train"),
    ):  # fmt: skip
        manifest = story.manifests.get(stage) or {}
        values = (manifest.get("config") or {}).get(section) or {}
        told = ", ".join(f"{key} {json.dumps(value)}" for key, value in values.items() if value not in (None, {}, []))
        if told:
            rows.append([section, told])
    return "## Recipe\n\n" + _table(["part", "settings"], rows) if rows else ""


def _checked(story: Story, layout: str, proved: Record) -> str:
    missing = ", ".join(proved.get("left_out") or [])
    without = f" Not in the file, because no engine reads it in this layout: {missing}." if missing else ""
    return (
        f"## Checked\n\nRead back from this folder alone: {proved['tensors']} tensors, {proved['parameters']:,} "
        f"values, names, shapes, dtypes and every configuration key as listed for the {layout} layout; the logits are "
        f"those of the trained drafter rounded to {story.dtype}, bit for bit (largest difference to the unrounded ones "
        f"{proved['max_logit_difference']:.2g}). `export_manifest.json` holds the SHA-256 of every file.{without}"
    )


def _lineage(manifests: Mapping[str, Record]) -> str:
    rows = [[stage, f"`{manifest.get('fingerprint')}`", str(manifest.get("git_revision") or "–")]
            for stage, manifest in manifests.items()]  # fmt: skip
    if not rows:
        return ""
    versions = (manifests.get("train") or {}).get("versions") or {}
    told = ", ".join(f"{name} {value}" for name, value in versions.items() if value != "absent")
    return (
        "## Made by\n\n" + _table(["stage", "artifact", "code"], rows) + (f"\n\nTrained with {told}." if told else "")
    )


def _licence(story: Story) -> str:
    if story.license:
        return f"## Licence\n\n{story.license}"
    return "## Licence\n\nThe drafter is derived from the target and the data named above; their licences apply."


def _cell(key: str, value: Any) -> str:
    """A cell of the results: accepted lengths with two decimals, as in the report."""
    if key not in ("tau", "tau_interval") or value is None:
        return _figure(value)
    return "–".join(f"{item:.2f}" for item in (value if isinstance(value, list) else [value]))


def _figure(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, list):
        return "–".join(_figure(item) for item in value)
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in cells)]
    return "\n".join(lines)
