"""Answers in process, on a tiny target: the whole chain from text to tokens, again and again the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline import chain
from pipeline.config import Config
from pipeline.corpus.template import ChatTemplate
from pipeline.corpus.tokens import read_tokens
from pipeline.tiny import make_tiny_target
from tests.unit.corpus.stage import chat, make_config, rows_of, run_stage, shard_hashes, write_jsonl


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("local")
    rows = [chat(f"Count from {n} to {n + 5}.", "old", "And on?", "old") for n in range(24)]
    path = write_jsonl(folder / "corpus.jsonl", rows)
    config = make_config(
        folder / "work",
        target={"tiny": {"train_steps": 40}},
        data={
            "sources": [{"path": str(path)}],
            "shard_rows": 9,
            "calibration_fraction": 0.0,
            "evaluation_fraction": 0.0,
        },
        answers={"max_new_tokens": 24, "batch_size": 4, "dtype": "float32", "max_skip_fraction": 0.9},
        tokens={"max_skip_fraction": 0.9},
    )
    make_tiny_target(config)
    run_stage(config, "data")
    return config


def test_both_turns_are_answered_by_the_target_and_become_training_rows(made: Config) -> None:
    artifact = run_stage(made, "answers")
    rows = rows_of(artifact)
    assert sum(artifact.manifest()["finish_reasons"].values()) == sum(len(row["finish_reasons"]) for row in rows)
    assert {m["content"] for row in rows for m in row["messages"] if m["role"] == "assistant"}.isdisjoint({"old"})
    for row in rows:
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"] * (len(row["messages"]) // 2)
        assert "length" not in row["finish_reasons"][:-1]
    tokens = run_stage(made, "tokens")
    template = ChatTemplate(chain.resolve(made)["tokens"].work_dir / "models" / _name(made), made.template)
    answers = {
        (row["id"], n): row["messages"][2 * n + 1]["content"] for row in rows for n in range(len(row["finish_reasons"]))
    }
    found = 0
    for fact in tokens.manifest()["shards"]:
        for record in read_tokens(tokens.path / fact["file"]):
            supervised = template.decode(record.ids[record.mask == 1])
            assert supervised.removesuffix("<|im_end|>").strip() == answers[record.id, record.turn].strip()
            found += 1
    assert found + sum(tokens.manifest()["skipped"].values()) == len(answers)


def test_a_shard_made_again_is_the_same_and_only_missing_ones_are_made(made: Config) -> None:
    artifact = run_stage(made, "answers")
    before = shard_hashes(artifact)
    assert len(before) == 3
    artifact.manifest_path.unlink()
    (artifact.path / "train-00001.jsonl").unlink()
    kept = (artifact.path / "train-00000.jsonl").stat().st_mtime_ns
    assert shard_hashes(run_stage(made, "answers")) == before
    assert (artifact.path / "train-00000.jsonl").stat().st_mtime_ns == kept


def _name(made: Config) -> str:
    from pipeline.identity import target_folder

    return Path(target_folder(made)).name
