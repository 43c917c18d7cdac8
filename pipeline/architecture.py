"""What a drafter can be built from, and how a target's config.json says what it is made of. Imports no torch.

Read before anything slow by `preflight`, and again by `draft` where the drafter is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.errors import ConfigError

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_SAME = {"gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh", "swish": "silu"}


def text_part(target: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's config where the target reads more than text."""
    for key in ("text_config", "llm_config", "language_config"):
        if isinstance(target.get(key), Mapping):
            return target[key]
    return target


def activation_of(target: Mapping[str, Any]) -> str | None:
    """The target's MLP activation under the name used here (Gemma keeps it under another key); None when not told."""
    found = target.get("hidden_activation") or target.get("hidden_act")
    return None if found is None else _SAME.get(str(found), str(found))


def has_attention_bias(target: Mapping[str, Any]) -> bool:
    """Whether the target's q, k and v projections carry biases (Qwen2 always, others by their own flag)."""
    if target.get("model_type") in ("qwen2", "qwen2_moe"):
        return True
    return bool(target.get("attention_bias", False))


def scales(target: Mapping[str, Any]) -> tuple[float, float]:
    """What the target multiplies its embeddings and its logits by, under the names transformers gives it; else 1.0."""

    def factor(name: str) -> float:
        return float(target.get(name) or 1.0)

    gemma = str(target.get("model_type", "")).startswith("gemma")
    embeddings = factor("hidden_size") ** 0.5 if gemma else factor("embedding_multiplier")
    return embeddings, factor("logit_scale") * factor("lm_head_multiplier") / factor("logits_scaling")


def rope_parameters(target: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters in one form, from `rope_parameters` (new) or `rope_theta` and `rope_scaling` (old).

    Where layer types differ (Gemma 3), the full-attention ones: a block sees its whole context.
    """
    given = dict(target.get("rope_parameters") or {})
    if "full_attention" in given:
        given = dict(given["full_attention"])
    merged = {**dict(target.get("rope_scaling") or {}), **given}
    kind = merged.pop("type", None)
    merged.setdefault("rope_type", kind or "default")
    for key in ("rope_theta", "partial_rotary_factor"):
        if merged.get(key) is None and target.get(key) is not None:
            merged[key] = target[key]
    return merged


def read_rope(target: Mapping[str, Any]) -> dict[str, Any]:
    """A target config's rotary parameters, complete.

    Raises ConfigError when no base is given: a guessed base costs acceptance and nothing else, so nobody would notice.
    """
    found = rope_parameters(target)
    if found.get("rope_theta") is None:
        raise ConfigError("target: its config gives no rope_theta, neither at the top nor in rope_parameters")
    if found["rope_type"] in ("yarn", "llama3"):
        found.setdefault("original_max_position_embeddings", target.get("max_position_embeddings"))
    return {key: value for key, value in sorted(found.items()) if value is not None}
