"""What of the drafter the target decides: tapped layers (S4), mask token (S6), draft vocabulary (S30), shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.architecture import ACTIVATIONS, ROPE_TYPES, activation_of, rope_parameters
from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.preflight.facts import TargetFacts

NEEDS_MASK_TOKEN = ("dspark", "dflash")


def problems(config: Config, facts: TargetFacts) -> list[str]:
    """All that the target cannot serve. Of a published drafter, the checkpoint says what it is: nothing."""
    if config.train.published is not None:
        return []
    return [
        *_layers(config, facts),
        *_mask_token(config, facts),
        *_vocabulary(config, facts),
        *_shape(config, facts.text),
        *_start(config, facts.text),
    ]


# ------------------------------------------------------------------------------------------------ layers (S4)


def default_layers(num_layers: int, count: int = 5) -> tuple[int, ...]:
    """`count` tapped layers spread evenly from layer 1 to layer num_layers - 3: (1, 9, 17, 25, 33) of 36.

    Raises ConfigError when the target is too shallow for distinct layers; the user then names them.
    """
    layers = tuple(int(1 + index * (num_layers - 4) / (count - 1)) for index in range(count))
    if len(set(layers)) < count or layers[-1] > num_layers - 2 or layers[0] < 0:
        raise ConfigError(
            f"targets.layers: num_layers = {num_layers} is too shallow for {count} default layers; "
            f"name them, strictly increasing, in [0, {num_layers - 2}]"
        )
    return layers


def check_layers(layers: Sequence[int], num_layers: int) -> list[str]:
    """Problems with tapped layer ids: id l is the raw output of decoder layer l, valid in [0, num_layers - 2] (S4)."""
    problems = []
    if not layers:
        problems.append("targets.layers: at least one layer is needed")
    for layer in layers:
        if layer == num_layers - 1:
            problems.append(
                f"targets.layers: {layer} is the last layer, whose output is only known after the final norm; "
                f"the valid range is [0, {num_layers - 2}]"
            )
        elif not 0 <= layer <= num_layers - 2:
            problems.append(f"targets.layers: {layer} is outside the valid range [0, {num_layers - 2}]")
    if any(a >= b for a, b in zip(layers, layers[1:], strict=False)):
        problems.append(f"targets.layers: {list(layers)} is not strictly increasing")
    return problems


def _layers(config: Config, facts: TargetFacts) -> list[str]:
    problems = []
    if config.targets.layers is not None:
        problems += check_layers(config.targets.layers, facts.num_layers)
    else:
        try:
            default_layers(facts.num_layers)
        except ConfigError as error:
            problems += error.problems
    for layer in config.draft.init_layers or ():
        if not 0 <= layer < facts.num_layers:
            problems.append(f"draft.init_layers: {layer} is outside [0, {facts.num_layers - 1}]")
    if config.draft.init_layers is not None and len(config.draft.init_layers) != config.draft.layers:
        problems.append(
            f"draft.init_layers: {len(config.draft.init_layers)} layers named for draft.layers = {config.draft.layers}"
        )
    return problems


# ------------------------------------------------------------------------------------------------ tokens (S6, S30)


def _mask_token(config: Config, facts: TargetFacts) -> list[str]:
    token = config.draft.mask_token_id
    where = "draft.mask_token_id"
    if config.draft.kind not in NEEDS_MASK_TOKEN:
        return []
    if token is None:
        spare = "" if facts.tokenizer is None or facts.tokenizer >= facts.rows else f", e.g. {facts.tokenizer}"
        return [f"{where}: required: a row of the target's embedding that no text uses{spare}"]
    if not 0 <= token < facts.rows:
        return [f"{where}: {token} is not a row of the target's embedding (0 to {facts.rows - 1})"]
    if config.draft.allow_used_mask_token:
        return []
    if token in facts.ends:
        return [f"{where}: {token} is the target's {facts.ends[token]}; choose an unused row"]
    if facts.tokenizer is not None and token < facts.tokenizer and token not in facts.special:
        return [f"{where}: {token} is a normal token of the target's vocabulary; choose an unused row or special token"]
    return []


def refuse_mask_token_in_corpus(config: Config, special_tokens: Mapping[str, int]) -> None:
    """The half of S6 that needs the corpus: `special_tokens` is the tokens manifest's table of id -> count.

    Raises ConfigError when the mask token occurs in the training rows.
    """
    count = special_tokens.get(str(config.draft.mask_token_id), 0)
    if count and config.draft.kind in NEEDS_MASK_TOKEN and not config.draft.allow_used_mask_token:
        raise ConfigError(
            f"draft.mask_token_id: {config.draft.mask_token_id} occurs {count} times in the training rows; "
            "take a token that neither the template nor the corpus contains"
        )


def _vocabulary(config: Config, facts: TargetFacts) -> list[str]:
    size, kept, known, problems = config.draft.vocabulary, config.targets.topk, facts.tokenizer, []
    if size is not None and size > facts.rows:
        problems.append(f"draft.vocabulary: {size} is larger than the target's vocabulary of {facts.rows}")
    elif size is not None and known is not None and size > known:
        problems.append(f"draft.vocabulary: {size} is larger than the {known} tokens the target's tokenizer knows")
    if config.targets.logits == "topk" and kept > facts.rows:
        problems.append(f"targets.topk: {kept} is larger than the target's vocabulary of {facts.rows}")
    return problems


# ------------------------------------------------------------------------------------------------ the drafter's shape


def _shape(config: Config, text: Mapping[str, Any]) -> list[str]:
    """Activation, rotary parameters and head counts, which the drafter takes from the target unless they are set."""
    draft, problems = config.draft, []
    activation, kind = activation_of(text), rope_parameters(text)["rope_type"]
    if draft.activation is None and activation is not None and activation not in ACTIVATIONS:
        problems.append(f"draft.activation: the target's {activation} is not known here; choose one")
    if kind not in ROPE_TYPES:
        problems.append(f"target.model: rope_type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    there = text.get("num_attention_heads")
    heads = draft.heads or there
    kv_heads = draft.kv_heads or text.get("num_key_value_heads") or there
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        problems.append(f"draft.heads: {heads} is not a multiple of the {kv_heads} key/value heads (draft.kv_heads)")
    return problems


def _start(config: Config, text: Mapping[str, Any]) -> list[str]:
    """Settings that do not go with layers copied from the target."""
    draft = config.draft
    if draft.init != "target_layers":
        return []
    if draft.kind == "medusa":
        return ["draft.init: target_layers: kind medusa has no layers to copy into; set draft.init: random"]
    heads = text.get("num_attention_heads")
    there = {
        "intermediate_size": text.get("intermediate_size"),
        "heads": heads,
        "kv_heads": text.get("num_key_value_heads") or heads,
        "activation": activation_of(text),
    }
    if any("experts" in name for name in text):
        del there["intermediate_size"]  # the MLP starts at random
    return [
        f"draft.{name}: {own} with draft.init: target_layers, whose layers have {value}; leave it out"
        for name, value in there.items()
        if value is not None and (own := getattr(draft, name)) is not None and own != value
    ]
