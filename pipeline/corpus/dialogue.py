"""Playing a conversation anew: the user's turns stay, the target answers them, turn by turn.

    dialogue = Dialogue(row)
    while (messages := dialogue.question()) is not None:
        text, reason = ...                                 # the target's answer to `messages`
        dialogue.answer({"content": text}, reason)
    dialogue.row()                                         # the answered row, or Skip

Kept as they are, and marked `given` in `finish_reasons` so that they are never trained on: assistant turns that call a
tool, because the tool's reply in the data belongs to that very call. Imports neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from pipeline.corpus.normalise import Skip
from pipeline.corpus.rows import FINISHED, Message, Row

GIVEN = "given"
SERVER_ERROR = "server_error"  # why a row was left out that no endpoint would answer: another time one may


@dataclass
class Dialogue:
    """The state of one conversation being answered. `cut_answers` keep: it ends at a cut answer; drop: the row goes."""

    original: Row
    cut_answers: str = "keep"
    messages: list[Message] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    failed: Skip | None = None
    _place: int = 0

    @property
    def turn(self) -> int:
        """Number of the next answer, from 0."""
        return len(self.finish_reasons)

    def question(self) -> list[Message] | None:
        """The conversation up to the next turn that needs an answer; None when there is none left."""
        given = self.original.messages
        while self._place < len(given) and self.failed is None:
            message, after = given[self._place], given[self._place + 1 : self._place + 2]
            self._place += 1
            if message["role"] == "assistant":
                if "tool_calls" in message:
                    self.messages.append(message)
                    self.finish_reasons.append(GIVEN)
                continue
            self.messages.append(message)
            calls_follow = bool(after) and "tool_calls" in after[0]
            tools_follow = bool(after) and after[0]["role"] == "tool"
            if message["role"] in ("user", "tool") and not calls_follow and not tools_follow:
                return list(self.messages)
        return None

    def answer(self, message: Message, reason: str) -> None:
        """Take the target's answer to the last question. `reason` is stop, length, or a server's own word.

        A word that is not one of `FINISHED` (length, abort, none at all) means that the answer is cut.
        """
        cut = reason not in FINISHED
        thought = cut and message.get("reasoning_content")  # the limit came before the answer proper
        if not message["content"].strip() and not message.get("tool_calls") and not thought:
            self.fail(Skip("empty_answer", f"turn {self.turn}, finish reason {reason}"))
            return
        if cut and self.cut_answers == "drop":
            self.fail(Skip("truncated_answer", f"turn {self.turn}, finish reason {reason}"))
            return
        self.messages.append({"role": "assistant", **message})
        self.finish_reasons.append(reason)
        if cut or message.get("tool_calls"):
            # What follows in the data would answer something else than a cut answer, or a call of a tool.
            self._place = len(self.original.messages)

    def fail(self, skip: Skip) -> None:
        self.failed = skip

    def row(self) -> Row:
        """The answered row, under the id it came with. Raises the Skip of a dialogue that failed."""
        if self.failed is not None:
            raise self.failed
        original = self.original
        return Row(original.id, original.source, self.messages, original.tools, self.finish_reasons)


def seed_of(seed: int, row_id: str, turn: int) -> int:
    """63-bit sampling seed of one answer: the same whichever process gives it, and in whatever order."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{row_id}:{turn}".encode()).digest()[:8], "big") >> 1


def expected_answers(row: Row) -> int:
    """Answers a row asks for, before any is cut."""
    probe, count = Dialogue(row), 0
    while probe.question() is not None:
        probe.answer({"content": "."}, "stop")
        count += 1
    return count


def shard_facts(dialogues: list[Dialogue]) -> tuple[list[Row], dict[str, Any]]:
    """Answered rows in order, and the facts of their shard: samples, finish reasons, skips."""
    rows: list[Row] = []
    reasons: dict[str, int] = {}
    skipped: dict[str, int] = {}
    listing: list[dict[str, Any]] = []
    for dialogue in dialogues:
        try:
            row = dialogue.row()
        except Skip as skip:
            skipped[skip.reason] = skipped.get(skip.reason, 0) + 1
            listing.append({"id": dialogue.original.id, "reason": skip.reason, **skip.facts})
            continue
        rows.append(row)
        for reason in dialogue.finish_reasons:
            reasons[reason] = reasons.get(reason, 0) + 1
    facts = {"samples": len(rows), "finish_reasons": reasons, "skipped": skipped, "skipped_rows": listing}
    return rows, facts
