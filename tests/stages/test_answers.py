"""The answers stage against a local stub: nothing twice, nothing lost, every request as it should be."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipeline import chain, stopping
from pipeline.config import Config, dump
from pipeline.corpus import server
from pipeline.corpus.journal import Journal
from pipeline.errors import ConfigError, DataError, Stopped, StorageError
from tests.unit.corpus.stage import chat, listing_of, make_config, rows_of, run_stage, write_jsonl
from tests.unit.corpus.stub_server import Stub, echo, serve

RUN = (
    "import sys; from pipeline import config; from tests.unit.corpus.stage import run_stage; "
    "run_stage(config.load(sys.argv[1]), 'answers')"
)
# Installed before anything else: whoever imports these fails.
BLOCKED = (
    "import sys; "
    "sys.modules.update(dict.fromkeys(('torch', 'transformers', 'datasets', 'tokenizers', 'accelerate'), None)); "
)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_FIRST_DELAY_SECONDS", 0.01)


def prepare(tmp_path: Path, urls: list[str], *, rows: list[Any] | None = None, **settings: Any) -> Config:
    """A finished data stage of `rows` (default: ten questions), and the config of its answers stage."""
    rows = rows or [chat(f"Q{n}?", "old") for n in range(10)]
    path = write_jsonl(tmp_path / "corpus.jsonl", rows)
    answers = {
        "backend": "openai",
        "endpoints": urls,
        "model": "served",
        "max_new_tokens": 77,
        **settings.pop("answers", {}),
    }
    fractions = {"calibration_fraction": 0.0, "evaluation_fraction": 0.0}
    data = {"sources": [{"path": str(path)}], **fractions, **settings.pop("data", {})}
    made = make_config(tmp_path / "work", data=data, answers=answers, **settings)
    run_stage(made, "data")
    return made


def cutting(body: dict[str, Any], count: int) -> tuple[int, str, str]:
    """Cuts the answers to three questions of ten, whatever the order they come in."""
    question = body["messages"][-1]["content"]
    return 200, f"About {question}", "length" if question in ("Q1?", "Q4?", "Q8?") else "stop"


@pytest.mark.case("DAT-12")
def test_cut_answers_are_counted_and_kept_or_dropped_by_the_stored_rule(tmp_path: Path) -> None:
    with serve(cutting) as stub:
        made = prepare(tmp_path, [stub.url])
        artifact = run_stage(made, "answers")
        manifest = artifact.manifest()
        assert manifest["finish_reasons"] == {"length": 3, "stop": 7}
        assert manifest["config"]["answers"]["cut_answers"] == "keep"
        kept = {row["messages"][0]["content"]: row for row in rows_of(artifact)}
        assert len(kept) == 10
        assert kept["Q4?"]["finish_reasons"] == ["length"]
        assert kept["Q4?"]["messages"][1]["content"] == "About Q4?"
        drop = prepare(tmp_path, [stub.url], answers={"cut_answers": "drop", "max_skip_fraction": 0.5})
        artifact = run_stage(drop, "answers")
    assert artifact.manifest()["skipped"] == {"truncated_answer": 3}
    assert len(rows_of(artifact)) == 7
    assert [entry["reason"] for entry in listing_of(artifact)] == ["truncated_answer"] * 3


@pytest.mark.case("DAT-14")
def test_requests_carry_sampling_and_template_options_under_their_own_names(tmp_path: Path) -> None:
    settings = {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    with serve() as stub:
        template = {"thinking": False, "system_prompt": "Be kind."}
        run_stage(prepare(tmp_path, [stub.url], answers=settings, template=template), "answers")
    body = next(body for body in stub.bodies if body["messages"][-1]["content"] == "Q3?")
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert {key: body[key] for key in ("model", "temperature", "top_p", "top_k", "max_tokens")} == {
        "model": "served", "temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_tokens": 77
    }  # fmt: skip
    assert body["messages"] == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Q3?"}]
    assert len({body["seed"] for body in stub.bodies}) == 10
    assert "extra_body" not in body


def test_several_turns_are_played_with_the_new_answers(tmp_path: Path) -> None:
    rows = [chat("A?", "old", "B?", "old", "C?"), chat("Q4?", "old", "D?", "old"), chat("E?", "old")]
    with serve(cutting) as stub:
        artifact = run_stage(prepare(tmp_path, [stub.url], rows=rows), "answers")
    found = {row["messages"][0]["content"]: row for row in rows_of(artifact)}
    assert [m["content"] for m in found["A?"]["messages"]] == ["A?", "About A?", "B?", "About B?", "C?", "About C?"]
    assert found["A?"]["finish_reasons"] == ["stop"] * 3
    assert [m["content"] for m in found["Q4?"]["messages"]] == ["Q4?", "About Q4?"]  # nothing follows a cut answer
    asked = next(body for body in stub.bodies if body["messages"][-1]["content"] == "C?")
    assert [m["content"] for m in asked["messages"]] == ["A?", "About A?", "B?", "About B?", "C?"]


def test_a_tool_call_of_the_data_is_kept_and_never_trained_on(tmp_path: Path) -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "old"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    with serve() as stub:
        artifact = run_stage(prepare(tmp_path, [stub.url], rows=[{"messages": messages, "tools": tools}]), "answers")
    (row,) = rows_of(artifact)
    assert row["finish_reasons"] == ["given", "stop"]
    assert row["messages"][-1]["content"] == "About 2"
    (body,) = stub.bodies
    assert body["tools"] == tools
    assert body["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert body["messages"][1]["tool_calls"][0]["id"] == body["messages"][2]["tool_call_id"]


def test_concurrency_is_bounded_and_spread_over_the_endpoints(tmp_path: Path) -> None:
    rows = [chat(f"Q{n}?", "old") for n in range(40)]
    with serve(delay_seconds=0.02) as one, serve(delay_seconds=0.02) as two:
        made = prepare(tmp_path, [one.url, two.url], rows=rows, answers={"concurrency": 3}, data={"shard_rows": 7})
        artifact = run_stage(made, "answers")
    assert len(rows_of(artifact)) == 40
    assert 1 < one.most_at_once <= 3
    assert 1 < two.most_at_once <= 3
    assert min(len(one.bodies), len(two.bodies)) >= 10


def test_failures_move_to_another_endpoint_and_a_refused_row_costs_itself(tmp_path: Path) -> None:
    def broken(body: dict[str, Any], count: int) -> tuple[int, str, str]:
        return 503, "overloaded", ""

    def picky(body: dict[str, Any], count: int) -> tuple[int, str, str]:
        return (400, "too long", "") if body["messages"][-1]["content"] == "Q5?" else echo(body, count)

    with serve(broken) as bad, serve(picky, delay_seconds=0.02) as good:
        settings = {"concurrency": 2, "max_skip_fraction": 0.2}
        artifact = run_stage(prepare(tmp_path, [bad.url, good.url], answers=settings), "answers")
    assert good.most_at_once <= 2  # what the other fails to do does not fall on this one at once
    assert len(rows_of(artifact)) == 9
    assert artifact.manifest()["skipped"] == {"refused_400": 1}
    assert "too long" in listing_of(artifact)[0]["detail"]


def reply(**choice: Any) -> bytes:
    whole = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "A."}, **choice}
    return json.dumps({"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [whole]}).encode()


NO_ANSWERS = [
    b"", b"<html>bad gateway</html>", b"[]", b"{}", b'{"error": {"message": "overloaded"}}', b'{"choices": null}',
    b'{"choices": [{}]}', reply(message=None), reply(message={"content": ["a"]}), reply(message={"content": 5}),
    b'{"choices": ["a"]}', reply(message="a"), reply(message={"content": "a", "tool_calls": "b"}),
    reply(message={"content": "a", "tool_calls": ["b"]}), reply().replace(b'"model"', b'"usage": "a", "model"'),
]  # fmt: skip


def test_a_reply_that_is_no_answer_is_a_failed_attempt_and_never_stored(tmp_path: Path) -> None:
    count = len(NO_ANSWERS)
    lies = {f"Q{n}?": lie for n, lie in enumerate(NO_ANSWERS)}

    def lying_once(body: dict[str, Any], number: int) -> tuple[int, str | bytes, str]:
        lie = lies.pop(body["messages"][-1]["content"], None)
        return echo(body, number) if lie is None else (200, lie, "")

    with serve(lying_once) as stub:
        rows = [chat(f"Q{n}?", "old") for n in range(count)]
        artifact = run_stage(prepare(tmp_path, [stub.url], rows=rows), "answers")
        assert len(stub.bodies) == 2 * count
    answers = Counter(row["messages"][1]["content"] for row in rows_of(artifact))
    assert answers == {f"About Q{n}?": 1 for n in range(count)}
    with serve(lambda body, count: (200, b"", "")) as stub:
        made = prepare(tmp_path / "always", [stub.url], answers={"retries": 1, "concurrency": 1})
        with pytest.raises(DataError, match=r"got no answer from 1 endpoint.*not a chat completion"):
            run_stage(made, "answers")


def test_only_an_answer_the_target_ended_itself_counts_as_finished(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = {"Q0?": None, "Q1?": "abort", "Q2?": "length", "Q3?": "stop"}
    surrogate = reply(message={"role": "assistant", "content": "\ud800"})

    def odd(body: dict[str, Any], count: int) -> tuple[int, str | bytes, str]:
        question = body["messages"][-1]["content"]
        return 200, surrogate if question == "Q4?" else reply(finish_reason=words.get(question, "stop")), ""

    rows = [chat(f"Q{n}?", "old", f"More {n}?", "old") for n in range(5)]
    with serve(odd) as stub:
        made = prepare(tmp_path, [stub.url], rows=rows, answers={"max_skip_fraction": 0.2})
        artifact = run_stage(made, "answers")
    assert artifact.manifest()["finish_reasons"] == {"None": 1, "abort": 1, "length": 1, "stop": 2}
    assert artifact.manifest()["skipped"] == {"bad_unicode": 1}
    whole = [row["messages"][0]["content"] for row in rows_of(artifact) if len(row["messages"]) == 4]
    assert whole == ["Q3?"]  # no second question follows an answer that broke off
    assert capfd.readouterr().err.count("answers as model 'm', asked was 'served'") == 1


def test_a_server_that_was_down_for_some_rows_is_asked_for_those_again(tmp_path: Path) -> None:
    """Its rows are not the data's fault: they are counted, and the same command asks for them and for no others."""
    down = {"Q2?", "Q5?"}

    def failing(body: dict[str, Any], count: int) -> tuple[int, str, str]:
        return (502, "restarting", "") if body["messages"][-1]["content"] in down else echo(body, count)

    with serve(failing) as stub:
        made = prepare(tmp_path, [stub.url], answers={"retries": 1}, data={"shard_rows": 4})
        with pytest.raises(DataError, match=r"server_error 2.*same command asks the 2 again"):
            run_stage(made, "answers")
        down.clear()
        artifact = run_stage(made, "answers")
    assert sorted(stub.answered) == [f"Q{n}?" for n in range(10)]  # each once
    assert artifact.manifest()["skipped"] == {}
    assert len(rows_of(artifact)) == 10
    assert not (artifact.path / "journal").exists()


def test_a_raised_limit_asks_no_prompt_again(tmp_path: Path) -> None:
    """The message advises to raise it; what was answered, and what was refused, stays so."""

    def picky(body: dict[str, Any], count: int) -> tuple[int, str, str]:
        return (400, "no", "") if body["messages"][-1]["content"] in ("Q2?", "Q5?") else echo(body, count)

    with serve(picky) as stub:
        made = prepare(tmp_path, [stub.url], data={"shard_rows": 4})
        with pytest.raises(DataError, match=r"refused_400 2.*mend the data or raise the limit"):
            run_stage(made, "answers")
        raised = made.answers.model_copy(update={"max_skip_fraction": 0.2})
        artifact = run_stage(made.model_copy(update={"answers": raised}), "answers")
        assert len(stub.bodies) == 10
    assert artifact.manifest()["skipped"] == {"refused_400": 2}
    assert chain.resolve(made)["answers"].complete, "what has finished stays so under a lower limit"


def test_a_busy_server_is_left_alone_as_long_as_it_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    sleep = asyncio.sleep

    async def recorded(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", recorded)
    asked = {1: "7", 2: "100000", 3: "Wed, 21 Oct 2026 07:28:00 GMT", 4: "-5"}
    with serve(lambda body, count: (429, "busy", asked[count]) if count in asked else echo(body, count)) as stub:
        run_stage(prepare(tmp_path, [stub.url], answers={"concurrency": 1}), "answers")
    waits = [round(seconds) for seconds in waits if seconds]
    assert waits[:2] == [7, 60]
    assert max(waits[2:]) == 0


def test_a_reply_that_never_ends_is_a_failed_attempt(tmp_path: Path) -> None:
    """Each byte that trickles in starts the client's own time-out anew."""
    with serve(lambda body, count: (200, None, "") if count <= 10 else echo(body, count)) as stub:
        artifact = run_stage(prepare(tmp_path, [stub.url], answers={"timeout_seconds": 0.3}), "answers")
    assert len(rows_of(artifact)) == 10


@pytest.mark.case("DAT-12")
def test_reasoning_that_was_cut_before_the_answer_is_a_cut_answer(tmp_path: Path) -> None:
    def thinking(body: dict[str, Any], count: int) -> tuple[int, bytes, str]:
        cut = body["messages"][-1]["content"] in ("Q1?", "Q2?")
        message = {"role": "assistant", "content": None if cut else "Yes.", "reasoning_content": "It is th"}
        return 200, reply(message=message, finish_reason="length" if cut else "stop"), ""

    with serve(thinking) as stub:
        artifact = run_stage(prepare(tmp_path, [stub.url]), "answers")
    assert artifact.manifest()["finish_reasons"] == {"length": 2, "stop": 8}
    found = {row["messages"][0]["content"]: row["messages"][1] for row in rows_of(artifact)}
    assert found["Q1?"] == {"role": "assistant", "content": "", "reasoning_content": "It is th"}


def test_silent_servers_and_wrong_addresses_stop_the_stage(tmp_path: Path) -> None:
    rows = [chat(f"Q{n}?", "old") for n in range(30)]
    with serve(lambda body, count: (500, "down", "")) as stub:
        made = prepare(tmp_path, [stub.url], rows=rows, answers={"retries": 1, "concurrency": 4})
        with pytest.raises(DataError, match=r"got no answer from 1 endpoint.*HTTP 500.*the same command goes on"):
            run_stage(made, "answers")
    with serve(lambda body, count: (404, "no such model", "")) as stub:
        made = prepare(tmp_path, [stub.url])
        with pytest.raises(ConfigError, match="no such model"):
            run_stage(made, "answers")


@pytest.mark.case("DAT-13")
def test_resume_goes_by_row_id_and_mends_a_half_written_line(tmp_path: Path) -> None:
    with serve() as stub:
        made = prepare(tmp_path, [stub.url], rows=[chat(f"Q{n}?", "old") for n in range(6)])
        artifacts = chain.resolve(made)
        names = {row["messages"][0]["content"]: row["id"] for row in rows_of(artifacts["data"])}
        entries = [
            {"id": names[f"Q{n}?"], "turn": 0, "message": {"content": f"Kept {n}"}, "finish_reason": "stop"}
            for n in (0, 3, 1, 2)
        ]
        lines = [json.dumps(entry) for entry in entries]
        journal = artifacts["answers"].path / "journal" / "train-00000.jsonl"
        write_jsonl(journal, [*lines[:3], lines[0].replace("Kept 0", "Second 0")])
        journal.write_text(journal.read_text() + lines[3][:40])
        artifact = run_stage(made, "answers")
    answers = {row["messages"][0]["content"]: row["messages"][1]["content"] for row in rows_of(artifact)}
    assert len(rows_of(artifact)) == 6
    assert answers == {
        "Q0?": "Kept 0", "Q1?": "Kept 1", "Q3?": "Kept 3", "Q2?": "About Q2?", "Q4?": "About Q4?", "Q5?": "About Q5?"
    }  # fmt: skip
    assert sorted(stub.answered) == ["Q2?", "Q4?", "Q5?"]
    assert not journal.exists()


@pytest.mark.case("DAT-13")
def test_what_follows_a_mended_line_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "journal" / "train-00000.jsonl"
    with Journal(path) as journal:
        journal.add("a", 0, {"content": "A."}, "stop")
    path.write_bytes(path.read_bytes() + b'{"id": "b", "tu')
    with Journal(path) as journal:
        assert journal.get("b", 0) is None
        journal.add("c", 0, {"content": "\ud800"}, "length")
    with Journal(path) as journal:
        assert [journal.get(name, 0) for name in "abc"] == [
            ({"content": "A."}, "stop"), None, ({"content": "\ud800"}, "length")
        ]  # fmt: skip


def test_a_full_disk_under_the_journal_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was answered before is asked for no more, once there is room."""
    add = Journal.add

    def filling(self: Journal, *answer: Any) -> None:
        if len(self.known) == 4:
            self._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
        add(self, *answer)

    with serve() as stub:
        made = prepare(tmp_path, [stub.url], answers={"concurrency": 1})
        journal = chain.resolve(made)["answers"].path / "journal" / "train-00000.jsonl"
        with monkeypatch.context() as patch, pytest.raises(StorageError) as caught:
            patch.setattr(Journal, "add", filling)
            run_stage(made, "answers")
        assert f"{journal}: cannot be written (No space left on device)" in str(caught.value)
        assert len(rows_of(run_stage(made, "answers"))) == 10
        assert len(stub.answered) == 11, "only what the full disk did not take is asked again"


def flaky(body: dict[str, Any], count: int) -> tuple[int, str, str]:
    """Fails one request in ten; cuts the answer to one question in five."""
    question = body["messages"][-1]["content"]
    if count % 10 == 7:
        return 500, "failed", ""
    return 200, f"About {question}", "length" if zlib.crc32(question.encode()) % 5 == 0 else "stop"


def kill_after(made: Config, tmp_path: Path, stub: Stub, requests: int) -> None:
    """Run the stage in a process of its own and end it with SIGKILL once the stub has answered so many questions."""
    (tmp_path / "run.yaml").write_text(dump(made))
    process = subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path / "run.yaml")], cwd=Path(__file__).parents[2])
    goal, deadline = len(stub.answered) + requests, time.monotonic() + 60
    while len(stub.answered) < goal and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    assert process.poll() is None, "the stage ended before it could be killed"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def test_killed_against_a_slow_failing_cutting_server_every_id_comes_out_once(tmp_path: Path, proof: Any) -> None:
    count = proof.size(100, 4000)
    rows = [chat(f"Q{n}?", "old", f"And {n}?", "old") for n in range(count)]
    with serve(flaky, delay_seconds=0.005) as stub:
        answers = {"concurrency": 8, "retries": 8}
        made = prepare(tmp_path, [stub.url], rows=rows, answers=answers, data={"shard_rows": 30})
        for _ in range(proof.size(2, 5)):
            kill_after(made, tmp_path, stub, count // 8)
        artifact = run_stage(made, "answers")
    ids = Counter(row["id"] for row in rows_of(artifact))
    assert ids == Counter(row["id"] for row in rows_of(chain.resolve(made)["data"]))
    found = Counter(reason for row in rows_of(artifact) for reason in row["finish_reasons"])
    assert artifact.manifest()["finish_reasons"] == dict(sorted(found.items()))
    expected: Counter[str] = Counter()
    for n in range(count):
        for question in (f"Q{n}?", f"And {n}?"):
            reason = flaky({"messages": [{"content": question}]}, 0)[2]
            expected[reason] += 1
            if reason == "length":
                break
    assert found == expected
    repeated = len(stub.answered) - expected.total()
    proof.note("answers asked twice after the kills (at most those in flight)", f"{repeated} of {expected.total()}")
    assert repeated <= proof.size(2, 5) * 8


@pytest.mark.case("DEP-03")
def test_the_client_runs_without_torch_and_transformers(tmp_path: Path) -> None:
    with serve() as stub:
        made = prepare(tmp_path, [stub.url])
        (tmp_path / "run.yaml").write_text(dump(made))
        code = BLOCKED + RUN
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "run.yaml")], check=True, cwd=Path(__file__).parents[2]
        )
        assert len(stub.bodies) == 10
    assert chain.resolve(made)["answers"].complete


@pytest.mark.case("DAT-15")
def test_output_folders_stand_before_the_first_request(tmp_path: Path) -> None:
    seen: list[bool] = []
    with serve(lambda body, count: (seen.append(folder.is_dir()), *echo(body, count))[1:]) as stub:  # type: ignore[misc]
        made = prepare(tmp_path / "not" / "yet" / "there", [stub.url])
        folder = chain.resolve(made)["answers"].path / "journal"
        assert not folder.exists()
        run_stage(made, "answers")
    assert seen == [True] * 10


def test_a_stop_request_keeps_what_was_answered(tmp_path: Path) -> None:
    def stopping_at_five(body: dict[str, Any], count: int) -> tuple[int, str, str]:
        if count == 5:
            stopping.request("test")
        return echo(body, count)

    stopping.install([])
    try:
        with serve(stopping_at_five) as stub:
            made = prepare(tmp_path, [stub.url], answers={"concurrency": 1})
            with pytest.raises(Stopped, match="test"):
                run_stage(made, "answers")
            assert len(stub.answered) == 5
            stopping.install([])
            artifact = run_stage(made, "answers")
        assert len(stub.answered) == 10
        assert len(rows_of(artifact)) == 10
    finally:
        stopping.install([])
