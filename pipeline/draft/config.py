"""What a drafter is: every number its modules are built from, and nothing about how it is trained.

    config = DraftConfig.from_dict(json.loads(text))

Two drafters with equal `DraftConfig`s load each other's weights. Reading one back is strict: an unknown key, a missing
key or an unknown layout is an error, because a wrong layout serves silently at an accepted length near 1 (S1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from pipeline.architecture import ACTIVATIONS
from pipeline.errors import ConfigError

KINDS = ("dspark", "dflash", "eagle3", "mtp", "medusa")
BLOCK_KINDS = ("dspark", "dflash")
LAYOUTS = ("next_token", "fill_in")
MARKOV = ("none", "vanilla", "gated", "rnn")


@dataclass(frozen=True)
class DraftConfig:
    """Shape and conventions of a drafter.

    `block_size` is K, the number of tokens drafted per round, in either layout (S1). `target_layer_ids` follow S4:
    id l is the raw output of decoder layer l. `rope` is in the new form (`rope_type`, `rope_theta`, …). The width is
    the target's: the drafter reads the target's embedding and writes into its head.
    """

    kind: str
    block_size: int
    layout: str
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    activation: str
    rms_norm_eps: float
    attention_bias: bool
    rope: dict[str, Any]
    markov: str
    markov_rank: int
    confidence: bool
    taps: bool
    target_layer_ids: tuple[int, ...]
    target_num_layers: int
    target_vocab_size: int
    draft_vocab_size: int | None
    mask_token_id: int | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        if problems := _problems(self):
            raise ConfigError([f"drafter: {problem}" for problem in problems])

    @property
    def vocab_size(self) -> int:
        """Rows of the proposal distribution: |D| under a draft vocabulary (S30), V otherwise."""
        return self.target_vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def target_hidden_size(self) -> int:
        """Width of the target's hidden states: the drafter's own, since it writes into the target's head."""
        return self.hidden_size

    @property
    def block_inputs(self) -> int:
        """Tokens fed per block: K in the next-token layout, 1 + K in the fill-in layout (S1)."""
        return self.block_size + (1 if self.layout == "fill_in" else 0)

    @property
    def first_output(self) -> int:
        """Index of the block input whose output is slot 1."""
        return self.block_inputs - self.block_size

    @property
    def uses_last_hidden(self) -> bool:
        """Whether the drafter reads the target's last hidden state at every position (MTP, Medusa)."""
        return self.kind in ("mtp", "medusa")

    @property
    def uses_taps(self) -> bool:
        """Whether the drafter reads tapped hidden states."""
        return self.taps and not self.uses_last_hidden

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {**asdict(self), "target_layer_ids": list(self.target_layer_ids)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DraftConfig:
        """The inverse of `to_dict`.

        Raises ConfigError naming every unknown and every missing key, and every value out of range.
        """
        names = {field.name for field in fields(cls)}
        problems = [f"drafter: unknown key {key!r}" for key in sorted(set(data) - names)]
        problems += [f"drafter: missing key {key!r}" for key in sorted(names - set(data))]
        if problems:
            raise ConfigError(problems)
        return cls(**data)


def _problems(config: DraftConfig) -> list[str]:
    found = _choices(config) + _sizes(config)
    if found:  # the checks below divide by, and compare, what was just found wrong
        return found
    if config.heads % config.kv_heads:
        found.append(f"heads {config.heads} is not a multiple of kv_heads {config.kv_heads}")
    if config.draft_vocab_size is not None and config.draft_vocab_size > config.target_vocab_size:
        found.append(
            f"vocabulary {config.draft_vocab_size} is larger than the target's vocabulary {config.target_vocab_size}"
        )
    return found + _family(config) + _reading(config)


def _choices(config: DraftConfig) -> list[str]:
    allowed = {"kind": KINDS, "layout": LAYOUTS, "markov": MARKOV, "activation": ACTIVATIONS}
    return [
        f"{name} {getattr(config, name)!r} is unknown; one of {', '.join(options)} is expected"
        for name, options in allowed.items()
        if getattr(config, name) not in options
    ]


def _sizes(config: DraftConfig) -> list[str]:
    names = ["block_size", "layers", "hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim"]
    names += ["target_num_layers", "target_vocab_size"]
    names += ["draft_vocab_size"] if config.draft_vocab_size is not None else []
    return [
        f"{name} must be a whole number of at least 1, found {value!r}"
        for name in names
        if type(value := getattr(config, name)) is not int or value < 1
    ]


def _family(config: DraftConfig) -> list[str]:
    found = []
    if (config.markov == "none") != (config.markov_rank == 0):
        found.append(f"markov {config.markov!r} does not go with markov_rank {config.markov_rank}")
    if config.kind not in BLOCK_KINDS and (config.markov != "none" or config.layout != "next_token"):
        found.append(f"kind {config.kind} has neither a Markov head nor a fill-in layout")
    if config.kind in ("eagle3", "mtp") and config.layers != 1:
        found.append(f"kind {config.kind} has one layer, found layers {config.layers}")
    if config.layout == "fill_in" and config.markov != "none":
        found.append("the fill-in layout has no Markov head")
    if config.kind == "eagle3" and not config.taps:
        found.append("kind eagle3 needs taps: its drafting state starts from them")
    if config.uses_last_hidden and not config.taps:
        found.append(f"kind {config.kind} reads the last hidden state, never taps: taps false would change nothing")
    return found


def _reading(config: DraftConfig) -> list[str]:
    found = []
    if config.kind in BLOCK_KINDS:
        mask = config.mask_token_id
        if mask is None:
            found.append("mask_token_id is not set (S6)")
        elif type(mask) is not int or not 0 <= mask < config.target_vocab_size:
            found.append(f"mask_token_id {mask!r} is not a row of the embedding (0…{config.target_vocab_size - 1})")
    ids = config.target_layer_ids
    if config.uses_taps and not ids:
        found.append("target_layer_ids is empty")
    if list(ids) != sorted(set(ids)) or any(not 0 <= i <= config.target_num_layers - 2 for i in ids):
        found.append(
            f"target_layer_ids {list(ids)} must rise strictly within 0…{config.target_num_layers - 2} (S4: id l is the "
            "raw output of decoder layer l; the last layer is stored after the final norm)"
        )
    return found
