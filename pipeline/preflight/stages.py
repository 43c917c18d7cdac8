"""What a stage would refuse hours later, though the configuration tells it already."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline import engines
from pipeline.artifact import read_json
from pipeline.benchmarks import HELDOUT
from pipeline.chain import STAGES
from pipeline.config import Config
from pipeline.corpus.prompts import Prompt, distinct, first_prompts
from pipeline.errors import DataError
from pipeline.identity import recorded_files, target_file, target_json
from pipeline.preflight import checkpoint
from pipeline.preflight.facts import TargetFacts

# Layers whose state can be cut back after a rejected draft; the engine's cache holds no others.
ATTENTION_KINDS = ("full_attention", "sliding_attention", "chunked_attention")
_LOOKED_AT = 1000  # prompts of a file
_DECODING = ("answers", "calibrate", "profile", "evaluate")  # where a model runs in them, token after token


def problems(config: Config, stages: Sequence[str], facts: TargetFacts, *, begun: Sequence[str] = ()) -> Iterator[str]:
    """What would end one of `stages`, none of them finished, after those before it have run.

    Those of them in `begun` go on from what they left, not from what they started with.
    """
    yield from _template(config, stages)
    yield from _decoding(
        config, [name for name in _DECODING if name in stages and STAGES[name].computes(config)], facts
    )
    yield from _spread(config, facts)
    if "targets" in stages or config.targets.mode == "live":
        yield from _half_precision(config)
    if "train" in stages and "train" not in begun:
        yield from _continuation(config)
        yield from checkpoint.problems(config, facts)
    yield from _prompt_files(config, stages)
    if "calibrate" in stages:
        yield from _calibration(config)
    if "evaluate" in stages:
        yield from _evaluation(config)
    if "export" in stages:
        yield from _export(config, facts)


def _template(config: Config, stages: Sequence[str]) -> Iterator[str]:
    rendering = {"answers", "tokens", "calibrate", "evaluate"} & set(stages)
    if not rendering or config.target.tiny is not None or config.template.chat_template is not None:
        return
    has_one = target_json(config, "tokenizer_config.json").get("chat_template") or any(
        target_file(config, name) for name in ("chat_template.jinja", "chat_template.json")
    )
    if not has_one:
        yield (
            f"target.model: {config.target.model} has no chat template (a base model?); "
            "name one in template.chat_template"
        )


# ------------------------------------------------------------------------------------------------ the target at work


def _decoding(config: Config, stages: Sequence[str], facts: TargetFacts) -> Iterator[str]:
    if not stages:
        return
    if config.target.attention == "flash_attention_2":
        yield (
            f"target.attention: flash_attention_2 cannot decode rows of different lengths ({', '.join(stages)}); "
            "use auto, or give it to the targets stage alone"
        )
    if odd := sorted(set(facts.text.get("layer_types") or ()) - set(ATTENTION_KINDS)):
        yield (
            f"target.model: layers of kind {', '.join(odd)} keep a running state that cannot be cut back after a "
            f"rejected draft ({', '.join(stages)}); only attention layers can be decoded here"
        )


def _spread(config: Config, facts: TargetFacts) -> Iterator[str]:
    """Heads must divide over the ranks of a tensor-parallel target."""
    if not config.target.tensor_parallel:
        return
    world = int(os.environ.get("WORLD_SIZE", config.launch.processes_per_node))
    heads = {name: facts.text.get(name) or 0 for name in ("num_attention_heads", "num_key_value_heads")}
    if odd := [f"{name} = {count}" for name, count in heads.items() if count % world]:
        yield f"target.tensor_parallel: {', '.join(odd)} cannot be split over {world} ranks"


def _half_precision(config: Config) -> Iterator[str]:
    if config.target.attention == "flash_attention_2" and config.targets.dtype == "float32":
        yield "targets.dtype: flash_attention_2 computes in bfloat16 only, found float32"


# ------------------------------------------------------------------------------------------------ stage by stage


def _continuation(config: Config) -> Iterator[str]:
    """The run `train.continue_from` names: finished, and not yet as long as this one is to be."""
    named = config.train.continue_from
    if named is None:
        return
    where = Path(named) if Path(named).is_dir() else config.work_dir / "train" / named
    if not (where / "manifest.json").exists():
        yield f"train.continue_from: {where} is not a finished train artifact (no manifest.json)"
        return
    ended = int(read_json(where / "manifest.json").get("steps", 0))
    if config.train.steps is not None and config.train.steps <= ended:
        yield (
            f"train.continue_from: train.steps is {config.train.steps}, the run already ended at step {ended}; "
            "name the new total"
        )


def _prompt_files(config: Config, stages: Sequence[str]) -> Iterator[str]:
    """Local prompt sets that are empty, or begin with what is no prompt."""
    forbidden = config.data.decontaminate
    named = {
        "data": ("data.decontaminate.prompt_sets", forbidden.prompt_sets if forbidden else ()),
        "calibrate": ("calibrate.prompt_sets", config.calibrate.prompt_sets or ()),
        "evaluate": ("evaluate.prompt_sets", config.evaluate.prompt_sets),
    }
    for stage, (setting, names) in named.items():
        found: list[Prompt] = []
        for path in (Path(name) for name in names if stage in stages):
            if path.is_file():  # what is neither a file nor a known name is told by the stage table
                try:
                    found += first_prompts(path, _LOOKED_AT)
                except DataError as error:
                    yield f"{setting}: {error}"
        if stage == "calibrate" and len(names) == 1 and len(found) < _LOOKED_AT and len(distinct(found)) == 1:
            yield f"{setting}: one prompt cannot be fitted on and reported on; name at least two"


def _calibration(config: Config) -> Iterator[str]:
    settings = config.calibrate
    if settings.records is not None:
        if not recorded_files(settings.records):
            yield f"calibrate.records: {settings.records}: no such file"
    elif config.data.calibration_fraction == 0 and settings.prompt_sets is None:
        yield "data.calibration_fraction: 0 leaves the calibrate stage without prompts; raise it"


def _evaluation(config: Config) -> Iterator[str]:
    settings = config.evaluate
    reads_confidence = settings.policy not in ("full", "static_length")
    if reads_confidence and not config.draft.confidence and config.train.published is None:
        yield f"evaluate.policy: {settings.policy} reads confidences, and this drafter has none (draft.confidence)"
    if config.data.evaluation_fraction == 0 and HELDOUT in settings.prompt_sets:
        yield f"data.evaluation_fraction: 0 leaves prompt set {HELDOUT} empty; raise it, or name other prompt_sets"


def _export(config: Config, facts: TargetFacts) -> Iterator[str]:
    """A layout that cannot carry the drafter, an engine that could not serve it, a temperature nobody fitted."""
    if config.train.published is not None:
        return  # the checkpoint says what the drafter is
    refused = engines.early_refusals(config, facts.text)
    yield from (f"{problem} (export.layouts: [] exports nothing)" for problem in refused)
    wanted, fitted = config.export.temperature, config.calibrate.temperatures
    if config.export.layouts and config.draft.confidence and wanted not in fitted:
        listed = ", ".join(f"{each:g}" for each in fitted)
        yield f"export.temperature: {wanted:g} is not among the calibrated ones (calibrate.temperatures: {listed})"
