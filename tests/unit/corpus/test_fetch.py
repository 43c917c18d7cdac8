"""`dspark fetch`: what it brings from the hub is enough to work without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config import Config, dump, validate
from pipeline.corpus.fetch import fetch, needed
from pipeline.errors import ConfigError
from tests.unit.corpus.chat_tokenizer import make_tokenizer, template_text
from tests.unit.corpus.hub_stub import COMMIT, Hub, serve_hub
from tests.unit.corpus.stage import chat, write_jsonl

ROOT = Path(__file__).resolve().parents[3]
FETCH = (
    "import sys; from pipeline import config; from pipeline.corpus.fetch import fetch; fetch(config.load(sys.argv[1]))"
)
USE = """
import sys
from pipeline import config
from pipeline.corpus.prompts import load_prompts
from pipeline.corpus.sources import plan_units, read_unit
from pipeline.corpus.template import ChatTemplate
from pipeline.identity import target_identity
made = config.load(sys.argv[1])
template = ChatTemplate(made.target.model, made.template, revision=made.target.revision)
rows = [raw.value for unit in plan_units(made.data, seed=0) for raw in read_unit(unit)]
print(len(template.render_prompt([{"role": "user", "content": "Hi"}])), len(rows), len(load_prompts("gsm8k")))
print(target_identity(made)["revision"])
"""

IDENTITY = """
import json, sys
from pipeline import chain, config
from pipeline.corpus.sources import plan_units, read_unit
for path in sys.argv[1:]:
    made = config.load(path)
    data = chain.resolve(made)["data"]
    rows = [raw.value for unit in plan_units(made.data, seed=0) for raw in read_unit(unit)]
    print(json.dumps([data.request["sources"][0]["revision"], data.fingerprint, len(rows)]))
"""
LATER = "89abcdef" * 5


def made_config(work_dir: Path) -> Config:
    return validate(
        {
            "work_dir": str(work_dir),
            "target": {"model": "owner/target"},
            "data": {"sources": [{"path": "owner/chats"}]},
            "evaluate": {"prompt_sets": ["heldout", "gsm8k"]},
        }
    )


def fill(root: Path) -> None:
    model = root / "models" / "owner" / "target"
    make_tokenizer(model, template_text())
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": 2}))
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "pytorch_model.bin").write_bytes(b"the same weights again")
    write_jsonl(root / "datasets" / "owner" / "chats" / "train.jsonl", [chat(f"Q{n}?", "A.") for n in range(7)])
    questions = [{"question": f"Q{n}?", "answer": "A."} for n in range(3)]
    gsm8k = root / "datasets" / "openai" / "gsm8k"
    write_jsonl(gsm8k / "main" / "test.jsonl", questions)
    (gsm8k / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: test\n    path: main/test.jsonl\n---\n"
    )


def run(code: str, config: Path, hub: Hub | None, home: Path, *others: Path) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    env |= {"HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}
    env |= {"HF_ENDPOINT": hub.url} if hub else {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, str(config), *map(str, others)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def test_what_was_fetched_is_enough_offline(tmp_path: Path) -> None:
    fill(tmp_path / "hub")
    config = tmp_path / "run.yaml"
    config.write_text(dump(made_config(tmp_path / "work")))
    with serve_hub(tmp_path / "hub") as hub:
        first = run(FETCH, config, hub, tmp_path / "home")
        assert first.returncode == 0, first.stderr
        assert "target owner/target" in first.stdout
        assert COMMIT in first.stdout
        assert "7 rows" in first.stdout
        assert f"(revision {COMMIT})" in first.stdout
        assert "3 prompts" in first.stdout
        assert not any(".bin" in line for line in hub.asked)
    offline = run(USE, config, None, tmp_path / "home")
    assert offline.returncode == 0, offline.stderr
    assert offline.stdout.split()[1:] == ["7", "3", COMMIT]


def test_a_hub_data_set_is_the_commit_its_revision_stands_for(tmp_path: Path) -> None:
    fill(tmp_path / "hub")
    home, chats = tmp_path / "home", tmp_path / "hub" / "datasets" / "owner" / "chats" / "train.jsonl"

    def config_at(revision: str | None) -> Path:
        tree = {
            "work_dir": str(tmp_path / "work"),
            "target": {"tiny": {}},
            "data": {"sources": [{"path": "owner/chats", "revision": revision}]},
        }
        path = tmp_path / f"{revision}.yaml"
        path.write_text(dump(validate(tree)))
        return path

    def found(result: subprocess.CompletedProcess[str]) -> list[list[str | int]]:
        assert result.returncode == 0, result.stderr
        return [json.loads(line) for line in result.stdout.splitlines()]

    with serve_hub(tmp_path / "hub") as hub:
        early = found(run(IDENTITY, config_at(None), hub, home))
        assert [early[0][0], early[0][2]] == [COMMIT, 7]
        assert found(run(IDENTITY, config_at(None), None, home)) == early  # offline: the same artifact, the same rows
        hub.move(LATER)
        write_jsonl(chats, [chat("New?", "Yes.")])
        late, tried = found(run(IDENTITY, config_at(None), hub, home)), run(IDENTITY, config_at("mian"), hub, home)
        assert [late[0][0], late[0][2]] == [LATER, 1]
        assert late[0][1] != early[0][1]
        assert tried.returncode != 0
        assert "owner/chats: the hub has no revision mian" in tried.stderr
    # Both copies are cached: each revision reads its own, not the newest.
    both = found(run(IDENTITY, config_at(None), None, home, config_at(COMMIT)))
    assert both[0] == late[0]
    assert [both[1][0], both[1][2]] == [COMMIT, 7]
    never = run(IDENTITY, config_at("v2"), None, home)
    assert never.returncode != 0
    assert "dspark fetch" in never.stderr


def test_everything_that_is_missing_is_told_at_once(tmp_path: Path) -> None:
    fill(tmp_path / "hub")
    (tmp_path / "hub" / "datasets" / "owner" / "chats" / "train.jsonl").unlink()
    (tmp_path / "hub" / "models" / "owner" / "target" / "config.json").unlink()
    config = tmp_path / "run.yaml"
    config.write_text(dump(made_config(tmp_path / "work")))
    with serve_hub(tmp_path / "hub") as hub:
        result = run(FETCH, config, hub, tmp_path / "home")
    assert result.returncode != 0
    assert "3 prompts" in result.stdout  # the others are brought all the same
    assert "target owner/target: " in result.stderr
    assert "data owner/chats: " in result.stderr


def test_local_files_need_no_hub_and_an_offline_environment_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", [chat("Q?", "A.")])
    data = {"sources": [{"path": str(path)}]}
    tree = {"work_dir": str(tmp_path), "target": {"tiny": {}}, "data": data}
    assert needed(validate(tree)) == {}
    fetch(validate(tree))
    guarded = {**data, "decontaminate": {"prompt_sets": ["humaneval", str(path)]}}
    assert list(needed(validate({**tree, "data": guarded}))) == ["prompts humaneval"]  # to be kept out of the corpus
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        fetch(made_config(tmp_path))
