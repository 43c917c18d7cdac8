"""The support table: who carries and serves what, and what a refusal says."""

from __future__ import annotations

import dataclasses

import pytest

from pipeline import engines, preflight
from pipeline.chain import active
from pipeline.config import load
from pipeline.engines import Facts
from pipeline.errors import ConfigError
from pipeline.layouts.serve import command

DSPARK = Facts(kind="dspark", layout="next_token", markov="vanilla", vocabulary=False)
FILL_IN = Facts(kind="dflash", layout="fill_in", markov="none", vocabulary=False)


@pytest.mark.parametrize(
    ("facts", "layouts"),
    [
        (DSPARK, ["deepspec", "speculators", "specforge"]),
        (dataclasses.replace(DSPARK, markov="rnn"), ["deepspec", "speculators", "specforge"]),
        (dataclasses.replace(DSPARK, kind="dflash", markov="none"), ["deepspec", "speculators", "specforge"]),
        (dataclasses.replace(DSPARK, vocabulary=True), ["deepspec", "speculators"]),
        (FILL_IN, ["speculators", "specforge", "dflash"]),
        (dataclasses.replace(FILL_IN, vocabulary=True), ["speculators"]),
        (Facts("eagle3", "next_token", "none", True), ["speculators", "eagle3"]),
        (Facts("mtp", "next_token", "none", False), []),
        (Facts("mtp", "next_token", "none", False, target_type="qwen3_5_text"), ["mtp"]),
        (Facts("medusa", "next_token", "none", False), []),
        (dataclasses.replace(DSPARK, taps=False), []),
    ],
)
def test_layouts_that_can_carry(facts: Facts, layouts: list[str]) -> None:
    assert engines.carriers(facts) == layouts


def test_refusal_names_the_layouts_that_can() -> None:
    """S30: a draft vocabulary needs a layout with d2t and a head of its own."""
    (problem,) = engines.refusals(["specforge"], [], dataclasses.replace(DSPARK, vocabulary=True))
    assert "draft vocabulary" in problem and "Layouts that can: deepspec, speculators" in problem


@pytest.mark.parametrize("markov", ["gated", "rnn"])
@pytest.mark.parametrize("engine", ["vllm", "llama.cpp"])
def test_heads_an_engine_cannot_serve_are_refused_for_it(engine: str, markov: str) -> None:
    facts = dataclasses.replace(DSPARK, markov=markov)
    (problem,) = engines.refusals(["deepspec"], [engine], facts)
    assert markov in problem and "Engines that can: sglang, deepspec, speculators, specforge" in problem
    assert engines.refusals(["deepspec"], ["sglang"], facts) == []


def test_dense_layout_with_draft_vocabulary_is_not_for_sglang_or_deepspec() -> None:
    """Both take the target's whole head; vLLM and llama.cpp's converter read d2t and the head in the file."""
    assert engines.servers("deepspec", dataclasses.replace(DSPARK, vocabulary=True)) == ["vllm", "llama.cpp"]


EAGLE3 = Facts(kind="eagle3", layout="next_token", markov="none", vocabulary=True, tapped=3)


@pytest.mark.parametrize(
    ("layout", "facts", "told"),
    [
        ("deepspec", DSPARK, "--spec-type draft-dspark"),
        ("speculators", dataclasses.replace(DSPARK, kind="dflash", markov="none"), "--spec-type draft-dspark"),
        ("dflash", FILL_IN, "--spec-type draft-dflash"),
        ("eagle3", EAGLE3, "--spec-type draft-eagle3"),
        ("speculators", EAGLE3, "--spec-type draft-eagle3"),
        ("speculators", FILL_IN, None),
        ("specforge", DSPARK, None),
    ],
)
def test_llama_cpp_is_named_where_its_converter_reads(layout: str, facts: Facts, told: str | None) -> None:
    """Its converter knows DSparkSpeculator and Eagle3Speculator, but no DFlashSpeculator."""
    arguments = {"layout": layout, "facts": facts, "target": "target", "folder": "DIR", "tokens": 4}
    if told is None:
        with pytest.raises(ConfigError, match="Engines that serve it from the"):
            command("llama.cpp", **arguments)
    else:
        assert told in command("llama.cpp", **arguments)


@pytest.mark.parametrize(
    ("layout", "facts", "unable"),
    [
        ("eagle3", dataclasses.replace(EAGLE3, tapped=5), {"llama.cpp"}),
        ("eagle3", dataclasses.replace(EAGLE3, biased=True), {"llama.cpp", "sglang"}),
        ("deepspec", dataclasses.replace(DSPARK, biased=True), {"llama.cpp"}),
    ],
)
def test_what_an_engine_would_drop_or_not_load_is_refused_for_it(layout: str, facts: Facts, unable: set[str]) -> None:
    """SGLang's Eagle3 skips biases without a word; llama.cpp loads neither them nor other than three Eagle3 taps."""
    plain = dataclasses.replace(facts, tapped=3, biased=False)
    assert set(engines.servers(layout, plain)) - set(engines.servers(layout, facts)) == unable


def test_next_token_dflash_is_not_the_dflash_layout() -> None:
    """S1: relabelled, it would serve at about one token a step without a word."""
    reason = engines.layout_problem("dflash", dataclasses.replace(DSPARK, kind="dflash", markov="none"))
    assert reason is not None and "zero head" in reason


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["draft.vocabulary=256", "export.layouts=[specforge]"], "Layouts that can: deepspec, speculators"),
        (["draft.markov=rnn", "export.engines=[vllm]", "draft.vocabulary=null"], "Engines that can: sglang"),
        (["draft.activation=gelu", "export.engines=[vllm]"], "silu only"),
        (
            ["draft.kind=eagle3", "draft.markov=none", "draft.mask_token_id=null", "export.engines=[llama.cpp]"],
            "three tapped layers, this one has 2",
        ),
    ],
)
def test_an_impossible_export_is_refused_before_the_chain_starts(overrides: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        preflight.check_stages(load("configs/debug.yaml", overrides), ["export"])


def test_export_can_be_switched_off_and_is_only_checked_where_it_runs() -> None:
    config = load("configs/debug.yaml", ["export.layouts=[]", "draft.vocabulary=256"])
    assert "export" not in active(config)
    preflight.check_stages(config, active(config))
