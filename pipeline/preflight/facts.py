"""A target's description: its config.json, generation_config.json and the tokenizer's files, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.architecture import text_part
from pipeline.config import Config, TinyTarget
from pipeline.errors import ConfigError
from pipeline.identity import target_json

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
        self.text = text  # the language model's part of config.json

    @classmethod
    def of(cls, config: Config) -> TargetFacts:
        """Facts of the configured target, made on the spot or read from its files."""
        tiny = config.target.tiny
        if tiny is None:
            return cls.read(config)
        return cls(
            num_layers=tiny.layers, rows=tiny.vocabulary, tokenizer=tiny.vocabulary - TINY_SPARE_ROWS, special={},
            ends={}, text=tiny_shape(tiny),
        )  # fmt: skip

    @classmethod
    def read(cls, config: Config) -> TargetFacts:
        model = target_json(config, "config.json")
        if not model:
            raise ConfigError(f"target.model: {config.target.model} has no config.json")
        text = text_part(model)
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


def tiny_shape(tiny: TinyTarget) -> dict[str, Any]:
    """What config.json will say of a tiny target's sizes, before there is one."""
    return {
        "vocab_size": tiny.vocabulary, "hidden_size": tiny.hidden_size, "intermediate_size": 3 * tiny.hidden_size,
        "num_hidden_layers": tiny.layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": tiny.hidden_size // 4, "max_position_embeddings": 2048, "hidden_act": "silu",
    }  # fmt: skip


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
