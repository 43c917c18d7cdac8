"""Any chat row in, one form out: messages with the roles system, user, assistant and tool, and optional tools.

    source, messages, tools = normalise(raw, roles={}, name=None, default_source="file-stem")

Recognised without flags: `messages` and `conversations` of {role, content} or {from, value}, `conversation` of
{input, output}, and prompt/response columns. A row that cannot be understood raises `Skip` with a reason: a turn is
never dropped out of a row that is kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.corpus.rows import Message

_ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "chatgpt": "assistant", "bot": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "tool_response": "tool", "function_response": "tool",
    "function_call": "call", "tool_call": "call",
}  # fmt: skip

# (prompt, optional addition to the prompt, response); the first pair that is there is taken; a prompt alone will do.
_PAIRS = (
    ("prompt", None, "response"),
    ("prompt", None, "completion"),
    ("instruction", "input", "output"),
    ("instruction", "input", "response"),
    ("question", None, "answer"),
    ("problem", None, "solution"),
    ("query", None, "response"),
    ("input", None, "output"),
)

_ROLE_SHOWN = 40  # characters: what stands where a role belongs may be a whole answer


class Skip(Exception):
    """This row cannot be used. `reason` is counted; `detail` and other facts help the person who reads the list."""

    def __init__(self, reason: str, detail: str = "", **facts: Any) -> None:
        super().__init__(reason)
        self.reason = reason
        self.facts = {**facts, **({"detail": detail} if detail else {})}


def normalise(
    raw: Any, *, roles: Mapping[str, str], name: str | None, default_source: str
) -> tuple[str, list[Message], list[Any] | None]:
    """Source, messages and tools of one raw row.

    Args:
        roles: extra role names to accept, from the config.
        name: source name from the config; wins over the row's own.
        default_source: used when neither the config nor the row names a source.

    Raises:
        Skip: not_a_row, unknown_shape, empty, no_user, starts_with_<role>, unknown_role:<name>, null_content,
            empty_turn, non_text_content, bad_tools, bad_tool_call.
    """
    if not isinstance(raw, Mapping):
        raise Skip("not_a_row", f"an object is expected, found {type(raw).__name__}")
    table = {**_ROLES, **{key.lower(): value for key, value in roles.items()}}
    messages = [_message(turn, table) for turn in _turns(raw)]
    system = raw.get("system") or raw.get("system_prompt")
    if isinstance(system, str) and system.strip() and not any(m["role"] == "system" for m in messages):
        messages.insert(0, {"role": "system", "content": system})
    _check_order(messages)
    own = raw.get("source")
    source = name or (own.strip() if isinstance(own, str) and own.strip() else default_source)
    return source, messages, _tools(raw)


def _turns(raw: Mapping[str, Any]) -> list[Any]:
    for column in ("messages", "conversations", "conversation"):
        turns = raw.get(column)
        if isinstance(turns, str):
            turns = _parse(turns, "unknown_shape")
        if isinstance(turns, Sequence) and not isinstance(turns, str):
            return [part for turn in turns for part in _input_output(turn)]
    for prompt, addition, response in _PAIRS:
        if raw.get(prompt) is not None and response in raw:
            return _pair(raw[prompt], raw.get(addition) if addition else None, raw[response])
    if raw.get("prompt") is not None:
        return _pair(raw["prompt"], None, None)
    raise Skip("unknown_shape", f"columns: {', '.join(sorted(map(str, raw)))}")


def _input_output(turn: Any) -> list[Any]:
    """A {input, output} exchange is two turns; anything else is itself."""
    if isinstance(turn, Mapping) and "input" in turn and "role" not in turn and "from" not in turn:
        return _pair(turn["input"], None, turn.get("output"))
    return [turn]


def _pair(prompt: Any, addition: Any, response: Any) -> list[Any]:
    if isinstance(addition, str) and addition.strip():
        prompt = f"{prompt}\n\n{addition}"
    if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping) and "role" in prompt[0]:
        turns = list(prompt)
    else:
        turns = [{"role": "user", "content": prompt}]
    if isinstance(response, Sequence) and response and isinstance(response[0], Mapping) and "role" in response[0]:
        return [*turns, *response]
    return turns if response is None else [*turns, {"role": "assistant", "content": response}]


def _message(turn: Any, table: Mapping[str, str]) -> Message:
    if not isinstance(turn, Mapping):
        raise Skip("unknown_shape", f"a turn is an object, found {type(turn).__name__}")
    said = turn.get("role") if turn.get("role") is not None else turn.get("from")
    role = table.get(str(said).strip().lower())
    if role is None:
        shown = str(said)[:_ROLE_SHOWN].encode("utf-8", "backslashreplace").decode()  # half a surrogate pair is no text
        raise Skip(f"unknown_role:{shown}")
    content = _text(turn.get("content") if turn.get("content") is not None else turn.get("value"))
    if role == "call":
        return {"role": "assistant", "content": "", "tool_calls": tool_calls(content)}
    message: Message = {"role": role, "content": content}
    if turn.get("tool_calls"):
        message["tool_calls"] = tool_calls(turn["tool_calls"])
        message["content"] = content or ""
    for key in ("name", "tool_call_id"):
        if isinstance(turn.get(key), str) and turn[key]:
            message[key] = turn[key]
    reasoning = turn.get("reasoning_content")
    if role == "assistant" and isinstance(reasoning, str) and reasoning.strip():
        message["reasoning_content"] = reasoning
    if message["content"] is None:
        raise Skip("null_content", f"the {role} turn has no content")
    if role in ("user", "assistant") and not message["content"].strip() and "tool_calls" not in message:
        raise Skip("empty_turn", f"the {role} turn is blank")
    return message


def _text(content: Any) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, float) and math.isnan(content):  # what a missing text becomes in some columnar files
        return None
    if isinstance(content, int | float) and not isinstance(content, bool):
        return str(content)
    parts = content if isinstance(content, list | tuple) else [content]
    texts = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise Skip("non_text_content", f"content part of type {kind}")
    return "".join(texts)


def tool_calls(value: Any) -> list[Any]:
    """Tool calls as a list of {type, function: {name, arguments: object}}, from JSON text or plain data."""
    calls = _parse(value, "bad_tool_call") if isinstance(value, str) else value
    calls = [calls] if isinstance(calls, Mapping) else calls
    if not isinstance(calls, Sequence) or not calls:
        raise Skip("bad_tool_call", "a tool call or a list of them is expected")
    return [_call(call) for call in calls]


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Skip("bad_tool_call", "a tool call names its function")
    arguments = function.get("arguments", function.get("parameters")) or {}
    arguments = _without_nulls(_parse(arguments, "bad_tool_call") if isinstance(arguments, str) else arguments)
    clean = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **clean} if isinstance(call.get("id"), str) else clean


def _tools(raw: Mapping[str, Any]) -> list[Any] | None:
    tools = raw.get("tools") or raw.get("functions")
    if isinstance(tools, str):
        tools = _parse(tools, "bad_tools") if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list):
        raise Skip("bad_tools", f"a list of tools is expected, found {type(tools).__name__}")
    return [_tool(_parse(tool, "bad_tools") if isinstance(tool, str) else tool) for tool in tools]


def _tool(tool: Any) -> Any:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Skip("bad_tools", "a tool names its function")
    return _without_nulls(tool)


def _without_nulls(value: Any) -> Any:
    """Columnar files fill absent keys with nulls; without them tools and calls read the same from every format."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _parse(text: str, reason: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Skip(reason, f"not valid JSON: {error}") from error


def _check_order(messages: Sequence[Message]) -> None:
    if not messages:
        raise Skip("empty", "no turns")
    first = next((m["role"] for m in messages if m["role"] != "system"), None)
    if first is None or all(m["role"] != "user" for m in messages):
        raise Skip("no_user", f"roles: {', '.join(m['role'] for m in messages)}")
    if first != "user":
        raise Skip(f"starts_with_{first}")
