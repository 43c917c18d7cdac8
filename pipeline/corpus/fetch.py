"""`dspark fetch -c FILE`: bring what a configuration names on the hub to this machine, for nodes that reach no hub.

Run it on a login node; compute nodes then work with HF_HUB_OFFLINE=1 on the same cache (HF_HOME). Fetched are the
target (weights, config, tokenizer), hub data sources and the named prompt sets. What is there already is not fetched
again. Imports no torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from pipeline.benchmarks import BENCHMARKS
from pipeline.config import Config, Source
from pipeline.corpus.prompts import load_prompts
from pipeline.errors import ConfigError, DataError, DsparkError
from pipeline.identity import hub_commit, local_files
from pipeline.progress import say

_MODEL_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt", "*.py")


def fetch(config: Config, arguments: argparse.Namespace | None = None) -> None:
    """Fetch everything the configuration names on the hub, and say where each thing lies.

    Raises ConfigError where the environment forbids the network, DataError with all that could not be fetched.
    """
    from huggingface_hub import constants

    wanted = needed(config)
    if not wanted:
        say("fetch: this configuration names nothing on the hub")
        return
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"HF_HUB_OFFLINE is set, but {', '.join(wanted)} must come from the hub: unset it here")
    problems = []
    for name, bring in wanted.items():
        try:
            say(f"fetch: {name}: {bring()}")
        except DsparkError as error:
            problems.append(f"{name}: {error}")
        except Exception as error:  # noqa: BLE001 - the hub client raises many kinds; all are told, none hides another
            problems.append(f"{name}: {type(error).__name__}: {error}".splitlines()[0])
    if problems:
        raise DataError("\n".join(["could not fetch:", *problems]))


def needed(config: Config) -> dict[str, Callable[[], str]]:
    """What lies on the hub: a label, and the function that brings it and says where it is."""
    wanted: dict[str, Callable[[], str]] = {}
    model = config.target.model
    if model is not None and not Path(model).is_dir():
        wanted[f"target {model}"] = lambda: _model(model, config.target.revision)
    for source in config.data.sources:
        if source.path is not None and not local_files(source.path):
            wanted[f"data {source.path}"] = lambda source=source: _data(source)  # type: ignore[misc]
    forbidden = config.data.decontaminate.prompt_sets if config.data.decontaminate else ()
    for name in dict.fromkeys([*config.evaluate.prompt_sets, *(config.calibrate.prompt_sets or ()), *forbidden]):
        if name in BENCHMARKS and not Path(name).is_file():
            wanted[f"prompts {name}"] = lambda name=name: f"{len(load_prompts(name))} prompts"  # type: ignore[misc]
    return wanted


def _model(model: str, revision: str | None) -> str:
    from huggingface_hub import snapshot_download

    folder = Path(snapshot_download(model, revision=revision, allow_patterns=list(_MODEL_FILES)))
    if not (folder / "config.json").exists():
        raise DataError(f"{folder} has no config.json: not a transformers model")
    size_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return f"{folder} ({size_bytes / 1e6:,.1f} MB, revision {folder.name})"


def _data(source: Source) -> str:
    from pipeline.corpus.sources import hub_split

    rows = hub_split(source)
    files = [Path(entry["filename"]) for entry in rows.cache_files]
    commit = hub_commit(str(source.path), source.revision)
    return f"{len(rows)} rows in {files[0].parent if files else 'memory'} (revision {commit})"
