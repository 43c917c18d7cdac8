"""Where an answer lies inside a rendered conversation."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.corpus.normalise import Skip
from pipeline.corpus.rows import Message


@dataclass(frozen=True)
class Answer:
    """ids[start:stop] of a conversation are the last turn's answer. `ended`: ids[stop] is its end-of-turn token."""

    ids: list[int]
    start: int
    stop: int
    ended: bool


def end_of_answer(text: str, start: int, message: Message) -> int:
    """Character after the answer that begins at `start` of a rendered conversation.

    The answer must be there as written, but for white space (templates trim): a template that puts something else
    first, such as an empty think block the target never generates, raises Skip(render_mismatch).
    """
    at = start
    reasoning = message.get("reasoning_content")
    if reasoning:
        found = text.find(reasoning.strip(), start)
        if found < 0:
            raise Skip("render_mismatch", "the template leaves the reasoning out")
        at = found + len(reasoning.strip())
        at = _opening(text, at, message["content"])
    end = _follow(text, at, message["content"])
    if end is None:
        shown = text[start : start + 40]
        raise Skip("render_mismatch", f"after the prompt comes {shown!r}, the answer is {message['content'][:40]!r}")
    return end


def _opening(text: str, at: int, content: str) -> int:
    """Where the content begins behind the reasoning and its closing marker."""
    if not content.strip():
        return at
    found = text.find(content.strip(), at)
    return at if found < 0 else found


def _follow(text: str, at: int, content: str) -> int | None:
    """End of `content` at `at`, white space ignored; None when something else stands there."""
    if text.startswith(content, at):
        return at + len(content)
    for character in content:
        if character.isspace():
            continue
        while at < len(text) and text[at].isspace():
            at += 1
        if at >= len(text) or text[at] != character:
            return None
        at += 1
    return at
