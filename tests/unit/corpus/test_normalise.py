"""Every common row shape becomes the same messages; what cannot be understood is refused by name."""

from __future__ import annotations

import datetime
import decimal
import json
import math
from typing import Any

import pytest

from pipeline.corpus.normalise import Skip, normalise

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
]
SHAREGPT = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "Hi"},
    {"from": "gpt", "value": "Hello."},
]


def messages_of(raw: Any, **options: Any) -> list[dict[str, Any]]:
    return normalise(raw, roles=options.get("roles", {}), name=None, default_source="file")[1]


def reason_of(raw: Any) -> str:
    with pytest.raises(Skip) as caught:
        messages_of(raw)
    return caught.value.reason


@pytest.mark.case("DAT-08")
@pytest.mark.parametrize(
    "raw",
    [
        {"messages": CHAT},
        {"conversations": CHAT},
        {"conversations": SHAREGPT},
        {"messages": json.dumps(CHAT)},
        {"conversation": [{"input": "Hi", "output": "Hello."}], "system": "Be brief."},
        {"prompt": "Hi", "response": "Hello.", "system_prompt": "Be brief."},
        {"prompt": CHAT[:2], "completion": CHAT[2:]},
        {"instruction": "Hi", "input": "", "output": "Hello.", "system": "Be brief."},
        {"question": "Hi", "answer": "Hello.", "system": "Be brief."},
        {"messages": [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in CHAT]},
        {"messages": [{**m, "role": m["role"].upper(), "name": None, "tool_calls": None} for m in CHAT]},
    ],
)
def test_every_shape_gives_the_same_messages(raw: dict[str, Any]) -> None:
    assert messages_of(raw) == CHAT


def test_an_instruction_with_input_is_one_user_turn() -> None:
    raw = {"instruction": "Translate.", "input": "chat", "output": "cat"}
    assert messages_of(raw)[0] == {"role": "user", "content": "Translate.\n\nchat"}


def test_several_exchanges_keep_their_order() -> None:
    raw = {"conversation": [{"input": "a", "output": "b"}, {"input": "c", "output": "d"}]}
    assert [m["content"] for m in messages_of(raw)] == ["a", "b", "c", "d"]


@pytest.mark.case("DAT-06")
@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([], "empty"),
        ([{"from": "gpt", "value": "Hello."}], "no_user"),
        ([{"from": "gpt", "value": "Hello."}, {"from": "human", "value": "Hi"}], "starts_with_assistant"),
        ([{"from": "system", "value": "Be brief."}], "no_user"),
        ([{"from": "human", "value": None}], "null_content"),
        ([{"from": "human", "value": " "}, {"from": "gpt", "value": "Hello."}], "empty_turn"),
        ([{"from": "human", "value": "Hi"}, {"from": "gpt", "value": ""}], "empty_turn"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "non_text_content"),
        (["Hi"], "unknown_shape"),
    ],
)
def test_odd_conversations_are_refused_by_name(turns: list[Any], reason: str) -> None:
    assert reason_of({"conversations": turns}) == reason


@pytest.mark.parametrize(
    ("raw", "reason"), [([1], "not_a_row"), ({"text": "Hi"}, "unknown_shape"), (None, "not_a_row")]
)
def test_rows_without_a_chat_are_refused(raw: Any, reason: str) -> None:
    assert reason_of(raw) == reason


@pytest.mark.case("DAT-07")
def test_an_unknown_role_rejects_the_row_unless_a_table_maps_it() -> None:
    raw = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "my-model", "value": "Hello."}]}
    assert reason_of(raw) == "unknown_role:my-model"
    assert [m["role"] for m in messages_of(raw, roles={"my-model": "assistant"})] == ["user", "assistant"]


@pytest.mark.case("DAT-09")
def test_tools_read_the_same_as_text_and_as_a_list() -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    columnar = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "items": None}}}]
    read = [
        normalise({"messages": CHAT, "tools": value}, roles={}, name=None, default_source="")[2]
        for value in (tools, json.dumps(tools), [json.dumps(tools[0])], columnar, json.dumps(columnar))
    ]
    assert read == [tools] * 5
    assert normalise({"messages": CHAT, "tools": ""}, roles={}, name=None, default_source="")[2] is None


@pytest.mark.parametrize(
    "tools", ["{not json", "[" * 100_000, '{"name": "add"}', 7, [5], ['"add"'], [{}], [{"function": "add"}]]
)
def test_tools_that_name_no_function_are_refused(tools: Any) -> None:
    assert reason_of({"messages": CHAT, "tools": tools}) == "bad_tools"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (math.nan, "null_content"),
        (True, "non_text_content"),
        (datetime.date(2025, 1, 1), "non_text_content"),
        (decimal.Decimal("1.5"), "non_text_content"),
        (b"bytes", "non_text_content"),
    ],
)
def test_what_columnar_files_hold_instead_of_text_is_refused_by_name(content: Any, reason: str) -> None:
    assert reason_of({"prompt": "Hi", "response": content}) == reason


def test_absent_arguments_of_a_columnar_call_are_no_nulls() -> None:
    def call(arguments: Any) -> dict[str, Any]:
        turn = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
        }
        return messages_of({"messages": [CHAT[1], turn]})[1]

    assert call({"x": 1}) == call({"x": 1, "y": None}) == call('{"x": 1}')


def test_tool_calls_of_both_worlds_read_the_same() -> None:
    called = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    openai = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "content": "2"},
    ]
    sharegpt = [
        {"from": "human", "value": "1+1?"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "2"},
    ]
    assert messages_of({"messages": openai}) == messages_of({"conversations": sharegpt})
    assert messages_of({"messages": openai})[1] == {"role": "assistant", "content": "", "tool_calls": [called]}


@pytest.mark.parametrize(
    ("row_source", "name", "expected"),
    [("chat", None, "chat"), ("chat", "mine", "mine"), (None, None, "file"), (" ", None, "file")],
)
def test_a_source_is_named_by_config_row_or_file_in_this_order(
    row_source: str | None, name: str | None, expected: str
) -> None:
    raw = {"messages": CHAT, "source": row_source}
    assert normalise(raw, roles={}, name=name, default_source="file")[0] == expected
