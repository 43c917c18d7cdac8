"""Training rows: which tokens of a conversation the target itself would have produced (S29).

    rendered = training_rows(template, row, config.tokens)
    rendered.rows[0].ids, rendered.rows[0].mask; rendered.skipped

A mask is never found by searching for header text, which a user may quote: an answer is what the conversation's render
has beyond its prompt's render, and it must begin with the answer's own text. Imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline import config as schema
from pipeline.corpus.normalise import Skip
from pipeline.corpus.rows import FINISHED, Message, Row
from pipeline.corpus.template import ChatTemplate

_MARK = "\ue000"  # a character of private use: no template prints it, no conversation means anything by it


@dataclass(frozen=True)
class TokenRow:
    """One training row: ids and loss mask of equal length; `turn` counts the conversation's assistant turns from 0."""

    ids: list[int]
    mask: list[int]
    turn: int


@dataclass
class Rendered:
    """What a conversation gave: rows, and (turn, reason, detail) of everything that gave none."""

    rows: list[TokenRow] = field(default_factory=list)
    skipped: list[tuple[int, str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Answer:
    """ids[start:stop] of a conversation are the last turn's answer, ids[stop:ended] what ends the turn.

    That is one stop token, behind white space where the template prints some; nothing where the answer was cut.
    """

    ids: list[int]
    start: int
    stop: int
    ended: int


def training_rows(template: ChatTemplate, row: Row, settings: schema.Tokens) -> Rendered:
    """Training rows of a conversation (S29): one per assistant turn, or the last one only.

    Reasons of what is left out: no_assistant, given (a turn the target did not produce), template_error,
    render_mismatch, stop_token_in_answer, tool_turn_not_rendered, system_turn_not_rendered, tools_not_rendered,
    tool_calls_not_rendered, truncated_no_answer, too_few_supervised.
    """
    turns = [place for place, message in enumerate(row.messages) if message["role"] == "assistant"]
    rendered, longest_prompt = Rendered(), 0
    if not turns:
        rendered.skipped.append((0, "no_assistant", ""))
    for turn, place in enumerate(turns):
        if settings.multi_turn == "last" and place != turns[-1]:
            continue
        reason = row.finish_reasons[turn] if row.finish_reasons else "stop"
        try:
            if reason == "given":
                raise Skip("given", "a tool call or other turn that the target did not produce")
            if longest_prompt >= 2 * settings.max_length:  # later ones are longer, or only lack the reasoning in it
                shown = f"an earlier turn's prompt has {longest_prompt} tokens, max_length keeps {settings.max_length}"
                raise Skip("truncated_no_answer", shown)
            ids, mask = _turn(template, row, place, cut=reason not in FINISHED, settings=settings)
            rendered.rows.append(TokenRow(ids, mask, turn))
        except Skip as skip:
            longest_prompt = max(longest_prompt, skip.facts.get("prompt_tokens", 0))
            rendered.skipped.append((turn, skip.reason, str(skip.facts.get("detail", ""))))
    return rendered


def _turn(
    template: ChatTemplate, row: Row, place: int, *, cut: bool, settings: schema.Tokens
) -> tuple[list[int], list[int]]:
    messages = row.messages[: place + 1]
    answer = find_answer(template, messages, row.tools, cut=cut)
    if quoted := [token for token in answer.ids[answer.start : answer.stop] if token in template.stop_ids]:
        # In decoding the text ends at the first of them (S22): nobody generates what follows.
        raise Skip("stop_token_in_answer", f"the answer's own text holds {template.decode(quoted[:1])!r}")
    mask = [0] * len(answer.ids)
    mask[answer.start : answer.stop] = [1] * (answer.stop - answer.start)
    if template.marks_generation and not cut:
        mask = [a & b for a, b in zip(mask, template.generation_mask(messages, row.tools), strict=True)]
    if settings.supervise_end_of_turn:
        mask[answer.stop : answer.ended] = [1] * (answer.ended - answer.stop)
    ids, mask = answer.ids[: settings.max_length], mask[: settings.max_length]
    if sum(mask) < settings.min_loss_tokens:
        if len(answer.ids) > settings.max_length:
            shown = f"{len(answer.ids)} tokens, max_length keeps {settings.max_length}"
            raise Skip("truncated_no_answer", shown, prompt_tokens=answer.start)
        raise Skip("too_few_supervised", f"{sum(mask)} supervised tokens")
    return ids, mask


def find_answer(
    template: ChatTemplate, messages: Sequence[Message], tools: list[Any] | None, *, cut: bool = False
) -> Answer:
    """Ids of a conversation that ends in an assistant turn, and which of them are that turn's answer.

    Raises Skip(render_mismatch) unless the prompt's ids and then the answer are a prefix of the row's ids (S29).
    """
    before = template.render(messages[:-1], tools, prompt=True)
    _check_rendered(messages[:-1], tools, before)
    prompt, last = template.encode(before), messages[-1]
    if cut and not ({"reasoning_content", "tool_calls"} & last.keys()):
        # What the target met: its answer breaks off, and no token of the template follows.
        ids = prompt + template.encode(last["content"])
        return Answer(ids, len(prompt), len(ids), ended=len(ids))
    whole = template.render(messages, tools, prompt=False)
    ids, ends = template.encode_with_ends(whole)
    _check_prefix(template, prompt, ids)
    _check_calls(last, whole[len(before) :])
    end = _end_of_answer(template, whole, len(before), messages, tools, cut=cut)
    stop = len(prompt)
    while stop < len(ids) and ends[stop] <= end:
        stop += 1
    if "tool_calls" in last:  # the calls follow the content, up to the end of the turn
        while stop < len(ids) and ids[stop] not in template.stop_ids:
            stop += 1
    return Answer(ids, len(prompt), stop, ended=stop if cut else _end_of_turn(template, ids, stop))


def _end_of_turn(template: ChatTemplate, ids: Sequence[int], stop: int) -> int:
    """Place behind the stop token that follows an answer, white space before it included; `stop` where none does."""
    place = stop
    while place < len(ids) and ids[place] not in template.stop_ids and template.decode([ids[place]]).isspace():
        place += 1
    return place + 1 if place < len(ids) and ids[place] in template.stop_ids else stop


def _check_prefix(template: ChatTemplate, prompt: list[int], ids: list[int]) -> None:
    for place, (wanted, found) in enumerate(zip(prompt, ids, strict=False)):
        if wanted != found:
            shown = f"the prompt has {template.decode([wanted])!r}, the conversation {template.decode([found])!r}"
            raise Skip("render_mismatch", f"token {place}: {shown}")
    if len(ids) <= len(prompt):
        raise Skip("render_mismatch", "the rendered conversation is no longer than its prompt")


def _check_rendered(messages: Sequence[Message], tools: list[Any] | None, text: str) -> None:
    """A turn, call or tool list that the template passes over would be missing from what the target is asked."""
    for message in messages:
        if message["role"] in ("system", "tool") and not _stands_in(message["content"].strip(), text):
            raise Skip(f"{message['role']}_turn_not_rendered", "the template leaves this turn out")
        _check_calls(message, text)
    if tools and str(tools[0].get("function", tools[0]).get("name", "")) not in text:
        raise Skip("tools_not_rendered", "the template leaves the tools out")


def _stands_in(content: str, text: str) -> bool:
    """Whether a template printed this content: as it is, or as a JSON string (what some do with a tool's reply)."""
    return content in text or json.dumps(content, ensure_ascii=False)[1:-1] in text


def _check_calls(message: Message, text: str) -> None:
    for call in message.get("tool_calls", ()):
        if call["function"]["name"] not in text:
            raise Skip("tool_calls_not_rendered", f"the template leaves the call of {call['function']['name']} out")


def _end_of_answer(
    template: ChatTemplate, whole: str, start: int, messages: Sequence[Message], tools: list[Any] | None, *, cut: bool
) -> int:
    """Character after the answer that begins at `start` of a rendered conversation; the calls of tools come behind it.

    The answer must be there as written, but for white space (templates trim): a template that puts something else
    first, such as an empty think block the target never generates, raises Skip(render_mismatch).
    """
    last = messages[-1]
    content, reasoning = last["content"], last.get("reasoning_content", "")
    if content.strip() and not reasoning:
        end = _follow(whole, start, content)
    else:
        # A template's own markers stand before the content: where it ends shows when more is added to it.
        grown = "reasoning_content" if cut and not content.strip() and reasoning else "content"
        longer = template.render([*messages[:-1], {**last, grown: last[grown] + _MARK}], tools, prompt=False)
        end = start if longer == whole else len(os.path.commonprefix([whole, longer]))
    answer = "" if end is None else _squeezed(whole[start:end])
    if reasoning and _squeezed(reasoning) not in answer.removesuffix(_squeezed(content)):
        raise Skip("render_mismatch", "the template leaves the reasoning out")
    if end is None or not answer.endswith(_squeezed(content)) or (answer and not content.strip() and not reasoning):
        raise Skip("render_mismatch", f"after the prompt comes {whole[start : start + 40]!r}, not {content[:40]!r}")
    return end


def _squeezed(text: str) -> str:
    return "".join(text.split())


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
    while content[-1:].isspace() and at < len(text) and text[at].isspace():
        at += 1
    return at
