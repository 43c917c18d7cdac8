"""The target's own chat template: conversations to token ids, and which of them the target would have produced.

    template = ChatTemplate(folder, config.template)
    template.render_prompt(messages, tools)                # ids up to where the target starts to answer
    template.rows(row, config.tokens)                      # training rows with loss masks (S29), and what was left out

Ids are those of `apply_chat_template(tokenize=True)`, so no BOS is added twice. A mask is never found by searching for
header text, which a user may quote: an answer is what a render has beyond the prompt's render. Imports no torch itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline import config as schema
from pipeline.artifact import digest
from pipeline.corpus.answered import Answer, end_of_answer
from pipeline.corpus.normalise import Skip
from pipeline.corpus.rows import Message, Row
from pipeline.errors import ConfigError

_GENERATION = re.compile(r"\{%-?\s*generation\b")
_RENDER_ERRORS = (TypeError, ValueError, KeyError, IndexError, AttributeError)
# Templates that print today's date would make yesterday's tokens differ from today's.
FIXED_DATE = "01 Jan 2025"


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


class ChatTemplate:
    """A tokenizer with its template, in one thinking mode and with one system prompt.

    Args:
        path: local folder or hub id of the target.
        template: the config section.

    Raises:
        ConfigError: no template, or one that cannot render a question and an answer.
    """

    def __init__(
        self,
        path: str | Path,
        template: schema.Template,
        *,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        from transformers import AutoTokenizer

        self.path, self.settings, self.revision = str(path), template, revision
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(
                self.path, revision=revision, trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"target.model: {path}: its tokenizer cannot be loaded ({error})") from error
        if template.chat_template is not None:
            self.tokenizer.chat_template = Path(template.chat_template).read_text(encoding="utf-8")
        if not self.tokenizer.chat_template:
            raise ConfigError(
                f"target.model: {path} has no chat template (a base model?); name one in template.chat_template"
            )
        if not self.tokenizer.is_fast:
            raise ConfigError(f"target.model: {path} has a slow tokenizer; a tokenizer.json is needed for loss masks")
        self.text = str(self.tokenizer.get_chat_template())
        self.marks_generation = bool(_GENERATION.search(self.text))

    # ------------------------------------------------------------------------------------------ rendering

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation as rendered: the configured system prompt first, where it has no system turn."""
        prompt = self.settings.system_prompt
        if prompt is None or any(message["role"] == "system" for message in messages):
            return list(messages)
        return [{"role": "system", "content": prompt}, *messages]

    def render(self, messages: Sequence[Message], tools: list[Any] | None = None, *, prompt: bool) -> str:
        """Text of a conversation; with `prompt`, up to where the target starts to answer.

        Raises Skip(template_error) when the template refuses the conversation.
        """
        from jinja2.exceptions import TemplateError

        try:
            return str(
                self.tokenizer.apply_chat_template(
                    self.messages(messages),
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=prompt,
                    **self._variables,
                )
            )
        except (TemplateError, *_RENDER_ERRORS) as error:
            raise Skip("template_error", f"{type(error).__name__}: {error}") from error

    def render_prompt(self, messages: Sequence[Message], tools: list[Any] | None = None) -> list[int]:
        """Ids the target is given to answer the last turn. Raises Skip(template_error)."""
        return self.encode(self.render(messages, tools, prompt=True))

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of generated ids, special tokens (think markers, tool calls) included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @cached_property
    def _variables(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.settings.thinking is not None:
            found["enable_thinking"] = self.settings.thinking
        if "date_string" in self.text:
            found["date_string"] = FIXED_DATE
        return found

    # ------------------------------------------------------------------------------------------ training rows

    def rows(self, row: Row, settings: schema.Tokens) -> Rendered:
        """Training rows of a conversation (S29): one per assistant turn, or the last one only.

        Reasons of what is left out: no_assistant, given (a turn the target did not produce), template_error,
        render_mismatch, tool_turn_not_rendered, system_not_rendered, tools_not_rendered, truncated_no_answer,
        too_few_supervised.
        """
        turns = [place for place, message in enumerate(row.messages) if message["role"] == "assistant"]
        rendered = Rendered()
        if not turns:
            rendered.skipped.append((0, "no_assistant", ""))
        for turn, place in enumerate(turns):
            if settings.multi_turn == "last" and place != turns[-1]:
                continue
            reason = row.finish_reasons[turn] if row.finish_reasons else "stop"
            try:
                if reason == "given":
                    raise Skip("given", "a tool call or other turn that the target did not produce")
                ids, mask = self._turn(row, place, cut=reason == "length", settings=settings)
                rendered.rows.append(TokenRow(ids, mask, turn))
            except Skip as skip:
                rendered.skipped.append((turn, skip.reason, str(skip.facts.get("detail", ""))))
        return rendered

    def _turn(self, row: Row, place: int, *, cut: bool, settings: schema.Tokens) -> tuple[list[int], list[int]]:
        answer = self.answer(row.messages[: place + 1], row.tools, cut=cut)
        mask = [0] * len(answer.ids)
        mask[answer.start : answer.stop] = [1] * (answer.stop - answer.start)
        if self.marks_generation and not cut:
            marked = self._marked(row.messages[: place + 1], row.tools)
            mask = [a & b for a, b in zip(mask, marked, strict=True)]
        if answer.ended and settings.supervise_end_of_turn:
            mask[answer.stop] = 1
        ids, mask = answer.ids[: settings.max_length], mask[: settings.max_length]
        if sum(mask) < settings.min_loss_tokens:
            if len(answer.ids) > settings.max_length:
                raise Skip("truncated_no_answer", f"{len(answer.ids)} tokens, max_length keeps {settings.max_length}")
            raise Skip("too_few_supervised", f"{sum(mask)} supervised tokens")
        return ids, mask

    def answer(self, messages: Sequence[Message], tools: list[Any] | None, *, cut: bool = False) -> Answer:
        """Ids of a conversation that ends in an assistant turn, and which of them are that turn's answer.

        Raises Skip(render_mismatch) unless the prompt's ids and then the answer are a prefix of the row's ids (S29).
        """
        before = self.render(messages[:-1], tools, prompt=True)
        self._check_rendered(messages[:-1], tools, before)
        prompt, last = self.encode(before), messages[-1]
        if cut and not ({"reasoning_content", "tool_calls"} & last.keys()):
            # What the target met: its answer ends in the middle, with nothing after it.
            ids = prompt + self.encode(last["content"])
            return Answer(ids, len(prompt), len(ids), ended=False)
        whole = self.render(messages, tools, prompt=False)
        encoded = self.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
        self._check_prefix(prompt, ids)
        end = end_of_answer(whole, len(before), last)
        stop = len(prompt)
        while stop < len(ids) and offsets[stop][1] <= end:
            stop += 1
        if "tool_calls" in last:  # the calls follow the content, up to the end of the turn
            while stop < len(ids) and ids[stop] not in self.stop_ids:
                stop += 1
        ended = not cut and stop < len(ids) and ids[stop] in self.stop_ids
        return Answer(ids, len(prompt), stop, ended)

    def _check_prefix(self, prompt: list[int], ids: list[int]) -> None:
        for place, (wanted, found) in enumerate(zip(prompt, ids, strict=False)):
            if wanted != found:
                shown = f"the prompt has {self.decode([wanted])!r}, the conversation {self.decode([found])!r}"
                raise Skip("render_mismatch", f"token {place}: {shown}")
        if len(ids) <= len(prompt):
            raise Skip("render_mismatch", "the rendered conversation is no longer than its prompt")

    @staticmethod
    def _check_rendered(messages: Sequence[Message], tools: list[Any] | None, text: str) -> None:
        for message in messages:
            if message["role"] in ("system", "tool") and message["content"].strip() not in text:
                raise Skip(f"{message['role']}_turn_not_rendered", "the template leaves this turn out")
        if tools and str(tools[0].get("function", tools[0]).get("name", "")) not in text:
            raise Skip("tools_not_rendered", "the template leaves the tools out")

    def _marked(self, messages: Sequence[Message], tools: list[Any] | None) -> list[int]:
        """The template's own `{% generation %}` spans."""
        encoded = self.tokenizer.apply_chat_template(
            self.messages(messages), tools=tools, tokenize=True, return_dict=True,
            return_assistant_tokens_mask=True, **self._variables,
        )  # fmt: skip
        return list(encoded["assistant_masks"])

    # ------------------------------------------------------------------------------------------ facts

    @cached_property
    def end_of_turn(self) -> int | None:
        """The token the template puts right after an answer, when it is a special one."""
        chat = [{"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": "Blue7"}]
        try:
            whole = self.render(chat, prompt=False)
        except Skip as skip:
            raise ConfigError(
                f"{self.path}: its template cannot render a question and an answer: {skip.facts}"
            ) from skip
        after = self.encode(whole[whole.rindex("Blue7") + len("Blue7") :].lstrip())
        special = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)
        return after[0] if after and after[0] in special else None

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: the generation config's, the tokenizer's eos, and the template's end-of-turn."""
        found: set[int] = set()
        for value in (self._generation_eos(), self.tokenizer.eos_token_id, self.end_of_turn):
            found.update(value if isinstance(value, list) else [] if value is None else [value])
        return tuple(sorted(found))

    def _generation_eos(self) -> Any:
        from transformers.utils import cached_file

        for name in ("generation_config.json", "config.json"):
            file = cached_file(
                self.path, name, revision=self.revision,
                _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False,
            )  # fmt: skip
            value = json.loads(Path(file).read_text(encoding="utf-8")).get("eos_token_id") if file else None
            if value is not None:
                return value
        return None

    def info(self) -> dict[str, Any]:
        """What travels with tokens, targets and checkpoints: two templates with equal info make equal tokens."""
        return {
            "hash": hashlib.sha256(self.text.encode()).hexdigest()[:16],
            "thinking": self.settings.thinking,
            "system_prompt": self.settings.system_prompt,
            "tokenizer_hash": digest(self.tokenizer.get_vocab(), 16),
            "date": FIXED_DATE if "date_string" in self.text else None,
        }


def mismatches(trained: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Differences between two `info()` records, one line each with both values; empty when the chat modes agree."""
    keys = [key for key in trained if key in current]
    return [
        f"template.{key}: {trained[key]!r} then, {current[key]!r} now" for key in keys if trained[key] != current[key]
    ]
