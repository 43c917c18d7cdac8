"""One unit of evaluation: a chunk of one prompt set at one temperature, decoded with and without the drafter.

Units are what ranks share and what a killed run keeps. A unit's file has one line per prompt (ids, rounds, errors); its
facts hold the timings. Everything reported later is summed from these lines, so no split of the work changes a number.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config import Evaluate
from pipeline.corpus.prompts import Prompt
from pipeline.decoding import lookup
from pipeline.decoding.engine import Generation
from pipeline.decoding.lossless import first_difference
from pipeline.decoding.playing import Played, Player
from pipeline.decoding.portions import CHUNK
from pipeline.decoding.rounds import Clock, Policy
from pipeline.decoding.teacher_forced import acceptance_sums
from pipeline.speculative.verify import Law

TEACHER_FORCED = 8  # prompts of a unit whose first answer is read once more by target and drafter


@dataclass(frozen=True)
class Unit:
    """`file` is the published name, e.g. outputs/heldout-T1-000.jsonl."""

    file: str
    prompt_set: str
    temperature: float
    prompts: tuple[Prompt, ...]


def slug(prompt_set: str) -> str:
    """A prompt set's name as part of a file name."""
    return Path(prompt_set).name.split(".", 1)[0] if "/" in prompt_set or "." in prompt_set else prompt_set


def plan(settings: Evaluate, sets: Mapping[str, Sequence[Prompt]]) -> list[Unit]:
    """All units in a fixed order, whoever works on them."""
    return [
        Unit(
            f"outputs/{number}-{slug(name)}-T{temperature:g}-{start // CHUNK:03d}.jsonl",
            name,
            temperature,
            tuple(prompts[start : start + CHUNK]),
        )
        for number, (name, prompts) in enumerate(sets.items())
        for temperature in settings.temperatures
        for start in range(0, len(prompts), CHUNK)
    ]


def run_unit(
    player: Player, unit: Unit, path: Path, *, policy: Policy | None, on_answer: Callable[[Generation], None]
) -> dict[str, Any]:
    """Decode a unit, write its lines to `path`, and return its facts: counts and timings."""
    settings, block_size = player.config.evaluate, player.drafter.config.block_size
    # The overrun shows lookup's last round before the length cut, too.
    options: dict[str, Any] = {
        "temperature": unit.temperature, "top_p": settings.top_p, "top_k": settings.top_k,
        "max_new_tokens": settings.max_new_tokens, "overrun": block_size + 1 if settings.lookup else 0,
        "batch_size": settings.batch_size, "on_answer": on_answer,
    }  # fmt: skip
    facts: dict[str, Any] = {"samples": len(unit.prompts)}
    clock, started = Clock(player.target.device), time.perf_counter()
    drafted = player.play(unit.prompts, policy=policy, clock=clock, **options)
    facts["draft"] = timing(clock, drafted, time.perf_counter() - started)
    vanilla: list[Played] | None = None
    if settings.vanilla:
        clock, started = Clock(player.target.device), time.perf_counter()
        vanilla = player.play(unit.prompts, drafted=False, clock=clock, **options)
        facts["vanilla"] = timing(clock, vanilla, time.perf_counter() - started)
    lines = [
        _line(player, item, None if vanilla is None else vanilla[place], unit) for place, item in enumerate(drafted)
    ]
    law = Law(unit.temperature, settings.top_p, settings.top_k)
    for place in range(0, len(drafted), -(-len(drafted) // TEACHER_FORCED)):
        item = drafted[place]
        if item.answers:
            output = item.answers[0].cut(settings.max_new_tokens).ids
            lines[place]["teacher_forced"] = acceptance_sums(player.target, player.drafter, item.asked[0], output, law)
    path.write_text("".join(json.dumps(line, sort_keys=True) + "\n" for line in lines), encoding="utf-8")
    return facts


def timing(clock: Clock, played: Sequence[Played], wall_seconds: float) -> dict[str, Any]:
    """Seconds by part, batch rounds, row rounds and tokens of everything that was decoded."""
    answers = [answer for item in played for answer in item.answers]
    return {
        "seconds": dict(clock.seconds),
        "wall_seconds": wall_seconds,
        "batch_rounds": clock.rounds,
        "row_rounds": sum(len(answer.rounds) for answer in answers),
        "round_tokens": sum(step.accepted + step.bonus for answer in answers for step in answer.rounds),
        "tokens": sum(len(answer.ids) for answer in answers),
    }


def _line(player: Player, item: Played, vanilla: Played | None, unit: Unit) -> dict[str, Any]:
    settings, block_size = player.config.evaluate, player.drafter.config.block_size
    limit = settings.max_new_tokens
    line: dict[str, Any] = {"id": item.prompt.id, "domain": item.prompt.domain, "error": item.error}
    line["turns"] = [_turn(answer.cut(limit)) for answer in item.answers]
    if settings.lookup:
        line["lookup"] = [
            lookup.rounds(
                asked, answer.ids, limit=limit, block_size=block_size, stop_ids=player.template.stop_ids
            )
            for asked, answer in zip(item.asked, item.answers, strict=False)
        ]  # fmt: skip
    if vanilla is not None:
        line["vanilla"] = [_turn(answer.cut(limit)) for answer in vanilla.answers]
        line["vanilla_error"] = vanilla.error
        if unit.temperature == 0.0:
            found = [
                first_difference(player.target, asked, answer.cut(limit).ids, own.cut(limit).ids)
                for asked, answer, own in zip(item.asked, item.answers, vanilla.answers, strict=False)
            ]
            # A later turn is asked with what the earlier ones answered: only the first difference means anything.
            different = next((difference for difference in found if difference is not None), None)
            line["difference"] = None if different is None else different.plain()
    return line


def _turn(answer: Generation) -> dict[str, Any]:
    """rounds: [scheduled, accepted, bonus, confidence logits or null]."""
    return {
        "prompt_tokens": answer.prompt_length,
        "ids": answer.ids,
        "finish_reason": answer.finish_reason,
        "rounds": [
            [step.scheduled, step.accepted, step.bonus, _rounded(step.confidence)] for step in answer.rounds
        ],
    }  # fmt: skip


def _rounded(logits: Sequence[float] | None) -> list[float] | None:
    return None if logits is None else [round(value, 4) for value in logits]
