"""Prompt sets: files of turns, files of chats, the held-out split, and clear refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.corpus import prompts
from pipeline.corpus.prompts import BENCHMARKS, Prompt, load_prompts
from pipeline.errors import ConfigError, DataError
from tests.unit.corpus.stage import chat, make_config, rows_of, run_stage, write_jsonl


def test_a_file_of_turns_or_chats_is_a_prompt_set(tmp_path: Path) -> None:
    rows = [
        {"turns": ["Hi", "More?"], "category": "writing"},
        "",
        {"turns": [{"content": "Hello"}], "id": "mine"},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hm"}]},
    ]
    assert load_prompts(str(write_jsonl(tmp_path / "own.jsonl", rows))) == [
        Prompt("own-00001", ("Hi", "More?"), "writing"),
        Prompt("mine", ("Hello",), "own"),
        Prompt("own-00004", ("Hm",), "own", "Be brief."),
    ]


def test_unreadable_lines_and_unknown_names_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"own\.jsonl:2: bad_json"):
        load_prompts(str(write_jsonl(tmp_path / "own.jsonl", [{"turns": ["Hi"]}, "{"])))
    with pytest.raises(DataError, match=r"own\.jsonl:1: no `turns` and no chat"):
        load_prompts(str(write_jsonl(tmp_path / "own.jsonl", [{"text": "Hi"}])))
    for_a_tool = [
        {"role": "user", "content": "q"},
        {"role": "tool", "content": "t"},
        {"role": "assistant", "content": "a"},
    ]
    with pytest.raises(DataError, match=r"own\.jsonl:1: no question but one for a tool"):
        load_prompts(str(write_jsonl(tmp_path / "own.jsonl", [{"messages": for_a_tool}])))
    with pytest.raises(DataError, match="holds no prompt"):
        load_prompts(str(write_jsonl(tmp_path / "own.jsonl", [])))
    with pytest.raises(ConfigError, match=r"'gsm9k': no such file, and not one of heldout, gsm8k"):
        load_prompts("gsm9k")
    with pytest.raises(ConfigError, match="evaluation split"):
        load_prompts("heldout")


def test_the_held_out_split_gives_its_user_turns(tmp_path: Path) -> None:
    call = {"function": {"name": "add", "arguments": {}}}
    tools = [
        {"role": "user", "content": "First"},
        {"role": "assistant", "content": "A."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "user", "content": "Later"},
    ]
    path = write_jsonl(tmp_path / "c.jsonl", [chat("Q?", "A.", "R?", source="s1"), {"messages": tools, "source": "s2"}])
    data = {"sources": [{"path": str(path)}], "evaluation_fraction": 0.99, "calibration_fraction": 0.0}
    artifact = run_stage(make_config(tmp_path / "work", data=data), "data")
    assert len(rows_of(artifact, "evaluation")) == 2
    found = {prompt.domain: prompt.turns for prompt in load_prompts("heldout", data=artifact)}
    assert found == {"s1": ("Q?", "R?"), "s2": ("First",)}


def test_published_sets_are_shaped_like_their_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        "gsm8k": [{"question": "1+{x}?"}],
        "humaneval": [{"prompt": "def f():\n"}],
        "mt-bench": [{"prompt": ["a", "b"]}],
        "alpaca": [{"instruction": "Sort.", "input": "3 1"}, {"instruction": "Sing.", "input": ""}],
        "arena-hard": [{"turns": [{"content": "Hi"}]}],
    }
    monkeypatch.setattr(prompts, "_hub_rows", lambda name, benchmark: rows[name])
    loaded = {name: [prompt.turns for prompt in load_prompts(name)] for name in rows}
    assert loaded["gsm8k"] == [("1+{x}?\nPlease reason step by step, and put your final answer within \\boxed{}.",)]
    assert loaded["humaneval"][0][0].endswith("tests:\n```python\ndef f():\n\n```")
    assert loaded["mt-bench"] == [("a", "b")]
    assert loaded["alpaca"] == [("Sort.\n\n3 1",), ("Sing.",)]
    assert loaded["arena-hard"] == [("Hi",)]
    assert set(BENCHMARKS) == {
        "gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench", "mt-bench", "alpaca", "arena-hard"
    }  # fmt: skip
