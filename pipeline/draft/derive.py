"""A drafter's configuration from its target's: sizes, activation and rotary base are the target's unless set.

    config = derive_config(target_config, config.draft, target_layer_ids=layers)

Reads plain data (a Hugging Face `config.json`), so a login node can do it without the model's code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.architecture import ACTIVATIONS, activation_of, has_attention_bias, read_rope, text_part
from pipeline.draft.config import DraftConfig
from pipeline.draft.rope import inverse_frequencies
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.config import Draft


def derive_config(target: Mapping[str, Any], draft: Draft, *, target_layer_ids: Sequence[int]) -> DraftConfig:
    """The `DraftConfig` for a target config (as `to_dict()` or `config.json` gives it) and the run's draft section.

    Rotary parameters are taken in the old and the new form (S5). Raises ConfigError with every problem at once.
    """
    target = text_part(target)
    problems = _missing(target)
    activation = str(draft.activation or activation_of(target))
    if activation not in ACTIVATIONS:
        problems.append(
            f"target: activation {activation!r} is not one of {', '.join(ACTIVATIONS)}; set draft.activation"
        )
    rope: dict[str, Any] = {}
    if not problems:
        head_dim = target.get("head_dim") or target["hidden_size"] // target["num_attention_heads"]
        try:
            rope = read_rope(target)
            inverse_frequencies(rope, head_dim)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    heads = target["num_attention_heads"]
    return DraftConfig(
        kind=draft.kind,
        block_size=draft.block_size,
        layout=draft.layout,
        layers=draft.layers,
        hidden_size=target["hidden_size"],
        intermediate_size=draft.intermediate_size or target["intermediate_size"],
        heads=draft.heads or heads,
        kv_heads=draft.kv_heads or target.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        activation=activation,
        rms_norm_eps=float(target.get("rms_norm_eps", 1e-6)),
        attention_bias=draft.init == "target_layers" and has_attention_bias(target),
        rope=rope,
        markov=draft.markov,
        markov_rank=draft.markov_rank if draft.markov != "none" else 0,
        confidence=draft.confidence,
        taps=draft.taps,
        target_layer_ids=tuple(target_layer_ids),
        target_num_layers=target["num_hidden_layers"],
        target_vocab_size=target["vocab_size"],
        draft_vocab_size=draft.vocabulary,
        mask_token_id=draft.mask_token_id,
    )


def _missing(target: Mapping[str, Any]) -> list[str]:
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    return [
        f"target: its config has no usable {key} (found {target.get(key)!r}); a drafter takes its size from there"
        for key in needed
        if not isinstance(target.get(key), int)
    ]
