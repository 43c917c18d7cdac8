"""The complete list of tensors a folder of each layout must hold.

It is written down from the layouts' own description, not derived from what the exporter happens to write: that is what
makes the self-check worth something. Engines do not check: vLLM loads a DSpark file without `fc`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.draft.config import DraftConfig
from pipeline.layouts import mtp
from pipeline.layouts.config_json import ZERO_RANK

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """A tensor of a layout. `kind`: weight (stored in the export's dtype), id or flag. Optional ones may be absent."""

    shape: Shape
    kind: str = "weight"
    optional: bool = False


def table(
    config: DraftConfig, layout: str, *, confidence_with_markov: bool = True, zero_head: bool = True
) -> dict[str, Entry]:
    """Every tensor a folder of `layout` holds for this drafter, by name.

    Args:
        confidence_with_markov: false for a foreign checkpoint whose confidence head ignores the Markov embedding.
        zero_head: whether a next-token drafter without a Markov head has one of zeros, as ours are written; DeepSpec's
            own (rank 0) have no tensors for it.
    """
    if layout == "mtp":
        return {name: Entry(shape) for name, shape in mtp.shapes(config).items()}
    width, vocab, rows = config.hidden_size, config.target_vocab_size, config.vocab_size
    entries = _eagle_stack(config, layout) if config.kind == "eagle3" else _block_stack(config)
    entries |= {
        "fc.weight": Entry((width, len(config.target_layer_ids) * width)),
        "norm.weight": Entry((width,)),
        "embed_tokens.weight": Entry((vocab, width), optional=True),
        "lm_head.weight": Entry((rows, width), optional=not own_head(config)),
    }
    if config.draft_vocab_size is not None:
        entries["d2t"] = Entry((rows,), "id")
        entries["t2d"] = Entry((vocab,), "flag", optional=layout != "speculators")
    elif layout in ("speculators", "eagle3"):  # some writers store identity tables
        entries |= {"d2t": Entry((vocab,), "id", optional=True), "t2d": Entry((vocab,), "flag", optional=True)}
    if config.layout == "next_token" and config.kind in ("dspark", "dflash"):
        entries |= _heads(config, zero_head=zero_head)
    if not confidence_with_markov and "confidence_head.proj.weight" in entries:
        entries["confidence_head.proj.weight"] = Entry((1, width))
    return entries


def own_head(config: DraftConfig) -> bool:
    """Eagle3 readers expect a head in the file; the others share the target's unless the vocabulary is reduced."""
    return config.draft_vocab_size is not None or config.kind == "eagle3"


def _block_stack(config: DraftConfig) -> dict[str, Entry]:
    entries = {"hidden_norm.weight": Entry((config.hidden_size,))}
    for index in range(config.layers):
        layer = f"layers.{index}."
        entries |= _layer(config, layer, config.hidden_size)
        entries[f"{layer}self_attn.q_norm.weight"] = Entry((config.head_dim,))
        entries[f"{layer}self_attn.k_norm.weight"] = Entry((config.head_dim,))
    return entries


def _eagle_stack(config: DraftConfig, layout: str) -> dict[str, Entry]:
    layer = "layers.0." if layout == "speculators" else "midlayer."
    norm = {f"{layer}hidden_norm.weight": Entry((config.hidden_size,))}
    return {**_layer(config, layer, 2 * config.hidden_size), **norm}


def _layer(config: DraftConfig, layer: str, input_width: int) -> dict[str, Entry]:
    width, inner, d = config.hidden_size, config.intermediate_size, config.head_dim
    outputs = {"q_proj": config.heads * d, "k_proj": config.kv_heads * d, "v_proj": config.kv_heads * d}
    entries = {f"{layer}self_attn.{name}.weight": Entry((rows, input_width)) for name, rows in outputs.items()}
    entries[f"{layer}self_attn.o_proj.weight"] = Entry((width, config.heads * d))
    if config.attention_bias:
        entries |= {f"{layer}self_attn.{name}.bias": Entry((rows,)) for name, rows in outputs.items()}
        entries[f"{layer}self_attn.o_proj.bias"] = Entry((width,))  # engines tie it to the same flag; ours is zero
    for name in ("gate_proj", "up_proj"):
        entries[f"{layer}mlp.{name}.weight"] = Entry((inner, width))
    entries[f"{layer}mlp.down_proj.weight"] = Entry((width, inner))
    for name in ("input_layernorm", "post_attention_layernorm"):
        entries[f"{layer}{name}.weight"] = Entry((width,))
    return entries


def _heads(config: DraftConfig, *, zero_head: bool) -> dict[str, Entry]:
    rank = config.markov_rank or ZERO_RANK
    width = config.hidden_size
    entries: dict[str, Entry] = {}
    stored = config.markov != "none" or zero_head
    if stored:
        entries["markov_head.markov_w1.weight"] = Entry((config.target_vocab_size, rank))
        entries["markov_head.markov_w2.weight"] = Entry((config.vocab_size, rank))
    if config.markov == "gated":
        entries["markov_head.gate_proj.weight"] = Entry((rank, width + rank))
        entries["markov_head.gate_proj.bias"] = Entry((rank,))
    if config.markov == "rnn":
        entries["markov_head.joint_proj.weight"] = Entry((3 * rank, 2 * rank + width))
        entries["markov_head.joint_proj.bias"] = Entry((3 * rank,))
    if config.confidence:
        entries["confidence_head.proj.weight"] = Entry((1, width + (rank if stored else 0)))
        entries["confidence_head.proj.bias"] = Entry((1,))
    return entries


def list_problems(found: Mapping[str, Tensor], entries: Mapping[str, Entry], *, dtype: torch.dtype | None) -> list[str]:
    """Missing, unexpected and misshapen tensors, wrong dtypes, non-finite values; empty when all is as listed.

    With `dtype` None any of FLOATS passes (checkpoints from elsewhere); otherwise it is the one expected.
    """
    problems = [
        f"missing {name} {list(entry.shape)}"
        for name, entry in sorted(entries.items())
        if name not in found and not entry.optional
    ]
    for name, tensor in sorted(found.items()):
        entry = entries.get(name)
        if entry is None:
            problems.append(f"unexpected {name} {list(tensor.shape)}")
        elif tuple(tensor.shape) != entry.shape:
            problems.append(f"misshapen {name}: {list(tensor.shape)} found, {list(entry.shape)} expected")
        elif (wrong := _dtype_problem(tensor, entry, dtype)) is not None:
            problems.append(f"{name}: {wrong}")
        elif entry.kind == "weight" and not bool(torch.isfinite(tensor).all()):
            problems.append(f"{name}: holds values that are not finite")
    return problems


# Narrower ones mean nothing without the scales of a quantisation.
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _dtype_problem(tensor: Tensor, entry: Entry, dtype: torch.dtype | None) -> str | None:
    if entry.kind == "weight":
        wanted = FLOATS if dtype is None else (dtype,)
        told = " or ".join(str(each) for each in wanted)
        return None if tensor.dtype in wanted else f"stored as {tensor.dtype}, {told} expected"
    whole = not tensor.is_floating_point() and not tensor.is_complex()
    return None if whole else f"stored as {tensor.dtype}, whole numbers expected"
