"""Secrets out of what leaves the machine: by key name at any depth, by shape, and by the environment's own values."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "<redacted>"

# "mask_token_id", "eos_token" and "max_new_tokens" are not secrets: a bare "token" must end the name and stand alone or
# after a word that says whose it is.
_NAME = (
    r"(?:[\w.-]*(?:api[_-]?key|access[_-]?key(?:[_-]?id)?|private[_-]?key|secret(?:[_-]?\w+)?|passw(?:or)?d|passphrase"
    r"|credentials?|authorization|signature)|sig|(?:[\w.-]*(?:api|auth|access|hf|hub|bearer|session|refresh|id)[_-])?token)"
)
_SECRET_NAME = re.compile(rf"^{_NAME}$", re.IGNORECASE)
# A quoted value is hidden up to its closing quote; a bare one to the next blank, but for the scheme of an HTTP header.
_IN_TEXT = re.compile(
    rf"(?P<key>[\"']?\b{_NAME}[\"']?\s*[:=]\s*)"
    r"(?:(?P<quote>[\"'])(?P<quoted>(?:(?!(?P=quote)).)+)|(?P<bare>(?:(?:bearer|basic)\s+)?[^\s\"',;}\]]+))",
    re.IGNORECASE,
)
_SHAPES = re.compile(r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16})\b")
_IN_URI = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.-]*://)[^\s/@:]*(?::[^\s/@]*)?@", re.IGNORECASE)
_PLAIN = re.compile(r"^(?:null|none|true|false|-?\d+(?:\.\d+)?)$", re.IGNORECASE)


def redact(value: Any) -> Any:
    """A copy of plain data (mappings, lists, scalars) without secrets. Numbers, booleans and null stay."""
    hidden = _environment_secrets()
    return _walk(value, hidden)


def redact_text(text: str) -> str:
    """The same for text: YAML, JSON, log lines, URIs."""
    return _clean(text, _environment_secrets())


def _walk(value: Any, hidden: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {
            key: HIDDEN
            if item and not isinstance(item, int | float) and _SECRET_NAME.match(str(key))
            else _walk(item, hidden)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_walk(item, hidden) for item in value]
    return _clean(value, hidden) if isinstance(value, str) else value


def _clean(text: str, hidden: list[str]) -> str:
    for secret in hidden:
        text = text.replace(secret, HIDDEN)
    text = _IN_URI.sub(rf"\g<scheme>{HIDDEN}@", text)
    text = _SHAPES.sub(HIDDEN, text)
    return _IN_TEXT.sub(_hide, text)


def _hide(match: re.Match[str]) -> str:
    value = match["quoted"] or match["bare"]
    if _PLAIN.match(value) or value == HIDDEN:
        return match[0]
    return f"{match['key']}{match['quote'] or ''}{HIDDEN}"


def _environment_secrets() -> list[str]:
    """Values of environment variables that are named like secrets, longest first; short ones would hide too much."""
    found = {value for name, value in os.environ.items() if len(value) >= 8 and _SECRET_NAME.match(name)}
    return sorted(found, key=len, reverse=True)
