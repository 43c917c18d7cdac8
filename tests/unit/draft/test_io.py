"""Our own checkpoint: complete, strict, and enough to decode with (EXP-04, EXP-06, TOK-06, TOK-08)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.draft.build import build_drafter
from pipeline.draft.io import load_drafter, save_drafter
from pipeline.errors import ArtifactError
from tests.unit.draft.drafts import FAMILY, anchors_at, config, frozen, logits, member, packed

META = {"template": {"hash": "abc"}, "target": {"model": "tiny"}}


@pytest.mark.case("EXP-04")
@pytest.mark.parametrize("name", FAMILY)
def test_a_drafter_rebuilt_from_its_folder_alone_is_the_same(name: str, tmp_path: Path) -> None:
    drafter, context, head = member(name), packed((9, 6)), frozen()
    save_drafter(tmp_path, drafter, META)
    again, meta = load_drafter(tmp_path)
    assert meta == META and again.config == drafter.config
    anchors = anchors_at(context, [3, 11])
    torch.testing.assert_close(
        logits(again, context, anchors, head), logits(drafter, context, anchors, head), rtol=0, atol=0
    )
    assert {t.dtype for n, t in load_file(tmp_path / "draft.safetensors").items() if "d2t" != n != "t2d"} == {
        torch.float32
    }


@pytest.mark.case("EXP-04")
@pytest.mark.parametrize(
    "changes",
    [
        {"activation": "relu"},
        {"activation": "gelu"},
        {"rms_norm_eps": 0.1},
        {"rope": {"rope_type": "linear", "rope_theta": 50.0, "factor": 3.0}},
        {"attention_bias": True},
        {"confidence": False},
        {"markov_rank": 3},
        {"heads": 2, "kv_heads": 1, "head_dim": 10},
    ],
    ids=lambda c: "-".join(c),
)
def test_every_option_reaches_the_checkpoint(changes: dict[str, Any], tmp_path: Path) -> None:
    drafter, context, head = member("dspark", **changes), packed((9, 6)), frozen()
    save_drafter(tmp_path, drafter, {})
    again, _ = load_drafter(tmp_path)
    anchors = anchors_at(context, [3, 11])
    torch.testing.assert_close(
        logits(again, context, anchors, head), logits(drafter, context, anchors, head), rtol=0, atol=0
    )


def _rename(tensors: dict[str, Tensor]) -> None:
    tensors["layers.0.self_attn.query.weight"] = tensors.pop("layers.0.self_attn.q_proj.weight")


def _drop_tables(tensors: dict[str, Tensor]) -> None:
    del tensors["d2t"]


def _shift_tables(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] += 1


def _cut(tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()


def _add(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = torch.zeros(2, 2)


@pytest.mark.case("EXP-06")
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            _rename,
            [
                "missing layers.0.self_attn.q_proj.weight (32, 32)",
                "unexpected layers.0.self_attn.query.weight (32, 32)",
            ],
        ),
        (_cut, ["fc.weight has shape (32, 95), (32, 96) is expected"]),
        (_add, ["unexpected lm_head.weight (2, 2)"]),
        (_drop_tables, ["missing d2t"]),
        (_shift_tables, ["t2d does not mark the tokens that d2t names"]),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_key_by_key(
    damage: Callable[[dict[str, Tensor]], None], said: list[str], tmp_path: Path
) -> None:
    save_drafter(tmp_path, member("dspark-reduced"), {})
    path = tmp_path / "draft.safetensors"
    tensors = load_file(path)
    damage(tensors)
    save_file(tensors, path)
    with pytest.raises(ArtifactError) as caught:
        load_drafter(tmp_path)
    assert all(part in str(caught.value) for part in said), str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d["config"].pop("layout"), "missing key 'layout'"),
        (lambda d: d["config"].update(layout="anchored"), "layout 'anchored' is unknown"),
        (lambda d: d.update(layer_convention="hidden_states[l]"), "layer_convention"),
        (lambda d: d.update(format=99), "format 99"),
        (lambda d: d.pop("config"), "config"),
    ],
)
def test_S1_S4_an_unstated_convention_is_an_error(change: Callable[[Any], Any], said: str, tmp_path: Path) -> None:
    save_drafter(tmp_path, member("dflash-fill-in"), {})
    path = tmp_path / "draft.json"
    description = json.loads(path.read_text())
    change(description)
    path.write_text(json.dumps(description))
    with pytest.raises(ArtifactError, match=said):
        load_drafter(tmp_path)


@pytest.mark.case("TOK-06")
def test_S30_tables_are_inside_the_tensors_and_give_the_same_target_tokens(tmp_path: Path) -> None:
    drafter, context, head = member("dspark-reduced"), packed((9, 6)), frozen()
    save_drafter(tmp_path, drafter, {})
    stored = load_file(tmp_path / "draft.safetensors")
    assert stored["d2t"].shape == (12,) and stored["t2d"].shape == (50,) and stored["t2d"].sum() == 12
    again, _ = load_drafter(tmp_path)
    anchors = anchors_at(context, [3, 11])
    before = drafter.target_ids(logits(drafter, context, anchors, head).argmax(-1))
    assert torch.equal(again.target_ids(logits(again, context, anchors, head).argmax(-1)), before)


@pytest.mark.case("TOK-08")
def test_a_reduced_draft_saves_and_resumes(tmp_path: Path) -> None:
    """Nothing of the target's tied embedding and head is in the state, so their sizes cannot clash."""
    save_drafter(tmp_path, member("eagle3-reduced"), {})
    again, _ = load_drafter(tmp_path)
    names = set(again.state_dict())
    assert not any("embed_tokens" in name or "lm_head" in name for name in names)
    save_drafter(tmp_path, again, {})


def test_gathered_tensors_may_stand_in_for_the_drafters_own(tmp_path: Path) -> None:
    drafter = member("dspark")
    gathered = {name: tensor.bfloat16() * 2 for name, tensor in drafter.state_dict().items()}
    save_drafter(tmp_path, drafter, {}, tensors=gathered)
    again, _ = load_drafter(tmp_path)
    torch.testing.assert_close(again.norm.weight, gathered["norm.weight"].float())


def test_weights_depend_on_the_seed_and_the_name_only() -> None:
    """Two drafters that differ in one head start from the same backbone (and the seed does matter)."""
    one, other = build_drafter(config(), seed=1), build_drafter(config(markov="gated"), seed=1)
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, dict(other.named_parameters())[name]), name
    assert not torch.equal(build_drafter(config(), seed=2).fc.weight, one.fc.weight)
    assert (one.norm.weight == 1).all() and float(one.fc.weight.detach().std()) == pytest.approx(0.02, rel=0.1)


def test_S30_a_drafter_is_not_built_without_the_vocabulary_it_declares() -> None:
    with pytest.raises(ValueError, match="draft vocabulary is not given"):
        build_drafter(config(draft_vocab_size=12), seed=0)
    with pytest.raises(ValueError, match="rising ids"):
        build_drafter(config(draft_vocab_size=3), seed=0, token_ids=torch.tensor([4, 2, 9]))
