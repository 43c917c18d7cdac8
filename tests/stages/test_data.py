"""The data stage: accounts that add up, the same shards from every file shape and any number of processes."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from pipeline.chain import resolve
from pipeline.config import dump
from pipeline.corpus import files, parts
from pipeline.errors import ConfigError, DataError
from tests.unit.corpus.planted import plant
from tests.unit.corpus.stage import (
    Recorder,
    chat,
    listing_of,
    make_config,
    rows_of,
    run_stage,
    shard_hashes,
    write_jsonl,
)

SHAPES = ("sharegpt", "messages", "conversations", "parquet", "arrow", "json", "gzip", "pairs")


def chats(count: int) -> list[list[str]]:
    rng = random.Random(3)
    words = ["lamp", "river", "seven", "north", "paper", "cloud", "ü", "\n", "'", '"']
    return [[" ".join(rng.choices(words[:6], k=9)) + rng.choice(words) for _ in range(2)] + [""] for _ in range(count)]


def write_shape(shape: str, folder: Path, pairs: list[list[str]]) -> Path:
    """The same chats under the same file name stem, in one of the shapes."""
    folder.mkdir()
    messages = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b, _ in pairs]
    share = [chat(a, b) for a, b, _ in pairs]
    if shape in ("sharegpt", "messages", "conversations", "pairs"):
        rows: list[Any] = {
            "sharegpt": share,
            "messages": [{"messages": m} for m in messages],
            "conversations": [{"conversations": m} for m in messages],
            "pairs": [{"conversation": [{"input": a, "output": b}]} for a, b, _ in pairs],
        }[shape]
        return write_jsonl(folder / "corpus.jsonl", rows)
    path = folder / f"corpus.{ {'gzip': 'jsonl.gz'}.get(shape, shape) }"
    if shape == "parquet":
        parquet.write_table(pa.Table.from_pylist(share), path, row_group_size=7)
    elif shape == "arrow":
        table = pa.Table.from_pylist([{"messages": m} for m in messages])
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    elif shape == "json":
        path.write_text(json.dumps(share))
    else:
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in share).encode()))
    return path


@pytest.mark.case("DAT-08")
def test_the_same_chats_in_every_shape_give_byte_identical_shards(tmp_path: Path) -> None:
    pairs, found = chats(40), {}
    for shape in SHAPES:
        path = write_shape(shape, tmp_path / shape, pairs)
        data = {"sources": [{"path": str(path)}], "shard_rows": 16, "evaluation_fraction": 0.2}
        found[shape] = shard_hashes(run_stage(make_config(tmp_path / f"work-{shape}", data=data), "data"))
    assert len(found["sharegpt"]) >= 4
    assert all(hashes == found["sharegpt"] for hashes in found.values()), found


def mixed_rows() -> list[Any]:
    """240 good chats and eleven rows that each fail in their own way."""
    good: list[Any] = [chat(f"Question {n} about lamps?", f"Answer {n}.", source=f"s{n % 3}") for n in range(240)]
    bad = [
        "{broken",
        {"conversations": []},
        chat("only")["conversations"],
        {"conversations": [{"from": "gpt", "value": "x"}]},
        {"conversations": [{"from": "system", "value": "x"}]},
        {"conversations": [{"from": "human", "value": "x"}, {"from": "my-model", "value": "y"}]},
        {"conversations": [{"from": "human", "value": None}]},
        {"text": "x"},
        '{"conversations": [{"from": "human", "value": "\\ud800"}]}',
        '{"conversations": [{"from": "hu\\ud83dman", "value": "x"}]}',
        '{"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "f", "limit": NaN}]}',
    ]
    return good[:100] + bad + good[100:] + [good[5], good[7]]


@pytest.mark.case("DAT-06")
def test_every_row_is_a_row_out_or_a_counted_and_listed_skip(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "corpus.jsonl", mixed_rows())
    tracker = Recorder()
    artifact = run_stage(make_config(tmp_path / "work", data={"sources": [{"path": str(path)}]}), "data", tracker)
    manifest = artifact.manifest()
    kept = sum(len(rows_of(artifact, split)) for split in ("train", "calibration", "evaluation"))
    assert manifest["skipped"] == {
        "bad_json": 1, "bad_unicode": 1, "duplicate": 2, "empty": 1, "no_user": 2, "not_a_row": 1, "not_json": 1,
        "null_content": 1,
        "unknown_role:hu\\ud83dman": 1, "unknown_role:my-model": 1, "unknown_shape": 1,
    }  # fmt: skip
    assert manifest["rows"]["in"] == len(mixed_rows()) == kept + sum(manifest["skipped"].values())
    places = {(entry["line"], entry["reason"]) for entry in listing_of(artifact)}
    assert (101, "bad_json") in places
    assert (252, "duplicate") in places
    assert len(places) == sum(manifest["skipped"].values())
    assert {"report.json", "skipped.jsonl"} <= set(tracker.files)
    assert not (artifact.path / "parts").exists()


def test_a_malformed_line_301_is_named_and_the_job_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_RANGE_BYTES", 4_000)  # the line lies in a later range than the first
    rows: list[Any] = [chat(f"Question {n}?", f"Answer {n}.") for n in range(400)]
    rows[300] = '{"conversations": [{"from": "human", "va'
    rows[250] = ""
    path = write_jsonl(tmp_path / "corpus.jsonl", rows)
    artifact = run_stage(make_config(tmp_path / "work", data={"sources": [{"path": str(path)}]}), "data")
    (entry,) = listing_of(artifact)
    assert (entry["file"], entry["line"], entry["reason"]) == ("corpus.jsonl", 301, "bad_json")
    assert "Unterminated string" in entry["detail"]
    assert artifact.manifest()["rows"]["out"] == 398


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    rows = [chat(f"Question {n}?", f"Answer {n}.") for n in range(40)]
    for folder in ("web", "books"):
        write_jsonl(tmp_path / folder / "train.jsonl", [*rows[:2], "{", *rows[2:]])
    write_jsonl(tmp_path / "web" / "more.jsonl", ["{"])
    data = {"sources": [{"path": str(tmp_path / "*" / "*.jsonl")}]}
    listing = listing_of(run_stage(make_config(tmp_path / "work", data=data), "data"))
    bad = {(entry["file"], entry["line"]) for entry in listing if entry["reason"] == "bad_json"}
    assert bad == {("web/train.jsonl", 3), ("books/train.jsonl", 3), ("more.jsonl", 1)}
    assert {entry["file"] for entry in listing if entry["reason"] == "duplicate"} == {"web/train.jsonl"}


def test_too_many_bad_rows_stop_the_stage_and_name_the_reasons(tmp_path: Path) -> None:
    rows = [chat(f"Question {n}?", f"Answer {n}.") for n in range(20)] + ["{", "{", {"conversations": []}]
    path = write_jsonl(tmp_path / "corpus.jsonl", rows)
    made = make_config(tmp_path / "work", data={"sources": [{"path": str(path)}]})
    with pytest.raises(DataError, match=r"3 of 23 rows .*bad_json 2, empty 1.*skipped\.jsonl"):
        run_stage(made, "data")
    allowed = make_config(tmp_path / "work", data={"sources": [{"path": str(path)}], "max_skip_fraction": 0.2})
    artifact = run_stage(allowed, "data")
    assert artifact.manifest()["rows"]["out"] == 20
    assert resolve(made)["data"].manifest() == artifact.manifest(), "what has finished stays so under a lower limit"


def test_answers_that_stand_where_roles_belong_do_not_flood_the_message(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": f"{n} " + "and so on " * 50, "content": "x"}]} for n in range(30)]
    path = write_jsonl(tmp_path / "corpus.jsonl", rows)
    with pytest.raises(DataError, match=r"unknown_role:0 and so on.* 18 other reasons 18") as error:
        run_stage(make_config(tmp_path / "work", data={"sources": [{"path": str(path)}]}), "data")
    assert len(str(error.value)) < 2000


@pytest.mark.parametrize("near", [None, {"threshold": 0.7}])
def test_two_processes_and_two_tasks_give_the_shards_of_one(
    tmp_path: Path, near: dict[str, float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_ROWS", 37)  # several parts a unit; spawned workers keep the usual size
    paths = [
        write_jsonl(
            tmp_path / f"corpus-{n}.jsonl", [chat(f"Q {n} {k} {k * k}?", f"A {k % 40} of it.") for k in range(90)]
        )
        for n in range(3)
    ]
    data = {"sources": [{"path": str(tmp_path / "corpus-*.jsonl")}], "shard_rows": 50, "near_duplicates": near}
    assert len(paths) == 3
    one = run_stage(make_config(tmp_path / "one", data=data), "data")
    two = run_stage(make_config(tmp_path / "two", data={**data, "workers": 2}), "data")
    tasks = make_config(tmp_path / "tasks", data=data)
    for index in (1, 0):
        monkeypatch.setenv("DSPARK_ARRAY", f"{index}/2")
        artifact = run_stage(tasks, "data")
        assert artifact.complete == (index == 0)
    assert shard_hashes(one) == shard_hashes(two) == shard_hashes(artifact)
    assert listing_of(one) == listing_of(two) == listing_of(artifact)


def test_limit_weight_and_name_of_a_source(tmp_path: Path) -> None:
    for n in range(2):
        write_jsonl(tmp_path / f"c-{n}.jsonl", [chat(f"Q {n} {k}?", "A.") for k in range(100)])
    parquet.ParquetWriter(tmp_path / "empty.parquet", pa.schema([("messages", pa.string())])).close()
    sources = [{"path": str(tmp_path / "c-*.jsonl"), "limit": 130, "name": "mine"}]
    sources += [{"path": str(tmp_path / "empty.parquet"), "limit": 9}]
    artifact = run_stage(make_config(tmp_path / "limit", data={"sources": sources}), "data")
    assert artifact.manifest()["rows"]["in"] == 130
    assert {row["source"] for row in rows_of(artifact)} == {"mine"}
    half = [{"path": str(tmp_path / "c-*.jsonl"), "weight": 0.5}]
    artifact = run_stage(make_config(tmp_path / "half", data={"sources": half}), "data")
    rows = artifact.manifest()["rows"]
    assert rows["in"] == 200 == rows["out"] + artifact.manifest()["skipped"]["not_sampled"]
    assert 70 <= rows["out"] <= 130


def test_copies_can_be_kept_under_ids_of_their_own(tmp_path: Path) -> None:
    rows = [chat(f"Q {n % 10}?", "A.") for n in range(30)]
    path = write_jsonl(tmp_path / "c.jsonl", rows)
    data = {"sources": [{"path": str(path)}], "exact_duplicates": False, "evaluation_fraction": 0.4}
    artifact = run_stage(make_config(tmp_path / "work", data=data), "data")
    held_out = {row["messages"][0]["content"] for row in rows_of(artifact, "evaluation")}
    trained = {row["messages"][0]["content"] for row in rows_of(artifact, "train")}
    everything = [row["id"] for split in ("train", "calibration", "evaluation") for row in rows_of(artifact, split)]
    assert len(set(everything)) == len(everything) == 30
    assert held_out
    assert not held_out & trained


def test_a_file_that_changes_is_another_artifact_and_a_missing_one_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", [chat("Q?", "A.")])
    made = make_config(tmp_path / "work", data={"sources": [{"path": str(path)}], "evaluation_fraction": 0.0})
    first = run_stage(made, "data")
    write_jsonl(path, [chat("Q?", "A."), chat("R?", "B.")])
    assert run_stage(made, "data").fingerprint != first.fingerprint
    path.unlink()
    with pytest.raises(ConfigError, match="no such file"):
        run_stage(made, "data")


def test_a_stage_killed_anywhere_ends_with_the_shards_of_an_unbroken_one(tmp_path: Path) -> None:
    rng = random.Random(5)
    for n in range(6):
        write_jsonl(tmp_path / f"c-{n}.jsonl", [chat(f"Q {n} {k}? {'z' * 200}", f"A {k}.") for k in range(300)])
    data = {"sources": [{"path": str(tmp_path / "c-*.jsonl")}], "shard_rows": 50}
    whole = run_stage(make_config(tmp_path / "whole", data=data), "data")
    made = make_config(tmp_path / "killed", data=data)
    (tmp_path / "c.yaml").write_text(dump(made))
    code = (
        "import sys; from pipeline import config; from tests.unit.corpus.stage import run_stage; "
        "print('go', flush=True); run_stage(config.load(sys.argv[1]), 'data')"
    )
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "c.yaml")], stdout=subprocess.PIPE, env={**os.environ},
            cwd=Path(__file__).parents[2],
        )  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(rng.uniform(0.05, 0.5))
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert shard_hashes(run_stage(made, "data")) == shard_hashes(whole)


def test_planted_copies_near_copies_and_leaks_are_all_named_and_nothing_else(tmp_path: Path, proof: Any) -> None:
    """The report names them all: precision and recall on a planted set."""
    each = proof.size(40, 800)
    planted = plant(each * 10, each=each)
    path = write_jsonl(tmp_path / "corpus.jsonl", planted.rows)
    prompts = write_jsonl(tmp_path / "bench.jsonl", [{"turns": [prompt]} for prompt in planted.prompts])
    decontaminate = {"prompt_sets": [str(prompts)]}
    data = {"sources": [{"path": str(path)}], "near_duplicates": {}, "decontaminate": decontaminate}
    artifact = run_stage(make_config(tmp_path / "work", data=data), "data")
    listing = listing_of(artifact)
    by_line = [row["conversations"] for row in planted.rows]

    def named(reason: str, turn: int) -> list[str]:
        return [by_line[entry["line"] - 1][turn]["value"] for entry in listing if entry["reason"] == reason]

    assert sorted(named("duplicate", 0)) == sorted(planted.exact)
    assert sorted(named("contaminated", 0)) == sorted(planted.leaks)
    pairs = {text: pair for pair in planted.near for text in pair}
    gone = named("near_duplicate", 1)
    right = {pairs[text] for text in gone if text in pairs}
    recall, precision = len(right) / each, len(right) / max(len(gone), 1)
    proof.note("near-duplicate recall / precision", f"{recall:.3f} / {precision:.3f} of {each} planted")
    assert recall >= 0.99
    assert precision == 1.0
    report = json.loads((artifact.path / "report.json").read_text())
    assert report["leaks_by_prompt_set"] == {
        str(prompts): {"prompts": each, "rows": each, "rows_by_source": {"leaky": each}}
    }
    assert report["rows"]["in"] == report["rows"]["out"] + sum(report["skipped"].values())
    kept = {entry["kept"] for entry in listing if entry["reason"] == "near_duplicate"}
    ids = {row["id"] for split in ("train", "calibration", "evaluation") for row in rows_of(artifact, split)}
    assert kept <= ids
    assert all(entry["kept"] < entry["id"] for entry in listing if entry["reason"] == "near_duplicate")
