"""Chat messages as the OpenAI protocol has them, and back."""

from __future__ import annotations

import json
from typing import Any

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
    """Message, finish reason and number of tokens of a response. Raises Skip when it holds no answer."""
    if not response.choices:
        raise Skip("no_choice", "the server sent no choice")
    choice = response.choices[0]
    if choice.finish_reason == "content_filter":
        raise Skip("content_filter")
    message: Message = {"content": choice.message.content or ""}
    extra = choice.message.model_extra or {}
    reasoning = extra.get("reasoning_content") or extra.get("reasoning")
    if isinstance(reasoning, str) and reasoning.strip():
        message["reasoning_content"] = reasoning
    if choice.message.tool_calls:
        message["tool_calls"] = tool_calls([call.model_dump(exclude_none=True) for call in choice.message.tool_calls])
    tokens = response.usage.completion_tokens if response.usage else 0
    return message, str(choice.finish_reason), int(tokens)
