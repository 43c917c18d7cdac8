"""An MTP head in its target's checkpoint: the merge, what it refuses, and the differences it bridges exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipeline.engines import Facts
from pipeline.errors import ArtifactError, ConfigError
from pipeline.layouts import files, mtp
from pipeline.layouts.serve import command
from tests.unit.layouts.published import TARGET, drafter, published


def _target(folder: Path) -> Path:
    """A target in two files; the second holds an MTP head of its own, and the config nests the text part."""
    folder.mkdir()
    first = {"model.embed_tokens.weight": torch.ones(4, 2)}
    second = {"model.norm.weight": torch.ones(2), "mtp.norm.weight": torch.ones(2), "mtp.fc.weight": torch.ones(2, 4)}
    places = {}
    for number, tensors in enumerate((first, second), start=1):
        name = f"model-{number:05d}-of-00002.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, name)
    (folder / files.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen3_5", "text_config": {"mtp_num_hidden_layers": 0}})
    )
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_head_takes_the_place_of_the_targets_own(tmp_path: Path) -> None:
    target = _target(tmp_path / "target")
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    published(tmp_path / "export", "mtp", "mtp")
    mtp.install(tmp_path / "export", target, tmp_path / "out")
    found = files.read_tensors(tmp_path / "out")
    head = files.read_tensors(tmp_path / "export")
    assert all(torch.equal(found[name], tensor) for name, tensor in head.items())
    assert {name for name in found if not name.startswith("mtp.")} == {"model.embed_tokens.weight", "model.norm.weight"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["text_config"]["mtp_num_hidden_layers"] == 1
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    with pytest.raises(ArtifactError, match="exists"):
        mtp.install(tmp_path / "export", target, tmp_path / "out")


def test_a_target_half_written_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with half the target in it would load, or not, at some engine's leisure."""
    target = _target(tmp_path / "target")
    published(tmp_path / "export", "mtp", "mtp")
    with monkeypatch.context() as patched, pytest.raises(OSError, match="broken"):
        patched.setattr(mtp, "save_file", _breaks)
        mtp.install(tmp_path / "export", target, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    mtp.install(tmp_path / "export", target, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").exists()


def _breaks(*arguments: object, **keywords: object) -> None:
    raise OSError("broken")


def test_command_serves_the_exported_head_and_not_the_targets_own() -> None:
    facts = Facts("mtp", "next_token", "none", vocabulary=False, target_type="qwen3_5_text")
    told = command("vllm", layout="mtp", facts=facts, target="owner/target", folder="DIR", tokens=1)
    merge, serve = told.splitlines()
    assert merge == "python -m pipeline.layouts.mtp DIR owner/target target-with-head"
    assert serve.startswith("vllm serve target-with-head --speculative-config")


def test_changed_export_is_not_installed(tmp_path: Path) -> None:
    target = _target(tmp_path / "target")
    published(tmp_path / "export", "mtp", "mtp")
    (tmp_path / "export" / "config.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"config\.json"):
        mtp.install(tmp_path / "export", target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_head_of_other_sizes_than_its_target_is_refused(tmp_path: Path) -> None:
    """An engine builds the head from the target's configuration, so it must have the target's sizes."""
    assert mtp.size_problems(drafter("mtp").config, TARGET) == []
    with pytest.raises(ConfigError, match="intermediate_size is 56 in the head and 40 in the target"):
        published(tmp_path / "out", "mtp", "mtp", changes={"intermediate_size": 56})
    assert not (tmp_path / "out").exists()


def test_head_with_a_gate_is_not_read_as_ours(tmp_path: Path) -> None:
    """Released heads gate their attention output; ours has no gate, and dropping it would change every draft."""
    made = drafter("mtp")
    stored = mtp.to_published(made.config, made.state_dict())
    stored["mtp.layers.0.self_attn.q_proj.weight"] = stored["mtp.layers.0.self_attn.q_proj.weight"] + 1.0
    with pytest.raises(ArtifactError, match="gate on the attention output"):
        mtp.from_published(made.config, stored, where="folder")
