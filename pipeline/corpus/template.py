"""The target's own chat template: conversations to token ids, in one thinking mode and with one system prompt.

    template = ChatTemplate(folder, config.template)
    template.render_prompt(messages, tools)                # ids up to where the target starts to answer
    template.stop_ids, template.info()

Ids are those of `apply_chat_template(tokenize=True)`, so no BOS is added twice. Training rows and their loss masks are
made in `masks`. Imports no torch itself.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline import config as schema
from pipeline.artifact import digest
from pipeline.corpus.normalise import Skip
from pipeline.corpus.rows import Message
from pipeline.errors import ConfigError

_GENERATION = re.compile(r"\{%-?\s*generation\b")
# A template is a program: what Python raises in it is the template's refusal of that row.
_RENDER_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
# Templates that print today's date would make yesterday's tokens differ from today's.
FIXED_DATE = "01 Jan 2025"
_FIXED_DAY = datetime.date(2025, 1, 1)
_DATE_FORM = re.compile(r"""strftime_now\(\s*["']([^"']*)["']""")


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
        if "strftime_now" in self.text:
            self.tokenizer.chat_template = _on_a_fixed_day(self.text)

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

    def encode_with_ends(self, text: str) -> tuple[list[int], list[int]]:
        """Ids, and for each the character of `text` at which it ends."""
        encoded: Any = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoded["input_ids"]), [end for _, end in encoded["offset_mapping"]]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of generated ids, special tokens (think markers, tool calls) included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def generation_mask(self, messages: Sequence[Message], tools: list[Any] | None) -> list[int]:
        """The template's own `{% generation %}` spans, one 0 or 1 per token of the rendered conversation."""
        encoded: Any = self.tokenizer.apply_chat_template(
            self.messages(messages), tools=tools, tokenize=True, return_dict=True,
            return_assistant_tokens_mask=True, **self._variables,
        )  # fmt: skip
        return list(encoded["assistant_masks"])

    @cached_property
    def _variables(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.settings.thinking is not None:
            found["enable_thinking"] = self.settings.thinking
        if "date_string" in self.text:
            found["date_string"] = FIXED_DATE
        return found

    # ------------------------------------------------------------------------------------------ facts

    @cached_property
    def added_ids(self) -> frozenset[int]:
        """Special and added tokens: those that stand for no ordinary text."""
        return frozenset(self.tokenizer.all_special_ids) | frozenset(self.tokenizer.added_tokens_decoder)

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
        return after[0] if after and after[0] in self.added_ids else None

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: the generation config's, the tokenizer's eos, and the template's end-of-turn."""
        found: set[int] = set()
        for value in (self._generation_eos(), self.tokenizer.eos_token_id, self.end_of_turn):
            found.update(value if isinstance(value, list) else [] if value is None else [value])
        return tuple(sorted(found))

    def _generation_eos(self) -> Any:
        from transformers.utils.hub import cached_file

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
            "date": FIXED_DATE if "date_string" in self.text or "strftime_now" in self.text else None,
        }


def _on_a_fixed_day(text: str) -> str:
    """A template that asks the clock, with a macro in the place of the function it asks (none can be passed in)."""
    days = {form: _FIXED_DAY.strftime(form) for form in _DATE_FORM.findall(text)}
    return (
        f"{{%- macro strftime_now(form) -%}}{{{{ {json.dumps(days)}.get(form, {json.dumps(FIXED_DATE)}) }}}}"
        f"{{%- endmacro -%}}{text}"
    )


def mismatches(trained: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Differences between two `info()` records, one line each with both values; empty when the chat modes agree."""
    keys = [key for key in trained if key in current]
    return [
        f"template.{key}: {trained[key]!r} then, {current[key]!r} now" for key in keys if trained[key] != current[key]
    ]
