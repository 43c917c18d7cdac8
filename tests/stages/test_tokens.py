"""The tokens stage: every assistant turn is a row or a counted skip, and processes change nothing."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifact import Artifact
from pipeline.chain import resolve
from pipeline.config import Config
from pipeline.corpus.template import ChatTemplate
from pipeline.corpus.tokens import read_tokens
from pipeline.errors import DataError
from tests.unit.corpus.chat_tokenizer import make_tokenizer, template_text
from tests.unit.corpus.stage import Recorder, chat, listing_of, make_config, run_stage, shard_hashes, write_jsonl
from tests.unit.corpus.stub_server import serve


def prepare(
    tmp_path: Path, rows: list[Any], *, template: str | None = None, work: str = "work",
    data: dict[str, Any] | None = None, **sections: Any,
) -> Config:  # fmt: skip
    """A finished data stage of `rows`, without answers unless they are set, over a folder that holds a tokenizer."""
    folder = tmp_path / "target"
    if not folder.exists():
        make_tokenizer(folder, template or template_text())
        (folder / "model.safetensors").write_bytes(b"weights are never read here")
    path = write_jsonl(tmp_path / "corpus.jsonl", rows)
    split = {"calibration_fraction": 0.0, "evaluation_fraction": 0.0}
    data = {"sources": [{"path": str(path)}], "shard_rows": 16, **split, **(data or {})}
    target = {"model": str(folder)}
    made = make_config(tmp_path / work, target=target, data=data, **{"answers": {"enabled": False}, **sections})
    run_stage(made, "data")
    return made


def tokens_of(artifact: Artifact) -> list[Any]:
    return [row for fact in artifact.manifest()["shards"] for row in read_tokens(artifact.path / fact["file"])]


@pytest.mark.case("DAT-09")
@pytest.mark.parametrize("shard_rows", [1, 4, 16])
def test_a_tools_column_of_some_rows_costs_no_other_row(tmp_path: Path, shard_rows: int) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "default": None}}}]
    rows = [chat(f"Q{n}?", f"Answer {n}.") for n in range(7)]
    rows += [{**chat("Add.", "Two."), "tools": value} for value in (json.dumps(tools), tools, [json.dumps(tools[0])])]
    rows += [{**chat("Add?", "Two."), "tools": value} for value in (None, "", [])] + [chat("Add?", "Two.")]
    rows += [{**chat("Spoilt.", "Two."), "tools": "{"}]
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + template_text()
    made = prepare(
        tmp_path, rows, template=template,
        data={"shard_rows": shard_rows, "exact_duplicates": False, "max_skip_fraction": 0.1},
    )  # fmt: skip
    data, tokens = resolve(made)["data"].manifest(), run_stage(made, "tokens")
    assert data["skipped"] == {"bad_tools": 1}
    assert data["rows"]["out"] == len(rows) - 1 == tokens.manifest()["samples"]
    assert tokens.manifest()["skipped"] == {}
    text = [ChatTemplate(made.target.model or "", made.template).decode(row.ids) for row in tokens_of(tokens)]
    assert Counter(text) == {
        **Counter(
            f"<|im_start|>user\nQ{n}?<|im_end|>\n<|im_start|>assistant\nAnswer {n}.<|im_end|>\n" for n in range(7)
        ),
        "<|im_start|>user\nAdd?<|im_end|>\n<|im_start|>assistant\nTwo.<|im_end|>\n": 4,
        '[{"function": {"name": "add", "parameters": {"type": "object"}}, "type": "function"}]'
        "<|im_start|>user\nAdd.<|im_end|>\n<|im_start|>assistant\nTwo.<|im_end|>\n": 3,
    }


@pytest.mark.case("DAT-05")
def test_a_row_the_template_refuses_is_skipped_by_name(tmp_path: Path) -> None:
    twice = {"conversations": [{"from": "human", "value": "a"}] * 2 + [{"from": "gpt", "value": "b c"}]}
    rows = [chat(f"Q{n}?", f"Answer {n}.") for n in range(20)] + [twice]
    made = prepare(tmp_path, rows, template=template_text(alternate=True))
    artifact = run_stage(made, "tokens", tracker := Recorder())
    manifest = artifact.manifest()
    assert manifest["skipped"] == {"template_error": 1}
    assert len(tokens_of(artifact)) == manifest["samples"] == 20
    assert "roles must alternate" in listing_of(artifact)[0]["detail"]
    assert "skipped.jsonl" in tracker.files


def test_candidates_in_are_rows_out_plus_skips_and_the_manifest_says_how_it_was_rendered(tmp_path: Path) -> None:
    rows = [chat("Q?", "Answer.", f"R {n}?", "Other answer.") for n in range(30)]
    rows += [chat(f"Only a question {n}?") for n in range(3)] + [
        chat("long " * 100 + str(n), "no room") for n in range(2)
    ]
    made = prepare(tmp_path, rows, tokens={"max_length": 200, "max_skip_fraction": 0.1})
    artifact = run_stage(made, "tokens")
    manifest = artifact.manifest()
    assert manifest["skipped"] == {"no_assistant": 3, "truncated_no_answer": 2}
    assert manifest["samples"] + sum(manifest["skipped"].values()) == 60 + 3 + 2
    found = tokens_of(artifact)
    assert [row.turn for row in found].count(1) == 30
    assert manifest["tokens"] == sum(len(row.ids) for row in found)
    assert manifest["supervised"] == sum(int(row.mask.sum()) for row in found)
    template = ChatTemplate(tmp_path / "target", made.template)
    assert manifest["template"] == {**template.info(), "max_length": 200}
    assert manifest["stop_ids"] == list(template.stop_ids)
    row = next(row for row in found if row.turn == 0)
    assert template.decode(row.ids[row.mask == 1]) == "Answer.<|im_end|>"
    assert (str(row.ids.dtype), str(row.mask.dtype)) == ("int32", "uint8")


def test_turns_the_target_did_not_produce_are_no_fault_of_the_rows(tmp_path: Path) -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"1+{n}?"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": str(n)},
                {"role": "assistant", "content": "old"},
            ]
        }
        for n in range(10)
    ]
    template = template_text().replace(
        "'<|im_end|>\\n'", "(message['tool_calls'] | default([]) | tojson) + '<|im_end|>\\n'"
    )
    with serve() as stub:
        answers = {"backend": "openai", "endpoints": [stub.url], "model": "m"}
        made = prepare(tmp_path, rows, template=template, answers=answers)
        run_stage(made, "answers")
    manifest = run_stage(made, "tokens").manifest()
    assert (manifest["samples"], manifest["skipped"]) == (10, {"given": 10})


@pytest.mark.case("DAT-10")
def test_when_nothing_fits_the_message_names_max_length(tmp_path: Path) -> None:
    made = prepare(tmp_path, [chat("x" * 40 + str(n), "Answer.") for n in range(9)], tokens={"max_length": 32})
    with pytest.raises(DataError, match=r"no row is left of 9 .*max_length = 32.*truncated_no_answer': 9"):
        run_stage(made, "tokens")


@pytest.mark.case("DAT-03")
def test_too_many_mismatches_stop_the_stage_and_one_token_shows_why(tmp_path: Path) -> None:
    rows = [chat(f"Q{n}?", f"Answer {n}.") for n in range(9)]
    made = prepare(tmp_path, rows, template=template_text(empty_think="prompt"), tokens={"max_skip_fraction": 0.5})
    with pytest.raises(DataError, match=r"no row is left of 9.*render_mismatch"):
        run_stage(made, "tokens")


@pytest.mark.case("DEP-05")
def test_processes_and_tasks_give_the_shards_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [chat(f"Q{n} {'long ' * 300}?", f"Answer {n} {'word ' * 200}") for n in range(200)]
    one = run_stage(prepare(tmp_path, rows, work="one"), "tokens")
    several = run_stage(prepare(tmp_path, rows, work="several", tokens={"workers": 4}), "tokens")
    tasks = prepare(tmp_path, rows, work="tasks")
    for index in (1, 0):
        monkeypatch.setenv("DSPARK_ARRAY", f"{index}/2")
        artifact = run_stage(tasks, "tokens")
        assert artifact.complete == (index == 0)
    assert len(shard_hashes(one)) == 13
    assert shard_hashes(one) == shard_hashes(several) == shard_hashes(artifact)


def test_a_resumed_stage_keeps_its_finished_shards(tmp_path: Path) -> None:
    made = prepare(tmp_path, [chat(f"Q{n}?", f"Answer {n}.") for n in range(60)])
    artifact = run_stage(made, "tokens")
    before = shard_hashes(artifact)
    artifact.manifest_path.unlink()
    (artifact.path / "train-00001.parquet").write_bytes(b"cut")
    kept = (artifact.path / "train-00000.parquet").stat().st_mtime_ns
    assert shard_hashes(run_stage(made, "tokens")) == before
    assert (artifact.path / "train-00000.parquet").stat().st_mtime_ns == kept
