"""Nothing about a published folder can be changed unseen: by its hash list always, by the self-check without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pipeline.draft.interface import Drafter
from pipeline.errors import ArtifactError
from pipeline.layouts import files
from pipeline.layouts.check import Expectation, self_check
from pipeline.layouts.config_json import write_config
from pipeline.layouts.load import load_published
from tests.unit.layouts.published import head, origin, places, published

ROUTES = [
    ("reduced", "speculators"),
    ("reduced", "deepspec"),
    ("dspark", "deepspec"),
    ("fill_in", "dflash"),
    ("eagle3", "eagle3"),
    ("mtp", "mtp"),
    ("rnn", "specforge"),
    ("eagle3 reduced", "speculators"),
]


def _check(folder: Path, made: Drafter, layout: str) -> None:
    expected = Expectation(layout, write_config(made.config, layout, origin()), torch.bfloat16, target_tensors=False)
    self_check(folder, made, head(), expected)


def _remove(tensors: dict[str, Tensor], name: str) -> None:
    del tensors[name]


def _rename(tensors: dict[str, Tensor], name: str) -> None:
    tensors[f"model.{name}"] = tensors.pop(name)


def _truncate(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name] = tensors[name][:-1].contiguous()


def _cast(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name] = tensors[name].to(torch.float16)


def _touch(tensors: dict[str, Tensor], name: str) -> None:
    flat = tensors[name].flatten()
    flat[-1] = ~flat[-1] if flat.dtype == torch.bool else flat[-1] + 1


@pytest.mark.case("EXP-06")
@pytest.mark.parametrize("change", [_remove, _rename, _truncate, _cast, _touch])
@pytest.mark.parametrize(("name", "layout"), ROUTES)
def test_any_changed_tensor_is_caught(
    tmp_path: Path, name: str, layout: str, change: Callable[[dict[str, Tensor], str], None]
) -> None:
    """EXP-06: each tensor in turn; the self-check and the hash list both see it, and the error names the tensor."""
    made = published(tmp_path / "out", name, layout)
    path = tmp_path / "out" / files.WEIGHTS
    whole = files.read_tensors(tmp_path / "out")
    for tensor in whole:
        changed = {key: value.clone() for key, value in whole.items()}
        change(changed, tensor)
        save_file(changed, path, metadata={"format": "pt"})
        with pytest.raises(ArtifactError) as caught:
            _check(tmp_path / "out", made, layout)
        assert change is _touch or tensor in str(caught.value)
        assert any(files.WEIGHTS in problem for problem in files.hash_problems(tmp_path / "out")), tensor
        with pytest.raises(ArtifactError):
            load_published(tmp_path / "out")
        if (change, tensor, layout) == (_remove, "t2d", "deepspec"):
            continue  # may be absent there: rebuilt from d2t
        if change in (_remove, _rename, _truncate):
            with pytest.raises(ArtifactError) as caught:
                load_published(tmp_path / "out", check=False)
            assert tensor in str(caught.value)


def _flipped(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list):
        return [*value, 1]
    return {**value, "more": 1} if isinstance(value, dict) else 1


def _retyped(value: Any) -> Any:
    """The same number as another kind: some readers tell 7 from 7.0, some true from 1."""
    return float(value) if isinstance(value, int) else _flipped(value)


@pytest.mark.parametrize(("name", "layout"), ROUTES)
def test_any_changed_config_key_is_caught(tmp_path: Path, name: str, layout: str) -> None:
    """Every key at every depth: another value, and gone."""
    made = published(tmp_path / "out", name, layout)
    path = tmp_path / "out" / "config.json"
    whole = json.loads(path.read_text())
    all_places = list(places(whole))
    assert len(all_places) > 40
    for place in all_places:
        for change in (_flipped, _retyped, None):
            changed = json.loads(json.dumps(whole))
            node = changed
            for key in place[:-1]:
                node = node[key]
            if change is None:
                del node[place[-1]]
            else:
                node[place[-1]] = change(node[place[-1]])
            path.write_text(json.dumps(changed, indent=2, ensure_ascii=False) + "\n")
            with pytest.raises(ArtifactError, match="config.json"):
                _check(tmp_path / "out", made, layout)
            assert any("config.json" in problem for problem in files.hash_problems(tmp_path / "out"))


@pytest.mark.case("EXP-01")
@pytest.mark.parametrize(
    ("name", "layout"), [("dspark", "deepspec"), ("reduced", "speculators"), ("fill_in", "dflash")]
)
def test_flipped_layout_flag_is_refused(tmp_path: Path, name: str, layout: str) -> None:
    """EXP-01, S1: a checkpoint that claims the other slot layout does not load as if nothing were wrong."""
    published(tmp_path / "out", name, layout)
    (tmp_path / "out" / files.HASHES).unlink()
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    config["sample_from_anchor"] = not config["sample_from_anchor"]
    path.write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match="fill-in|fills in"):
        load_published(tmp_path / "out")


def test_target_tensors_are_held_against_the_target(tmp_path: Path) -> None:
    made = published(tmp_path / "out", "dspark", "deepspec", target_tensors=True)
    tensors = files.read_tensors(tmp_path / "out")
    expected = Expectation("deepspec", write_config(made.config, "deepspec", origin()), torch.bfloat16, True)
    self_check(tmp_path / "out", made, head(), expected)
    for name in ("embed_tokens.weight", "lm_head.weight"):
        for changed, told in (
            ({k: v for k, v in tensors.items() if k != name}, "missing"),
            (dict(tensors), "not the one"),
        ):
            if name in changed:
                changed[name] = changed[name] * 2
            save_file(changed, tmp_path / "out" / files.WEIGHTS)
            with pytest.raises(ArtifactError, match=f"{told}.*|{name}.*{told}"):
                self_check(tmp_path / "out", made, head(), expected)
