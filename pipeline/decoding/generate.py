"""`dspark generate "…"`: one answer with the trained drafter, accepted tokens marked.

    dspark generate "Count from 3 to 8." -c configs/debug.yaml

Text the drafter proposed and the target accepted is green in a terminal and between ‹ › elsewhere; the rest is the
target's own next token after each block.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from pipeline import chain as chain_table
from pipeline.config import Config, Evaluate, validate
from pipeline.corpus.prompts import Prompt
from pipeline.decoding.engine import Generation
from pipeline.decoding.playing import Player
from pipeline.errors import ArtifactError, DataError
from pipeline.identity import target_folder
from pipeline.progress import say

_MARKS = {True: ("\033[32m", "\033[0m"), False: ("‹", "›")}


def generate(config: Config, arguments: argparse.Namespace) -> None:
    """Print the answer to `arguments.text`, its tau and speed.

    Raises ConfigError for options out of range, ArtifactError before the train stage has finished, DataError when the
    prompt cannot be answered.
    """
    settings = _asked(config, arguments)
    train = chain_table.resolve(config)["train"]
    if not train.complete:
        raise ArtifactError(f"generate reads the trained drafter, and {train.path} is not finished: run `dspark run`")
    player = Player.load(config, target_folder(config), dtype=config.evaluate.dtype, drafter=train.path / "draft")
    started = time.perf_counter()
    (played,) = player.play(
        [Prompt("prompt", (arguments.text,), "prompt")],
        temperature=settings.temperatures[0],
        max_new_tokens=settings.max_new_tokens,
        batch_size=1,
    )
    seconds = time.perf_counter() - started
    if played.error is not None:
        raise DataError(f"generate: {played.error}")
    answer = played.answers[0]
    say(marked(answer, player.template.decode, terminal=sys.stdout.isatty()), result=True)
    say(facts(answer, seconds), result=True)


def _asked(config: Config, arguments: argparse.Namespace) -> Evaluate:
    """`evaluate` with what was asked for in the place of its own, within the same bounds."""
    tree = config.model_dump(mode="json")
    tree["evaluate"]["temperatures"] = [arguments.temperature or 0.0]
    if arguments.max_new_tokens is not None:
        tree["evaluate"]["max_new_tokens"] = arguments.max_new_tokens
    return validate(tree).evaluate


def from_draft(answer: Generation) -> list[bool]:
    """For every token of an answer: drafted and accepted, or the target's own (the first one included)."""
    flags = [False]
    for step in answer.rounds:
        flags += [True] * step.accepted + [False] * step.bonus
    return flags[: len(answer.ids)]


def marked(answer: Generation, decode: Callable[[Sequence[int]], str], *, terminal: bool) -> str:
    """The answer's text with runs of accepted tokens marked. Text is cut where whole characters end."""
    opening, closing = _MARKS[terminal]
    flags, parts, done = from_draft(answer), [], 0
    for place in range(1, len(flags) + 1):
        last = place == len(flags)
        if not last and flags[place] == flags[place - 1]:
            continue
        text = decode(answer.ids[:place])
        if text.endswith("�") and not last:
            continue
        piece, done = text[done:], len(text)
        parts.append(f"{opening}{piece}{closing}" if flags[place - 1] and piece else piece)
    return "".join(parts)


def facts(answer: Generation, seconds: float) -> str:
    """One line: tokens, tau, speed, how it ended."""
    tokens = sum(step.accepted + step.bonus for step in answer.rounds)
    tau = f"tau {tokens / len(answer.rounds):.2f} over {len(answer.rounds)} rounds" if answer.rounds else "no round"
    return (
        f"{len(answer.ids)} tokens in {seconds:.1f} s ({len(answer.ids) / seconds:.1f} tokens/s), {tau}, "
        f"ended by {answer.finish_reason}"
    )
