"""Checks that need the target's description but not its weights: run before anything slow, all problems at once.

Reads config.json, generation_config.json, tokenizer.json and tokenizer_config.json as plain data. Imports no torch, so
what a drafter can be built from stands here a second time (`ACTIVATIONS`, `ROPE_TYPES`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline import engines
from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.identity import target_json

NEEDS_MASK_TOKEN = ("dspark", "dflash")
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def check(config: Config) -> None:
    """Raises ConfigError naming all the target cannot serve: layers (S4), mask token (S6), vocabulary (S30), shape."""
    if config.target.tiny is not None:
        tiny = config.target.tiny
        facts = TargetFacts(
            num_layers=tiny.layers,
            rows=tiny.vocabulary,
            tokenizer=tiny.vocabulary - TINY_SPARE_ROWS,
            special={},
            ends={},
            text={},
        )
    else:
        facts = TargetFacts.read(config)
    if config.train.published is not None:
        return  # the checkpoint says what the drafter is; `draft` and `targets` have no part in it
    problems = [*_layers(config, facts), *_mask_token(config, facts), *_vocabulary(config, facts)]
    problems += [*_shape(config, facts.text), *_start(config, facts.text)]
    if problems:
        raise ConfigError(problems)


def check_export(config: Config) -> None:
    """Raises ConfigError for a layout that cannot carry the drafter and for an engine that could not serve it."""
    if config.train.published is not None:
        return
    model = {} if config.target.tiny is not None else target_json(config, "config.json")
    text = model.get("text_config") or model
    problems = engines.early_refusals(
        config,
        target_type=str(text.get("model_type", "qwen3")),
        activation=str(text.get("hidden_activation") or text.get("hidden_act") or "silu"),
    )
    if problems:
        raise ConfigError([f"{problem} (export.layouts: [] exports nothing)" for problem in problems])


# Stages that run a model. The others work on text, or copy weights: they run where the GPUs are not.
COMPUTING = ("answers", "targets", "train", "calibrate", "profile", "evaluate")
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd")


def has_gpu() -> bool:
    """An NVIDIA or AMD device, as far as this can be told without torch."""
    return any(Path(name).exists() for name in _GPU_DEVICES)


def check_device(config: Config, stages: Sequence[str]) -> None:
    """Raises ConfigError for settings that only a GPU serves, where one of `stages` computes and there is none here."""
    if has_gpu() or not set(stages) & set(COMPUTING):
        return
    target, problems = config.target, []
    if target.attention == "flash_attention_2":
        problems.append("target.attention: flash_attention_2 needs a GPU, this machine has none; use auto")
    if target.device_map is not None and target.device_map.startswith("cuda"):
        problems.append(f"target.device_map: {target.device_map} needs a GPU, this machine has none; leave it out")
    if problems:
        raise ConfigError(problems)


TINY_SPARE_ROWS = 8


class TargetFacts:
    """What the checks need to know. Token tables map id -> what it is."""

    def __init__(
        self,
        *,
        num_layers: int,
        rows: int,
        tokenizer: int | None,
        special: dict[int, str],
        ends: dict[int, str],
        text: Mapping[str, Any],
    ) -> None:
        self.num_layers = num_layers  # decoder layers
        self.rows = rows  # rows of the embedding
        self.tokenizer = tokenizer  # tokens the tokenizer knows; None when it cannot be told
        self.special = special  # added special tokens
        self.ends = ends  # pad, eos, end-of-turn
        self.text = text  # the language model's part of config.json; empty for a tiny target

    @classmethod
    def read(cls, config: Config) -> TargetFacts:
        model = target_json(config, "config.json")
        if not model:
            raise ConfigError(f"target.model: {config.target.model} has no config.json")
        text = model.get("text_config") or model
        try:
            num_layers, rows = int(text["num_hidden_layers"]), int(text["vocab_size"])
        except KeyError as error:
            raise ConfigError(f"target.model: config.json of {config.target.model} has no {error}") from error
        tokens = _tokenizer_table(target_json(config, "tokenizer.json"))
        settings = target_json(config, "tokenizer_config.json")
        special = {index: text for index, (text, is_special) in tokens.items() if is_special}
        ends: dict[int, str] = {}
        for source in (text, model, target_json(config, "generation_config.json")):
            for name in ("pad_token_id", "eos_token_id"):
                for index in _ids(source.get(name)):
                    ends.setdefault(index, name.removesuffix("_id"))
        by_text = {text: index for index, (text, _) in tokens.items()}
        for name in ("pad_token", "eos_token"):
            value = settings.get(name)
            value = value.get("content") if isinstance(value, dict) else value
            if value in by_text:
                ends.setdefault(by_text[value], name)
        return cls(
            num_layers=num_layers, rows=rows, tokenizer=max(tokens) + 1 if tokens else None, special=special, ends=ends,
            text=text,
        )  # fmt: skip


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(item) for item in value] if isinstance(value, list) else [int(value)]


def _tokenizer_table(tokenizer: dict[str, Any]) -> dict[int, tuple[str, bool]]:
    table: dict[int, tuple[str, bool]] = {}
    vocab = tokenizer.get("model", {}).get("vocab", {})
    items = vocab.items() if isinstance(vocab, dict) else ((row[0], index) for index, row in enumerate(vocab))
    for text, index in items:
        table[int(index)] = (str(text), False)
    for token in tokenizer.get("added_tokens", []):
        table[int(token["id"])] = (token["content"], bool(token.get("special")))
    return table


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
    size = config.draft.vocabulary
    if size is not None and size > facts.rows:
        return [f"draft.vocabulary: {size} is larger than the target's vocabulary of {facts.rows}"]
    return []


# ------------------------------------------------------------------------------------------------ the drafter's shape


def _shape(config: Config, text: Mapping[str, Any]) -> list[str]:
    """Activation, rotary parameters and head counts, which the drafter takes from the target unless they are set."""
    draft, problems = config.draft, []
    activation, kind = _activation(text), _rope_type(text)
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
        "activation": _activation(text),
    }
    if any("experts" in name for name in text):
        del there["intermediate_size"]  # the MLP starts at random
    return [
        f"draft.{name}: {own} with draft.init: target_layers, whose layers have {value}; leave it out"
        for name, value in there.items()
        if value is not None and (own := getattr(draft, name)) is not None and own != value
    ]


def _activation(text: Mapping[str, Any]) -> str | None:
    found = text.get("hidden_activation") or text.get("hidden_act")
    found = {"gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh", "swish": "silu"}.get(str(found), found)
    return None if found is None else str(found)


def _rope_type(text: Mapping[str, Any]) -> str:
    given = dict(text.get("rope_parameters") or {})
    given = {**dict(text.get("rope_scaling") or {}), **dict(given.get("full_attention", given))}
    return str(given.get("rope_type") or given.get("type") or "default")
