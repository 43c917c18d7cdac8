"""Reading checkpoints from elsewhere, and starting a training from one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pipeline.draft.io import save_drafter
from pipeline.errors import ArtifactError
from pipeline.layouts import files
from pipeline.layouts.check import probe
from pipeline.layouts.config_json import write_config
from pipeline.layouts.load import load_any, load_published, start_from
from pipeline.layouts.read_config import read_config
from pipeline.layouts.table import table
from tests.unit.layouts.published import PLAIN, TARGET, drafter, head, origin, places, published

Edit = Callable[[dict[str, Any]], None]


def _edited(folder: Path, edit: Edit) -> Path:
    """A foreign folder: no hash list, config.json as `edit` leaves it."""
    (folder / files.HASHES).unlink()
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))
    return folder


def _retensored(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = files.read_tensors(folder)
    edit(tensors)
    save_file(tensors, folder / files.WEIGHTS)


# ------------------------------------------------------------------------------------------------ conventions


def test_deepspec_rank_zero_is_a_next_token_dflash(tmp_path: Path) -> None:
    """Its own DFlash: rank 0, no Markov tensors at all, a confidence head that reads the hidden state alone."""
    made = published(tmp_path / "out", "dflash", "deepspec", dtype="float32")
    _edited(tmp_path / "out", lambda config: config.update(markov_rank=0, confidence_head_with_markov=False))
    key, width = "confidence_head.proj.weight", PLAIN["hidden_size"]

    def without_markov(found: dict[str, torch.Tensor]) -> None:
        for name in [name for name in found if "markov" in name]:
            del found[name]
        found[key] = found[key][:, :width].contiguous()

    _retensored(tmp_path / "out", without_markov)
    loaded, _ = load_published(tmp_path / "out")
    assert loaded.config == made.config
    assert torch.equal(probe(loaded, head())["logits"], probe(made, head())["logits"])


def test_confidence_head_that_ignores_the_markov_embedding(tmp_path: Path) -> None:
    made = published(tmp_path / "out", "dspark", "deepspec", dtype="float32")
    _edited(tmp_path / "out", lambda config: config.update(confidence_head_with_markov=False))
    with pytest.raises(ArtifactError, match=r"misshapen confidence_head\.proj\.weight"):
        load_published(tmp_path / "out")
    key, width = "confidence_head.proj.weight", PLAIN["hidden_size"]
    _retensored(tmp_path / "out", lambda found: found.update({key: found[key][:, :width].contiguous()}))
    loaded, _ = load_published(tmp_path / "out")
    row = loaded.state_dict()[key]
    assert torch.equal(row[:, :width], made.state_dict()[key][:, :width]) and not row[:, width:].any()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.complex64])
def test_weights_of_a_quantised_checkpoint_are_refused_by_name(tmp_path: Path, dtype: torch.dtype) -> None:
    published(tmp_path / "out", "dspark", "deepspec")
    (tmp_path / "out" / files.HASHES).unlink()
    _retensored(tmp_path / "out", lambda found: found.update({"fc.weight": found["fc.weight"].to(dtype)}))
    with pytest.raises(ArtifactError, match=rf"fc\.weight: stored as {dtype}"):
        load_published(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "layout", "key", "value"),
    [("dspark", "specforge", "block_size", 9), ("fill_in", "dflash", "mask_token_id", 3),
     ("eagle3", "eagle3", "eagle_aux_hidden_state_layer_ids", [2, 3, 4])],
)  # fmt: skip
def test_a_key_that_says_two_things_is_refused(tmp_path: Path, name: str, layout: str, key: str, value: Any) -> None:
    """Engines differ in which of the two places wins."""
    published(tmp_path / "out", name, layout)
    with pytest.raises(ArtifactError, match=f"{key} is .* outside: which one"):
        load_published(_edited(tmp_path / "out", lambda config: config.update({key: value})))


def test_specforge_file_flattened_for_vllm_is_read_as_deepspec(tmp_path: Path) -> None:
    made = published(tmp_path / "out", "dspark", "specforge", dtype="float32")

    def flatten(config: dict[str, Any]) -> None:
        config.update(config.pop("dflash_config"), architectures=["Qwen3DSparkModel"])

    loaded, meta = load_published(_edited(tmp_path / "out", flatten))
    assert meta["layout"] == "deepspec" and loaded.config == made.config


@pytest.mark.case("EXP-01")
def test_absent_anchor_flag_means_what_the_layout_fixes(tmp_path: Path) -> None:
    """EXP-01, S1: DeepSpec drafts from the anchor; speculators does not unless it says so."""
    published(tmp_path / "a", "dspark", "deepspec")
    loaded, _ = load_published(_edited(tmp_path / "a", lambda config: config.pop("sample_from_anchor")))
    assert loaded.config.layout == "next_token"
    published(tmp_path / "b", "fill_in", "speculators")
    loaded, _ = load_published(_edited(tmp_path / "b", lambda config: config.pop("sample_from_anchor")))
    assert loaded.config.layout == "fill_in" and loaded.config.block_size == 4
    published(tmp_path / "c", "dspark", "speculators")
    with pytest.raises(ArtifactError, match="fill-in layout is not supported"):
        load_published(_edited(tmp_path / "c", lambda config: config.pop("sample_from_anchor")))


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda config: config.update(architectures=["LlamaForCausalLM"]), "no drafter layout known here"),
        (lambda config: config.pop("block_size"), "required key block_size is missing"),
        (lambda config: config.pop("markov_head_type"), "required key markov_head_type is missing"),
        (lambda config: config.update(layer_types=["sliding_attention"] * 2), "only full_attention"),
        (lambda config: config.update(is_causal=True), "is_causal is True, which no drafter here does"),
        (lambda config: config.update(target_layer_ids=[0, 2, 5]), "the last layer"),
        (lambda config: config.update(target_layer_ids=[-1, 2, 3]), "must rise strictly"),
        (lambda config: config.update(markov_head_type="other"), "unknown"),
        (lambda config: config.update(rope_theta=1.0), "rope_theta is 1.0, rope_parameters say 5000.0"),
        (lambda config: config.update(num_target_layers=9), "num_target_layers is 9, the target has 6 layers"),
    ],
)
def test_what_we_cannot_run_is_refused_by_name(tmp_path: Path, edit: Edit, told: str) -> None:
    published(tmp_path / "out", "dspark", "deepspec")
    with pytest.raises(ArtifactError, match=told):
        load_published(_edited(tmp_path / "out", edit), target=TARGET)


ODD: tuple[Any, ...] = (None, "x", -1, 0, 1e9, True, [], {}, [1, "a"], {"a": 1}, [None], float("inf"))


@pytest.mark.parametrize(
    ("name", "layout"),
    [("reduced", "speculators"), ("gated", "specforge"), ("yarn", "deepspec"), ("fill_in", "dflash"),
     ("eagle3", "eagle3"), ("eagle3 reduced", "speculators"), ("mtp", "mtp")],
)  # fmt: skip
def test_a_malformed_config_is_an_error_that_names_the_file(name: str, layout: str) -> None:
    """Every value in turn becomes something odd: it is read, or refused as this file's fault; nothing else raises."""
    whole = json.loads(json.dumps(write_config(drafter(name).config, layout, origin())))
    refused = 0
    for place in places(whole):
        for odd in ODD:
            data = json.loads(json.dumps(whole))
            node = data
            for key in place[:-1]:
                node = node[key]
            node[place[-1]] = odd
            try:
                reading = read_config(data, where="folder/config.json", target=None)
                table(reading.config, reading.layout)
                assert 0 < reading.config.rms_norm_eps < 1
                assert not any(isinstance(value, bool) for value in reading.config.target_layer_ids)
            except ArtifactError as error:
                refused += 1
                assert "folder/config.json" in str(error), (place, odd)
    assert refused > 100
    with pytest.raises(ArtifactError, match="a mapping expected"):
        read_config([whole], where="folder/config.json")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["config.json", files.INDEX, files.HASHES])
def test_a_foreign_file_that_is_no_json_is_nothing_we_could_repair(tmp_path: Path, name: str) -> None:
    published(tmp_path / "out", "dspark", "deepspec")
    (tmp_path / "out" / files.HASHES).unlink()
    (tmp_path / "out" / name).write_text("<html>not found</html>")
    with pytest.raises(ArtifactError, match=f"{name}: not valid JSON.*where it came from") as caught:
        load_published(tmp_path / "out")
    assert "repair" not in str(caught.value)


def test_number_of_target_layers_may_come_from_the_target(tmp_path: Path) -> None:
    published(tmp_path / "out", "fill_in", "dflash")
    _edited(tmp_path / "out", lambda config: config.pop("num_target_layers"))
    with pytest.raises(ArtifactError, match="no target was given"):
        load_published(tmp_path / "out")
    assert load_published(tmp_path / "out", target=TARGET)[0].config.target_num_layers == 6


def _old_rope(theta: float) -> dict[str, Any]:
    return {**{key: value for key, value in TARGET.items() if key != "rope_theta"}, "rope_theta": theta}


def _new_rope(theta: float) -> dict[str, Any]:
    target = _old_rope(theta)
    del target["rope_theta"]
    return {**target, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}


@pytest.mark.parametrize("form", [_old_rope, _new_rope])
def test_rope_base_is_held_against_the_targets(tmp_path: Path, form: Callable[[float], dict[str, Any]]) -> None:
    """S5: either config form, on either side."""
    published(tmp_path / "out", "dspark", "deepspec")
    (tmp_path / "out" / files.HASHES).unlink()
    path = tmp_path / "out" / "config.json"
    whole = json.loads(path.read_text())
    for dropped in ("rope_theta", "rope_parameters"):
        path.write_text(json.dumps({key: value for key, value in whole.items() if key != dropped}))
        assert load_published(tmp_path / "out", target=form(5000.0))[0].config.rope["rope_theta"] == 5000.0
        with pytest.raises(ArtifactError, match=r"rope_theta: the drafter has 5000\.0, its target 10000\.0"):
            load_published(tmp_path / "out", target=form(10000.0))


# ------------------------------------------------------------------------------------------------ starting points


@pytest.mark.parametrize("block", [2, 9])
@pytest.mark.parametrize("name", ["dspark", "rnn", "fill_in"])
def test_block_size_may_be_narrowed_and_widened(tmp_path: Path, name: str, block: int) -> None:
    layout = "dflash" if name == "fill_in" else "deepspec"
    made = published(tmp_path / "out", name, layout, dtype="float32")
    fresh = drafter(name, block_size=block)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    notes = start_from(tmp_path / "out", fresh)
    assert f"block_size 4 -> {block}" in notes
    found = made.state_dict()
    assert all(
        torch.equal(value, found[key]) for key, value in fresh.state_dict().items() if not key.startswith("confidence")
    )


def test_own_checkpoint_is_a_starting_point_too(tmp_path: Path) -> None:
    made = drafter()
    save_drafter(tmp_path, made, {"template": {}})
    assert load_any(tmp_path)[0].config == made.config
    fresh = drafter(block_size=7)
    assert start_from(tmp_path, fresh) == ["block_size 4 -> 7"]


def test_draft_vocabulary_may_be_cut_from_a_larger_one(tmp_path: Path) -> None:
    made = published(tmp_path / "out", "dspark", "deepspec", dtype="float32")
    fresh = drafter("reduced")
    start_from(tmp_path / "out", fresh)
    assert fresh.rows is not None
    w2 = "markov_head.markov_w2.weight"
    assert torch.equal(fresh.state_dict()[w2], made.state_dict()[w2][fresh.rows])
    published(tmp_path / "small", "reduced", "deepspec")
    with pytest.raises(ArtifactError, match="36 of this drafter's 48 draft tokens are not in the"):
        start_from(tmp_path / "small", drafter())


def test_heads_the_checkpoint_lacks_start_fresh_and_are_named(tmp_path: Path) -> None:
    made = published(tmp_path / "out", "dflash, no confidence", "deepspec", dtype="float32")
    fresh = drafter("gated")
    kept = {key: value.clone() for key, value in fresh.state_dict().items()}
    notes = start_from(tmp_path / "out", fresh)
    assert sum("fresh" in note for note in notes) == 6
    for key, value in fresh.state_dict().items():
        source = kept if key.startswith(("markov_head", "confidence_head")) else made.state_dict()
        assert torch.equal(value, source[key])


@pytest.mark.parametrize(
    "changes", [{"target_layer_ids": (1, 2, 3)}, {"layers": 1}, {"rope": {"rope_theta": 1e6, "rope_type": "default"}}]
)
def test_weights_that_would_mean_something_else_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    published(tmp_path / "out", "dspark", "deepspec")
    (name,) = changes
    with pytest.raises(ArtifactError, match=f"cannot be the start.*\n.*{name}"):
        start_from(tmp_path / "out", drafter(**changes))


def test_layout_of_the_start_must_be_the_drafters(tmp_path: Path) -> None:
    """S1: fill-in weights are no start for a next-token drafter."""
    published(tmp_path / "out", "fill_in", "dflash")
    with pytest.raises(ArtifactError, match="layout: 'fill_in' in the checkpoint, 'next_token' here"):
        start_from(tmp_path / "out", drafter("dflash"))
