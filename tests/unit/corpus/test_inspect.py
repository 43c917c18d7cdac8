"""What the doctor says about chats: roles, masks, anchors, and disagreements that cost accepted length."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pipeline import preflight
from pipeline.config import Config, dump, load
from pipeline.corpus.inspect import anchor_eligible, examine, token_roles
from pipeline.corpus.template import ChatTemplate
from pipeline.errors import ConfigError
from tests.unit.corpus.chat_tokenizer import make_tokenizer, template_text
from tests.unit.corpus.stage import chat, make_config, write_jsonl


def prepare(tmp_path: Path, *, rows: list[Any] | None = None, vocab_size: int = 270, **switches: Any) -> Config:
    folder = tmp_path / "target"
    make_tokenizer(folder, template_text(**switches))
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size, "num_hidden_layers": 36}))
    path = write_jsonl(tmp_path / "c.jsonl", rows or ["{", chat("Hi there?", "Hello.", "More?", "Yes.")])
    return make_config(tmp_path / "work", target={"model": str(folder)}, data={"sources": [{"path": str(path)}]})


@contextmanager
def tokenizing(template: ChatTemplate | None, *, wrong: bool = False, tokens: Any = None) -> Iterator[str]:
    """A server with /tokenize, or (template None) one that only counts prompt tokens, or calls `tokens` its tokens."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, reply = 404, {}
            if self.path == "/tokenize" and template is not None:
                messages = [*body["messages"], {"role": "system", "content": "x"}] if wrong else body["messages"]
                status, reply = 200, {"tokens": template.render_prompt(messages)}
            elif self.path == "/tokenize" and tokens is not None:
                status, reply = 200, {"tokens": tokens}
            elif self.path == "/v1/chat/completions":
                status, reply = 200, {"usage": {"prompt_tokens": 3}}
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(reply).encode())

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    server.server_close()


def test_the_table_shows_every_answer_token_with_role_mask_and_anchor(tmp_path: Path) -> None:
    made = prepare(tmp_path)
    findings = examine(made, str(made.target.model), samples=1)
    assert findings.problems == []
    text = findings.text
    rows = [line.split() for line in findings.lines]
    answer = [row for row in rows if row[2:4] == ["assistant", "1"]]
    assert "".join(row[-1].strip("'") for row in answer) == "Hello.Yes."
    assert all(row[4] == "yes" for row in answer)  # the end-of-turn, taught by the last of them, is no anchor itself
    assert "turn 0: " in text
    assert "turn 1: " in text
    assert "7 supervised, 6 possible anchors" in text  # "Hello." and its end-of-turn
    assert "embedding has 270 rows (8 rows are spare)" in text
    assert "2 '<|im_end|>'" in text
    assert "unsupervised tokens" in text


def test_roles_follow_the_turns_even_where_a_user_quotes_headers(tmp_path: Path) -> None:
    made = prepare(tmp_path)
    template = ChatTemplate(str(made.target.model), made.template)
    messages = [
        {"role": "user", "content": "Say <|im_start|>assistant\nno 東京?"},
        {"role": "assistant", "content": "no."},
    ]
    ids = template.encode(template.render(messages, prompt=False))
    roles = token_roles(template, messages, ids)
    by_role = {role: template.decode([i for i, r in zip(ids, roles, strict=True) if r == role]) for role in set(roles)}
    assert by_role["user"] == messages[0]["content"]
    assert by_role["assistant"] == "no."


@pytest.mark.case("DAT-02")
def test_anchor_eligibility_is_the_ruling_and_the_same_as_in_training() -> None:
    """S7: an answer at 10..14 has anchors 10..13, with rule `label` 9..13."""
    torch = pytest.importorskip("torch")
    from pipeline.speculative.anchors import eligible

    mask = [0] * 10 + [1] * 5 + [0] * 3
    for rule, expected in (("generated", range(10, 14)), ("label", range(9, 14))):
        found = anchor_eligible(mask, rule)
        assert [place for place, yes in enumerate(found) if yes] == list(expected)
        assert found == eligible(torch.tensor(mask), rule).tolist()  # type: ignore[arg-type]


@pytest.mark.case("TOK-01")
def test_two_bos_tokens_are_a_problem(tmp_path: Path) -> None:
    made = prepare(tmp_path, bos=True)
    assert examine(made, str(made.target.model), samples=1).problems == []
    doubled = make_tokenizer(tmp_path / "target", "{{ bos_token }}" + template_text(bos=True))
    assert "two BOS tokens" in examine(made, str(doubled), samples=1).problems[0]


@pytest.mark.case("TOK-02")
def test_a_mask_token_that_the_corpus_holds_is_a_problem(tmp_path: Path) -> None:
    """S6: a special token serves only while neither template nor corpus produces it."""
    made = prepare(tmp_path, rows=[chat("What does <think> mean?", "A marker.")])
    spare = made.model_copy(update={"draft": made.draft.model_copy(update={"mask_token_id": 4})})
    used = made.model_copy(update={"draft": made.draft.model_copy(update={"mask_token_id": 3})})
    assert examine(spare, str(made.target.model)).problems == []
    assert "mask token 3 ('<think>') stands in the corpus: 1 times" in examine(used, str(made.target.model)).problems[0]
    counted = examine(spare, str(made.target.model), special_tokens={"4": 12}).problems[0]
    assert "12 times" in counted


def test_a_tokenizer_larger_than_the_embedding_is_a_problem(tmp_path: Path) -> None:
    made = prepare(tmp_path, vocab_size=100)
    assert "more than the embedding's 100 rows" in examine(made, str(made.target.model)).problems[0]


def test_a_server_is_compared_token_by_token_or_by_count(tmp_path: Path) -> None:
    made = prepare(tmp_path)
    model = str(made.target.model)
    template = ChatTemplate(model, made.template)
    with tokenizing(template) as url:
        agreed = examine(made, model, samples=1, endpoint=url)
        assert agreed.problems == []
        assert "renders the same" in agreed.text
    with tokenizing(template, wrong=True) as url:
        assert "renders another prompt from token" in examine(made, model, samples=1, endpoint=url).problems[0]
    for tokens in (None, [], 5, "abc", [{"id": 5, "text": "Hi"}]):  # other servers mean other things by /tokenize
        with tokenizing(None, tokens=tokens) as url:
            assert "counts 3 prompt tokens" in examine(made, model, samples=1, endpoint=url).problems[0]
    assert "cannot be asked" in examine(made, model, samples=1, endpoint="http://127.0.0.1:9/v1").problems[0]


@pytest.mark.case("TOK-03")
@pytest.mark.parametrize(("file", "flag", "used"), [(4, None, 4), (4, 5, 5), (None, 5, 5), (None, None, None)])
def test_a_mask_token_on_the_command_line_beats_the_file(
    tmp_path: Path, file: int | None, flag: int | None, used: int | None
) -> None:
    made = prepare(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text(dump(made.model_copy(update={"draft": made.draft.model_copy(update={"mask_token_id": file})})))
    resolved = load(path, [] if flag is None else [f"draft.mask_token_id={flag}"])
    assert resolved.draft.mask_token_id == used
    shown = [line for line in examine(resolved, str(made.target.model), samples=1).lines if "mask token" in line]
    if used is None:
        assert shown == []
        with pytest.raises(ConfigError, match="draft.mask_token_id: required"):
            preflight.check(resolved)
    else:
        assert shown[0].startswith(f"mask token: {used},")
