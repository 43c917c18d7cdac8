"""Weight files, tokenizer files, and the hash list of a published folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pipeline.errors import ArtifactError, ConfigError
from pipeline.layouts import files


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(4, 8, generator=generator) for name in ("a", "b", "c")}


@pytest.mark.parametrize("limit", [10**9, 200, 1])
def test_tensors_survive_any_split(tmp_path: Path, limit: int) -> None:
    written = files.write_tensors(tmp_path, _tensors(), max_shard_bytes=limit)
    assert (files.INDEX in written) == (limit < 10**9)
    assert len(files.weight_files(tmp_path)) == {10**9: 1, 200: 3, 1: 3}[limit]
    back = files.read_tensors(tmp_path)
    assert all(torch.equal(back[name], tensor) for name, tensor in _tensors().items()) and len(back) == 3


def test_missing_and_unlisted_shards_are_named(tmp_path: Path) -> None:
    files.write_tensors(tmp_path, _tensors(), max_shard_bytes=1)
    (tmp_path / "model-00002-of-00003.safetensors").rename(tmp_path / "other.safetensors")
    with pytest.raises(ArtifactError, match="model-00002-of-00003.*other"):
        files.read_tensors(tmp_path)


def test_index_that_lies_is_refused(tmp_path: Path) -> None:
    files.write_tensors(tmp_path, _tensors(), max_shard_bytes=1)
    index = json.loads((tmp_path / files.INDEX).read_text())
    places = index["weight_map"]
    places["a"], places["b"] = places["b"], places["a"]
    (tmp_path / files.INDEX).write_text(json.dumps(index))
    with pytest.raises(ArtifactError, match="does not describe"):
        files.read_tensors(tmp_path)


@pytest.mark.parametrize("index", [{}, [], {"weight_map": None}, {"weight_map": {"a": 3}}])
def test_index_without_a_map_is_refused(tmp_path: Path, index: object) -> None:
    files.write_tensors(tmp_path, _tensors(), max_shard_bytes=1)
    (tmp_path / files.INDEX).write_text(json.dumps(index))
    with pytest.raises(ArtifactError, match="no weight_map"):
        files.read_tensors(tmp_path)


def test_cut_file_is_refused(tmp_path: Path) -> None:
    files.write_tensors(tmp_path, _tensors(), max_shard_bytes=10**9)
    path = tmp_path / files.WEIGHTS
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ArtifactError, match="cut or damaged"):
        files.read_tensors(tmp_path)


def test_hash_list_sees_every_change_but_the_cards(tmp_path: Path) -> None:
    files.write_tensors(tmp_path, _tensors(), max_shard_bytes=10**9)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("card")
    files.write_hashes(tmp_path, layout="deepspec")
    assert files.hash_problems(tmp_path, everything=True) == []
    (tmp_path / "README.md").write_text("a better card")
    assert files.hash_problems(tmp_path) == [] and files.hash_problems(tmp_path, everything=True)
    for name in ("config.json", files.WEIGHTS):
        kept = (tmp_path / name).read_bytes()
        flipped = bytearray(kept)
        flipped[-1] ^= 1
        (tmp_path / name).write_bytes(bytes(flipped))
        with pytest.raises(ArtifactError, match=name):
            files.check_hashes(tmp_path)
        (tmp_path / name).write_bytes(kept)
    (tmp_path / "more.safetensors").write_bytes(b"")
    assert "not part of the export" in files.hash_problems(tmp_path)[0]


def test_template_that_replaced_the_tokenizers_is_what_ships(tmp_path: Path) -> None:
    target, out = tmp_path / "target", tmp_path / "out"
    target.mkdir(), out.mkdir()
    (target / "tokenizer.json").write_text("{}")
    (target / "chat_template.jinja").write_text("old")
    (tmp_path / "mine.jinja").write_text("new")
    names = files.copy_tokenizer(target, out, revision=None, chat_template=str(tmp_path / "mine.jinja"))
    assert names == ["chat_template.jinja", "tokenizer.json"] and (out / "chat_template.jinja").read_text() == "new"
    (target / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="no tokenizer"):
        files.copy_tokenizer(target, out, revision=None, chat_template=None)
