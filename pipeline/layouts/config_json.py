"""config.json of every layout, from a `DraftConfig`; `read_config.py` is the way back.

All layouts describe one decoder stack in the Qwen3 form engines know (Llama's for Eagle3, which has no query/key norms)
and differ in where the drafter's own keys stand and how they count layers and block inputs. Every key is written, also
where it has a default: a default is another program's opinion, and it may change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.draft.config import DraftConfig

ZERO_RANK = 16  # of the all-zero Markov head a next-token DFlash goes out with
OWN = "dspark_pipeline"  # our block: provenance, never architecture
_VANILLA = {"none": "vanilla"}


@dataclass(frozen=True)
class Origin:
    """What config.json says about the run beside the architecture.

    `target` is the name or path an engine is told to load, `architectures` the target's; `ends` its bos, eos and pad
    ids; `dtype` what the weights are stored in (publishing sets it); `meta` our own provenance (template, target
    identity, fingerprints).
    """

    target: str
    architectures: tuple[str, ...] = ()
    max_position_embeddings: int = 32768
    ends: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "bfloat16"
    meta: Mapping[str, Any] = field(default_factory=dict)


def speculative_tokens(config: DraftConfig) -> int:
    """Tokens drafted per round: the slots that predict, in every layout (EXP-02)."""
    return config.block_size


def write_config(config: DraftConfig, layout: str, origin: Origin) -> dict[str, Any]:
    """The whole config.json of `layout`. The layout must be able to carry the drafter (`engines.refuse`)."""
    writer = {
        "deepspec": _deepspec,
        "speculators": _speculators,
        "specforge": _specforge,
        "dflash": _dflash,
        "eagle3": _eagle3,
        "mtp": _mtp,
    }[layout]
    return {**writer(config, origin), OWN: {"layout": layout, **_plain(origin.meta)}}


def decoder(config: DraftConfig, origin: Origin, *, model_type: str = "qwen3") -> dict[str, Any]:
    """The draft stack as a Qwen3 (or Llama) configuration; rope in the new and the old form, which agree."""
    rope = dict(config.rope)
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    kind = scaling.get("rope_type", "default")
    partial = {"partial_rotary_factor": rope["partial_rotary_factor"]} if "partial_rotary_factor" in rope else {}
    return {
        "model_type": model_type,
        "vocab_size": config.target_vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.activation,
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "max_position_embeddings": origin.max_position_embeddings,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if kind == "default" else scaling,
        **partial,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": config.layers,
        "layer_types": ["full_attention"] * config.layers,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": origin.ends.get("bos_token_id"),
        "eos_token_id": origin.ends.get("eos_token_id"),
        "pad_token_id": origin.ends.get("pad_token_id"),
        "dtype": origin.dtype,
        "torch_dtype": origin.dtype,
    }


def heads(config: DraftConfig) -> dict[str, Any]:
    """Markov and confidence keys. A next-token DFlash has an all-zero vanilla head: no engine runs rank 0.

    Its confidence head is stored as wide as one that reads the Markov embedding: llama.cpp loads no other.
    """
    return {
        "markov_rank": config.markov_rank or ZERO_RANK,
        "markov_head_type": _VANILLA.get(config.markov, config.markov),
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence,
    }


def _vocabulary(config: DraftConfig) -> dict[str, Any]:
    return {} if config.draft_vocab_size is None else {"draft_vocab_size": config.draft_vocab_size}


def _deepspec(config: DraftConfig, origin: Origin) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3DSparkModel"],
        **decoder(config, origin),
        "block_size": config.block_size,
        "num_speculative_tokens": speculative_tokens(config),
        "sample_from_anchor": True,
        "target_layer_ids": list(config.target_layer_ids),
        "target_hidden_size": config.target_hidden_size,
        "num_target_layers": config.target_num_layers,
        "mask_token_id": config.mask_token_id,
        "num_anchors": 512,  # of no consequence when serving; DeepSpec's class asserts the key
        **heads(config),
        **_vocabulary(config),
    }


def _speculators(config: DraftConfig, origin: Origin) -> dict[str, Any]:
    family = {"eagle3": "eagle3"}.get(config.kind, "dflash" if config.layout == "fill_in" else "dspark")
    verifier = {"name_or_path": origin.target, "architectures": list(origin.architectures)}
    proposal = {"proposal_type": "greedy", "speculative_tokens": speculative_tokens(config)}
    names = {"eagle3": "Eagle3Speculator", "dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}
    aux = [layer + 1 for layer in config.target_layer_ids]  # counted as hidden_states[id]
    model_type = "llama" if family == "eagle3" else "qwen3"
    stack = decoder(config, origin, model_type=model_type)
    if family == "eagle3":
        stack["num_aux_hidden_states"] = len(aux)  # vLLM reads it here, and takes three where it is absent
    common = {
        "architectures": [names[family]],
        "speculators_model_type": family,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": family,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "transformer_layer_config": {**stack, "architectures": list(origin.architectures)},
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        "dtype": origin.dtype,
        "num_target_layers": config.target_num_layers,
    }
    if family == "eagle3":
        return {**common, "eagle_aux_hidden_state_layer_ids": aux, **_eagle3_norms()}
    block = {
        "block_size": config.block_inputs,
        "sample_from_anchor": config.layout == "next_token",
        "aux_hidden_state_layer_ids": aux,
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": True,  # the other value makes vLLM treat every layer as causal
    }
    return {**common, **block, **(heads(config) if family == "dspark" else {})}


def _specforge(config: DraftConfig, origin: Origin) -> dict[str, Any]:
    family = "dflash" if config.layout == "fill_in" else "dspark"
    own = {
        "projector_type": family,
        "block_size": config.block_inputs,
        "num_target_layers": config.target_num_layers,
        "target_layer_ids": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
        "attention_mode": "bidirectional",
        "causal": False,
        **(heads(config) if family == "dspark" else {}),
    }
    return {
        "architectures": ["DFlashDraftModel" if family == "dflash" else "DSparkDraftModel"],
        **decoder(config, origin),
        "block_size": config.block_inputs,
        "num_speculative_tokens": speculative_tokens(config),
        "sample_from_anchor": config.layout == "next_token",
        "num_target_layers": config.target_num_layers,
        "dflash_config": own,
    }


def _dflash(config: DraftConfig, origin: Origin) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"],
        **decoder(config, origin),
        "block_size": config.block_inputs,
        "num_speculative_tokens": speculative_tokens(config),
        "sample_from_anchor": False,
        "num_target_layers": config.target_num_layers,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            "causal": False,
            "use_swa": False,
        },
    }


def _eagle3_norms() -> dict[str, Any]:
    return {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False}


def _eagle3(config: DraftConfig, origin: Origin) -> dict[str, Any]:
    aux = [layer + 1 for layer in config.target_layer_ids]
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **decoder(config, origin, model_type="llama"),
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "num_target_layers": config.target_num_layers,
        "num_speculative_tokens": speculative_tokens(config),
        "num_aux_hidden_states": len(aux),
        "eagle_aux_hidden_state_layer_ids": aux,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": aux},
        **_eagle3_norms(),
    }


def _mtp(config: DraftConfig, origin: Origin) -> dict[str, Any]:
    """A description only: the tensors belong into the target's own checkpoint under `mtp.*`, beside its config."""
    return {
        "architectures": ["Qwen3_5MTP"],
        **decoder(config, origin, model_type="qwen3_5_text"),
        "mtp_num_hidden_layers": 1,
        "target_layer_ids": list(config.target_layer_ids),  # read by nobody: the head starts from the last hidden state
        "num_speculative_tokens": speculative_tokens(config),
        "num_target_layers": config.target_num_layers,
        "target_hidden_size": config.target_hidden_size,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
