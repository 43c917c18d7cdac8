"""Does a server render a conversation as we do? Asked of its own tokenisation, or of its count of prompt tokens."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from pipeline.corpus.normalise import Skip
from pipeline.corpus.rows import Message
from pipeline.corpus.template import ChatTemplate

_TIMEOUT_SECONDS = 30.0
_SHOWN_TOKENS = 8


def compare(template: ChatTemplate, endpoint: str, model: str, messages: Sequence[Message]) -> tuple[str, bool]:
    """What was found, and whether server and template agree on the prompt of these messages.

    `endpoint` is a base URL such as http://host:8000/v1. A server whose `/tokenize` gives no ids of a chat is asked for
    one token of an answer, and only the number of prompt tokens is compared.
    """
    try:
        ours = template.render_prompt(messages)
    except Skip as skip:
        return f"not compared: {skip.reason}", True
    body: dict[str, Any] = {"model": model, "messages": template.messages(messages)}
    if template.settings.thinking is not None:
        body["chat_template_kwargs"] = {"enable_thinking": template.settings.thinking}
    root = endpoint.rstrip("/")
    try:
        theirs = _post(f"{root.removesuffix('/v1')}/tokenize", {**body, "add_generation_prompt": True}).get("tokens")
        if not (isinstance(theirs, list) and theirs and all(isinstance(token, int) for token in theirs)):
            counted = _post(f"{root}/chat/completions", {**body, "max_tokens": 1})["usage"]["prompt_tokens"]
            return f"{endpoint} counts {counted} prompt tokens, we have {len(ours)}", counted == len(ours)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{endpoint} cannot be asked for its tokens ({type(error).__name__}: {error})", False
    if theirs == ours:
        return f"{endpoint} renders the same {len(ours)} tokens", True
    pairs = enumerate(zip(ours, theirs, strict=False))
    place = next((n for n, (own, other) in pairs if own != other), min(len(ours), len(theirs)))
    own, other = (template.decode(ids[place : place + _SHOWN_TOKENS]) for ids in (ours, theirs))
    return f"{endpoint} renders another prompt from token {place} on: {other!r}, ours {own!r}", False


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """JSON reply; {} where the server has no such path."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as reply:
            return dict(json.loads(reply.read()))
    except urllib.error.HTTPError as error:
        if error.code in (404, 405):
            return {}
        raise
