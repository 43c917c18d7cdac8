"""Chat messages as the OpenAI protocol has them, and back."""

from __future__ import annotations

import json
from typing import Any

from pipeline.artifact import canonical
from pipeline.corpus.normalise import Skip, tool_calls
from pipeline.corpus.rows import Message


def outgoing(messages: list[Message]) -> list[Message]:
    """Messages as the protocol has them: call arguments as text, and every call and its reply with an id."""
    sent, calls, replies = [], 0, 0
    for message in messages:
        if "tool_calls" in message:
            listed = []
            for call in message["tool_calls"]:
                function = {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}
                listed.append({"id": f"call_{calls}", **call, "function": function})
                calls += 1
            message = {**message, "tool_calls": listed}
        elif message["role"] == "tool":
            message = {"tool_call_id": f"call_{replies}", **message}
            replies += 1
        sent.append(message)
    return sent


def incoming(response: Any) -> tuple[Message, str, int]:
    """Message, finish reason and number of tokens of a response.

    Raises Skip when the answer cannot be used, ValueError when the reply is none of this protocol.
    """
    try:
        return _read(response)
    except (AttributeError, TypeError) as error:  # the client checks no types: text may stand where an object belongs
        raise ValueError(f"the reply is not shaped like one ({error})") from error


def _read(response: Any) -> tuple[Message, str, int]:
    choices = getattr(response, "choices", None)
    choice = choices[0] if isinstance(choices, list) and choices else None
    said = getattr(choice, "message", None)
    if choice is None or said is None:
        raise ValueError("the reply holds no answer")
    if choice.finish_reason == "content_filter":
        raise Skip("content_filter")
    if not isinstance(said.content, str | None):
        raise ValueError(f"the answer's content is {type(said.content).__name__}, not text")
    message: Message = {"content": said.content or ""}
    extra = said.model_extra or {}
    reasoning = extra.get("reasoning_content") or extra.get("reasoning")
    if isinstance(reasoning, str) and reasoning.strip():
        message["reasoning_content"] = reasoning
    if said.tool_calls:
        message["tool_calls"] = tool_calls([call.model_dump(exclude_none=True) for call in said.tool_calls])
    try:
        canonical(message)
    except UnicodeEncodeError as error:
        raise Skip("bad_unicode", str(error)) from error
    tokens = response.usage.completion_tokens if response.usage else 0
    return message, str(choice.finish_reason), tokens if isinstance(tokens, int) else 0
