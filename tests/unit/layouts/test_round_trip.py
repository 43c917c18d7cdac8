"""Every drafter through every layout that can carry it, and back: same configuration, same numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pipeline.engines import LAYOUTS, carriers, layout_problem
from pipeline.errors import ArtifactError, ConfigError
from pipeline.layouts import files
from pipeline.layouts.check import probe
from pipeline.layouts.load import load_published
from pipeline.layouts.publish import Options, facts_of, publish
from tests.unit.layouts.published import CHANGES, WIDTH, drafter, drafts, head, origin, published

ROUTES = [
    (name, layout)
    for name in CHANGES
    for layout in carriers(facts_of(drafter(name), head(), target_type="qwen3_5_text"))
]


def test_every_layout_is_travelled() -> None:
    assert {layout for _, layout in ROUTES} == set(LAYOUTS)


@pytest.mark.case("EXP-04")
@pytest.mark.parametrize(("name", "layout"), ROUTES)
def test_comes_back_as_it_was(tmp_path: Path, name: str, layout: str) -> None:
    """EXP-04: rebuilt from the folder alone, any option: equal config, logits bit for bit, the same drafts decoded."""
    made = published(tmp_path / "out", name, layout, dtype="float32")
    loaded, meta = load_published(tmp_path / "out")
    differing = {key for key, value in made.config.to_dict().items() if loaded.config.to_dict()[key] != value}
    assert differing <= {"confidence"} and meta["layout"] == layout and meta["template"]["hash"] == "abc"
    if differing:
        assert made.config.layout == "fill_in" or made.config.kind in ("eagle3", "mtp")
    before, after = (probe(each, head())["logits"] for each in (made, loaded))
    if layout == "mtp":  # norms are stored as weight - 1, which float32 rounds
        torch.testing.assert_close(after, before, atol=1e-5, rtol=0)
    else:
        assert torch.equal(after, before)
    assert torch.equal(drafts(loaded)[0], drafts(made)[0])


@pytest.mark.case("EXP-03")
@pytest.mark.parametrize(("dtype", "stored"), [("bfloat16", "BF16"), ("float32", "F32")])
@pytest.mark.parametrize(("name", "layout"), [("reduced", "speculators"), ("dspark", "deepspec"), ("mtp", "mtp")])
def test_stored_in_the_stated_dtype(tmp_path: Path, name: str, layout: str, dtype: str, stored: str) -> None:
    """EXP-03: the dtype config.json states is the one in the header of every weight, ids and flags apart."""
    published(tmp_path / "out", name, layout, dtype=dtype)
    header = files.read_header(tmp_path / "out" / files.WEIGHTS)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == config.get("torch_dtype", dtype) == dtype
    assert config.get("transformer_layer_config", config)["dtype"] == dtype
    kinds = {tensor: kind for tensor, (kind, _) in header.items()}
    assert {tensor for tensor, kind in kinds.items() if kind != stored} <= {"d2t", "t2d"}
    if "d2t" in kinds:
        assert kinds["d2t"] == "I64" and kinds.get("t2d", "BOOL") == "BOOL"


@pytest.mark.case("TOK-06")
@pytest.mark.parametrize("layout", ["deepspec", "speculators"])
def test_reduced_vocabulary_travels_with_its_tables(tmp_path: Path, layout: str) -> None:
    """TOK-06, S30: d2t, t2d and the cut head are in the file; the top target ids are the same after a reload."""
    made = published(tmp_path / "out", "reduced", layout)
    found = files.read_tensors(tmp_path / "out")
    ids = torch.arange(12) * 3 + 1
    assert torch.equal(found["d2t"] + torch.arange(12), ids) and torch.equal(found["t2d"].nonzero().flatten(), ids)
    assert torch.equal(found["lm_head.weight"], head().head_VD[ids].bfloat16())
    loaded, _ = load_published(tmp_path / "out")
    before, after = (probe(each, head())["logits"].argmax(-1) for each in (made, loaded))
    assert float((made.target_ids(before) == loaded.target_ids(after)).float().mean()) > 0.9


@pytest.mark.case("TOK-08")
def test_export_never_ties_a_head(tmp_path: Path) -> None:
    """TOK-08: a tied target's flag does not reach the drafter, whose head may have other rows."""
    published(tmp_path / "out", "reduced", "speculators")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False and config["transformer_layer_config"]["tie_word_embeddings"] is False


@pytest.mark.case("EXP-02")
@pytest.mark.parametrize(
    ("name", "layout", "inputs"),
    [("dspark", "deepspec", 4), ("dspark", "speculators", 4), ("dspark", "specforge", 4), ("dflash", "deepspec", 4),
     ("fill_in", "dflash", 5), ("fill_in", "speculators", 5), ("fill_in", "specforge", 5)],
)  # fmt: skip
def test_speculative_tokens_are_the_slots_that_predict(tmp_path: Path, name: str, layout: str, inputs: int) -> None:
    """EXP-02, S1: four drafted tokens; `block_size` counts block inputs where the layout counts so."""
    published(tmp_path / "out", name, layout)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["block_size"] == inputs and config["sample_from_anchor"] is (inputs == 4)
    told = config.get("num_speculative_tokens")
    if layout == "speculators":
        told = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    assert told == 4 and load_published(tmp_path / "out")[0].config.block_size == 4


@pytest.mark.parametrize("layout", ["deepspec", "speculators"])
def test_split_export_reads_back(tmp_path: Path, layout: str) -> None:
    made = published(tmp_path / "out", "dspark", layout, dtype="float32", max_shard_bytes=8000)
    assert (tmp_path / "out" / files.INDEX).exists() and len(files.weight_files(tmp_path / "out")) > 3
    loaded, _ = load_published(tmp_path / "out")
    assert torch.equal(probe(loaded, head())["logits"], probe(made, head())["logits"])


def test_layer_ids_are_counted_the_layouts_way(tmp_path: Path) -> None:
    """S4: output of layer l is hidden_states[l + 1]; speculators counts the latter."""
    published(tmp_path / "a", "dspark", "deepspec")
    published(tmp_path / "b", "dspark", "speculators")
    assert json.loads((tmp_path / "a" / "config.json").read_text())["target_layer_ids"] == [0, 2, 3]
    assert json.loads((tmp_path / "b" / "config.json").read_text())["aux_hidden_state_layer_ids"] == [1, 3, 4]


def test_next_token_dflash_travels_as_zero_head(tmp_path: Path) -> None:
    """No engine runs rank 0, and llama.cpp reads no confidence head without the Markov columns: both are zeros."""
    made = published(tmp_path / "out", "dflash", "deepspec")
    found = files.read_tensors(tmp_path / "out")
    assert not found["markov_head.markov_w1.weight"].any() and not found["markov_head.markov_w2.weight"].any()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["markov_rank"] > 0 and config["confidence_head_with_markov"] is True
    row = found["confidence_head.proj.weight"]
    assert row.shape == (1, WIDTH + config["markov_rank"]) and not row[:, WIDTH:].any()
    loaded, _ = load_published(tmp_path / "out")
    assert loaded.config == made.config
    assert torch.equal(loaded.state_dict()["confidence_head.proj.weight"], row[:, :WIDTH].float())


def test_scaled_target_ships_its_scaled_embedding_and_head(tmp_path: Path) -> None:
    scaled = head(embed_scale=4.0, logit_scale=0.5)
    publish(
        tmp_path / "out", drafter(), layout="deepspec", frozen=scaled, origin=origin(), options=Options(dtype="float32")
    )
    found = files.read_tensors(tmp_path / "out")
    assert torch.equal(found["embed_tokens.weight"], scaled.embed_VD * 4.0)
    assert torch.equal(found["lm_head.weight"], scaled.head_VD * 0.5)


def test_refused_layout_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Layouts that can: deepspec, speculators"):
        published(tmp_path / "out", "reduced", "specforge")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["dspark", "gated", "rnn", "reduced", "dflash", "fill_in"])
def test_drafter_that_is_not_finite_is_not_published(tmp_path: Path, name: str) -> None:
    made = drafter(name)
    with torch.no_grad():
        made.get_parameter("norm.weight")[0] = float("nan")
    layout = carriers(facts_of(made, head(), target_type="qwen3"))[0]
    with pytest.raises(ArtifactError, match=r"norm\.weight: holds values that are not finite"):
        publish(tmp_path / "out", made, layout=layout, frozen=head(), origin=origin(), options=Options())
    assert not (tmp_path / "out").exists()


def test_every_carrier_is_accepted_and_every_other_refused() -> None:
    for name in CHANGES:
        facts = facts_of(drafter(name), head(), target_type="qwen3")
        assert [layout for layout in LAYOUTS if layout_problem(layout, facts) is None] == carriers(facts)
