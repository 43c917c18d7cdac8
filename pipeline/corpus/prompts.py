"""Prompt sets: published benchmarks by name, any JSONL file, or the chain's own held-out split.

    prompts = load_prompts("gsm8k")                        # from the hub, or its local cache when offline
    prompts = load_prompts("my/prompts.jsonl")             # lines of {"turns": [...]}, or chats in any known shape
    prompts = load_prompts("heldout", data=artifact)       # the evaluation split of the data stage

Used to measure (evaluate, calibrate) and to keep the same questions out of the corpus (decontamination). Imports
neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pipeline.artifact import Artifact
from pipeline.benchmarks import BENCHMARKS, HELDOUT, Benchmark
from pipeline.config import Calibrate
from pipeline.corpus.files import BLANK, Raw, file_rows
from pipeline.corpus.hub import hub_rows
from pipeline.corpus.normalise import Skip, normalise
from pipeline.corpus.rows import read_rows, shards_of
from pipeline.errors import ConfigError, DataError, DsparkError
from pipeline.identity import hub_commit


@dataclass(frozen=True)
class Prompt:
    """One conversation to be answered: the user's turns in order. `domain` groups prompts in reports."""

    id: str
    turns: tuple[str, ...]
    domain: str
    system: str | None = None


def load_prompts(name: str, *, data: Artifact | None = None) -> list[Prompt]:
    """Prompts of a set, in a fixed order.

    Raises:
        ConfigError: the name is neither a known set nor a file, or `heldout` is asked for without a data artifact.
        DataError: the set cannot be read, is empty, or a line of the file holds no prompt.
    """
    if name == HELDOUT:
        if data is None:
            raise ConfigError("prompt set heldout: it is the evaluation split of a data stage, and there is none here")
        prompts = list(split_prompts(data, "evaluation"))
    elif Path(name).is_file():
        prompts = list(_in_file(Path(name)))
    elif name in BENCHMARKS:
        prompts = list(_from_hub(name, BENCHMARKS[name]))
    else:
        raise ConfigError(f"prompt set {name!r}: no such file, and not one of {', '.join([HELDOUT, *BENCHMARKS])}")
    if not prompts:
        raise DataError(f"prompt set {name}: holds no prompt")
    return prompts


def first_prompts(path: Path, count: int) -> list[Prompt]:
    """The first `count` prompts of a file, for a look before anything slow. Raises DataError as `load_prompts` does."""
    prompts = list(islice(_in_file(path), count))
    if not prompts:
        raise DataError(f"prompt set {path}: holds no prompt")
    return prompts


def calibration_prompts(settings: Calibrate, data: Artifact) -> list[Prompt]:
    """What STS may be fitted on: `calibrate.prompt_sets`, or the calibration split."""
    if settings.prompt_sets is None:
        return list(split_prompts(data, "calibration"))
    return [prompt for name in settings.prompt_sets for prompt in load_prompts(name, data=data)]


def distinct(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first of those that ask the same."""
    apart: dict[Any, Prompt] = {}
    for prompt in prompts:
        apart.setdefault((prompt.system, prompt.turns), prompt)
    return list(apart.values())


def choose(prompts: Sequence[Prompt], count: int | None) -> list[Prompt]:
    """`count` prompts (None: all), the same ones every time and from all over the set: those whose ids hash lowest."""
    if count is None or count >= len(prompts):
        return list(prompts)
    return sorted(prompts, key=lambda prompt: hashlib.sha256(prompt.id.encode()).digest())[:count]


def split_prompts(data: Artifact, split: str) -> Iterator[Prompt]:
    """User turns of a split of the data artifact, up to the first tool turn; rows without any are left out."""
    for shard in shards_of(data.manifest(), split):
        for row in read_rows(data.path / shard):
            system, turns = _turns(row.messages)
            if turns:
                yield Prompt(row.id, turns, row.source, system)


def _turns(messages: list[dict[str, Any]]) -> tuple[str | None, tuple[str, ...]]:
    system: str | None = None
    turns: list[str] = []
    for message in messages:
        if message["role"] == "tool" or "tool_calls" in message:
            turns = turns[:-1]  # the last question was one for the tool
            break
        if message["role"] == "user":
            turns.append(message["content"])
        elif message["role"] == "system" and not turns:
            system = message["content"]
    return system, tuple(turns)


def _in_file(path: Path) -> Iterator[Prompt]:
    return (_from_file(raw, path) for raw in file_rows(path) if raw.problem != BLANK)


def _from_file(raw: Raw, path: Path) -> Prompt:
    if raw.problem is not None:
        raise DataError(f"{path}:{raw.line}: {raw.problem} {raw.detail}")
    value = raw.value if isinstance(raw.value, dict) else {}
    domain = str(value.get("domain") or value.get("category") or value.get("source") or path.name.split(".", 1)[0])
    name = str(value.get("id") or f"{path.name.split('.', 1)[0]}-{raw.line:05d}")
    turns = _texts(value.get("turns"))
    if turns:
        return Prompt(name, turns, domain)
    try:
        _, messages, _ = normalise(raw.value, roles={}, name=None, default_source=domain)
    except Skip as skip:
        raise DataError(f"{path}:{raw.line}: no `turns` and no chat ({skip.reason}); one prompt a line") from skip
    system, turns = _turns(messages)
    if not turns:
        raise DataError(f"{path}:{raw.line}: no question but one for a tool; one prompt a line")
    return Prompt(name, turns, domain, system)


def _texts(value: Any) -> tuple[str, ...]:
    """Texts of a list of strings or of {content} objects."""
    items = value if isinstance(value, list | tuple) else [value]
    texts = [item.get("content") if isinstance(item, dict) else item for item in items]
    return tuple(text for text in texts if isinstance(text, str) and text.strip())


def _from_hub(name: str, benchmark: Benchmark) -> Iterator[Prompt]:
    for number, value in enumerate(_hub_rows(name, benchmark)):
        turns = _texts(value.get(benchmark.column))
        addition = value.get(benchmark.addition) if benchmark.addition else None
        if addition:
            turns = (f"{turns[0]}\n\n{addition}",)
        yield Prompt(f"{name}-{number:05d}", tuple(benchmark.form.format(turn) for turn in turns), benchmark.domain)


def _hub_rows(name: str, benchmark: Benchmark) -> Iterator[dict[str, Any]]:
    try:
        if benchmark.files:
            from huggingface_hub import hf_hub_download

            commit = hub_commit(benchmark.repository, None)
            for file in benchmark.files:
                path = hf_hub_download(benchmark.repository, file, repo_type="dataset", revision=commit)
                yield from (raw.value for raw in file_rows(Path(path)) if raw.problem is None)
            return
        yield from hub_rows(benchmark.repository, subset=benchmark.subset, split=benchmark.split)
    except (OSError, ValueError, DsparkError) as error:
        raise DataError(
            f"prompt set {name}: {benchmark.repository} cannot be read from the hub or its cache "
            f"({type(error).__name__}: {error}). `dspark fetch -c FILE` brings it where there is a network; a JSONL "
            'file of {"turns": [...]} works as well'
        ) from error
