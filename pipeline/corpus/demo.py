"""Demo prompts that need no download: maths, code and chat from three small registry packages, as ShareGPT rows.

They stand in for Open-PerfectBlend in `configs/smollm2.yaml`. What they lack: long multi-turn chats and real users.
`gsm_symbolic` is generated without end (seeded), so its source needs a `limit`; the others are packaged sets.
"""

from __future__ import annotations

import gzip
import importlib.resources
import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

_FORMAT_NOTE = re.compile(r"\s*Give (?:the|your) (?:result|answer)[^?]*?final answer.*\Z", re.DOTALL)
_MAX_PROMPT_CHARACTERS = 600  # a few codeio tasks are pages long; a small target answers those with noise
_MAX_CHAT_TURNS = 8


def demo_size(name: str) -> int | None:
    """Rows of a packaged demo set; None for a generator without end."""
    return None if name == "gsm_symbolic" else len(_packaged(name))


def demo_rows(name: str, *, start: int, stop: int, seed: int) -> Iterator[dict[str, Any]]:
    """Rows start…stop−1 of a demo set as {conversations: [{from, value}], source}; a pure function of its arguments."""
    if name == "gsm_symbolic":
        yield from _gsm_symbolic(start, stop, seed)
    else:
        yield from _packaged(name)[start:stop]


def _packaged(name: str) -> list[dict[str, Any]]:
    return _codeio() if name == "codeio" else _chatterbot()


def _row(source: str, *turns: str) -> dict[str, Any]:
    speakers = ("human", "gpt")
    return {
        "conversations": [{"from": speakers[i % 2], "value": turn} for i, turn in enumerate(turns)],
        "source": source,
    }


def _gsm_symbolic(start: int, stop: int, seed: int) -> Iterator[dict[str, Any]]:
    """Grade-school word problems with worked answers; the generator's note on answer format is taken off."""
    import reasoning_gym

    problems = reasoning_gym.create_dataset("gsm_symbolic", seed=seed, size=max(stop, 1))
    for index in range(start, stop):
        problem = problems[index]
        question = _FORMAT_NOTE.sub("", problem["question"]).strip()
        yield _row("gsm_symbolic", question, problem["metadata"]["answer_cot"])


@cache
def _codeio() -> list[dict[str, Any]]:
    """One request for a Python function per distinct task. Tasks over 600 characters are left out."""
    packed = importlib.resources.files("reasoning_gym").joinpath("data/codeio.jsonl.gz").read_bytes()
    rows: dict[str, dict[str, Any]] = {}
    for line in gzip.decompress(packed).splitlines():
        task = json.loads(line)
        wanted = task["task_description"].strip()
        if len(wanted) <= _MAX_PROMPT_CHARACTERS:
            prompt = f"Write a Python function for the following task.\n\n{wanted}"
            rows.setdefault(wanted, _row("codeio", prompt, f"```python\n{task['code_sample'].strip()}\n```"))
    return list(rows.values())


@cache
def _chatterbot() -> list[dict[str, Any]]:
    """English dialogues, one per distinct opening (the set repeats openings with other replies)."""
    import yaml

    folder = importlib.resources.files("chatterbot_corpus").joinpath("data/english")
    rows: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        for dialogue in yaml.safe_load(file.read_text(encoding="utf-8"))["conversations"]:
            turns = [str(turn).strip() for turn in dialogue[:_MAX_CHAT_TURNS]]
            if all(turns):
                rows.setdefault(turns[0], _row("chatterbot", *turns))
    return list(rows.values())
