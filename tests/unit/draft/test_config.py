"""Configurations: strict to read, derived from the target, refused with every problem named (S1, S4, S6, TOK-05)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.config import Draft
from pipeline.draft.config import DraftConfig
from pipeline.draft.derive import derive_config
from pipeline.errors import ConfigError
from tests.unit.draft.drafts import FAMILY, SMALL, config

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 8,
    "vocab_size": 320,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
}
DRAFT = {"layers": 2, "mask_token_id": 310, "markov_rank": 8}


def derive(target: dict[str, Any], **draft: Any) -> DraftConfig:
    return derive_config(target, Draft(**{**DRAFT, **draft}), target_layer_ids=(1, 3, 5))


@pytest.mark.parametrize("name", FAMILY)
def test_a_configuration_survives_json(name: str) -> None:
    made = config(**FAMILY[name])
    assert DraftConfig.from_dict(json.loads(json.dumps(made.to_dict()))) == made


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "fill-in"}, "layout 'fill-in' is unknown; one of next_token, fill_in"),
        ({"layout": None}, "layout None is unknown"),
        ({"kind": "hydra"}, "kind 'hydra' is unknown"),
        ({"target_layer_ids": [0, 5]}, r"\[0, 5\] must rise strictly within 0…4"),
        ({"target_layer_ids": [-1, 2]}, r"must rise strictly"),
        ({"target_layer_ids": [3, 1]}, r"must rise strictly"),
        ({"mask_token_id": None}, "mask_token_id is not set"),
        ({"mask_token_id": 50}, "mask_token_id 50 is not a row"),
        ({"mask_token_id": -1}, "mask_token_id -1 is not a row"),
        ({"heads": 3}, "heads 3 is not a multiple of kv_heads 2"),
        ({"block_size": 0}, "block_size must be a whole number"),
        ({"markov_rank": 0}, "markov 'vanilla' does not go with markov_rank 0"),
        ({"kind": "dflash", "layout": "fill_in"}, "the fill-in layout has no Markov head"),
        ({"kind": "medusa", "markov": "none", "markov_rank": 0, "taps": False}, "reads the last hidden state"),
    ],
)
def test_S1_S4_S6_a_wrong_value_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**change)


def test_S1_a_missing_layout_and_an_unknown_key_are_errors() -> None:
    data = {**SMALL, "sample_from_anchor": True}
    del data["layout"]
    with pytest.raises(ConfigError) as caught:
        DraftConfig.from_dict(data)
    assert caught.value.problems == ["drafter: unknown key 'sample_from_anchor'", "drafter: missing key 'layout'"]


@pytest.mark.case("TOK-05")
@pytest.mark.parametrize("size", [0, -1, 4.0, True, 51])
def test_S30_a_senseless_draft_vocabulary_is_refused(size: Any) -> None:
    with pytest.raises(ConfigError, match="vocab"):
        config(draft_vocab_size=size)
    with pytest.raises((ValueError, ConfigError), match=r"vocabulary"):
        derive({**QWEN3, "vocab_size": 50}, vocabulary=size, mask_token_id=49)


def test_sizes_come_from_the_target_unless_set() -> None:
    made = derive(QWEN3)
    assert (made.hidden_size, made.head_dim, made.heads, made.kv_heads) == (64, 32, 4, 2)
    assert (made.intermediate_size, made.activation, made.target_num_layers) == (96, "silu", 8)
    assert made.rope == {"rope_theta": 1_000_000.0, "rope_type": "default"}
    own = derive(QWEN3, intermediate_size=40, heads=2, kv_heads=1, activation="relu")
    assert (own.intermediate_size, own.heads, own.kv_heads, own.activation) == (40, 2, 1, "relu")
    gemma = derive({**QWEN3, "hidden_act": None, "hidden_activation": "gelu_pytorch_tanh"})
    assert gemma.activation == "gelu_pytorch_tanh"
    assert derive({"text_config": QWEN3, "vision_config": {}}) == made


def test_all_that_is_wrong_with_a_target_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        derive({**QWEN3, "hidden_size": None, "vocab_size": None, "hidden_act": "xielu"})
    text = "\n".join(caught.value.problems)
    assert "hidden_size" in text and "vocab_size" in text and "activation 'xielu'" in text


@pytest.mark.parametrize(
    ("target", "init", "biased"),
    [
        ({"model_type": "qwen2"}, "target_layers", True),
        ({"model_type": "qwen2"}, "random", False),
        ({"attention_bias": True}, "target_layers", True),
        ({}, "target_layers", False),
    ],
)
def test_biases_are_kept_only_to_be_copied(target: dict[str, Any], init: str, biased: bool) -> None:
    assert derive({**QWEN3, **target}, init=init).attention_bias == biased


@pytest.mark.case("TOK-08")
def test_a_tied_target_does_not_tie_a_draft_with_a_smaller_vocabulary() -> None:
    made = derive(QWEN3, vocabulary=64)
    assert (made.vocab_size, made.target_vocab_size) == (64, 320)
    assert "tie_word_embeddings" not in made.to_dict()


@pytest.mark.case("TOK-07")
def test_head_rows_beyond_the_tokenizer_do_not_make_a_reduced_vocabulary() -> None:
    """320 rows for 300 tokens: the drafter has 320 rows too, and no tables."""
    made = derive(QWEN3)
    assert made.draft_vocab_size is None and made.vocab_size == 320
