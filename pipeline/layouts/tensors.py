"""The drafter's tensors under each layout's names, and back; and the complete list a folder must hold.

The list (`table`) is written down from the layouts' own description, not derived from what the exporter happens to
write: that is what makes the self-check worth something. Engines do not check: vLLM loads a DSpark file without `fc`.

Names are the drafter's own (DeepSpec's) but for Eagle3, whose layer is `midlayer` where SGLang and vLLM read it and
`layers.0` for speculators, and MTP (mtp.py). A target with scaled embeddings or logits gets its embedding and head
written with the factors multiplied in, because an engine that runs a foreign drafter applies none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from pipeline.draft.config import DraftConfig
from pipeline.errors import ArtifactError
from pipeline.layouts import mtp
from pipeline.layouts.config_json import ZERO_RANK

Shape = tuple[int, ...]


class Frozen(Protocol):
    """The target's frozen parts, as `pipeline.frozen.Frozen` holds them."""

    embed_VD: Tensor
    head_VD: Tensor
    embed_scale: float
    logit_scale: float
    logit_softcap: float | None


@dataclass(frozen=True)
class Entry:
    """A tensor of a layout. `kind`: weight (stored in the export's dtype), id or flag. Optional ones may be absent."""

    shape: Shape
    kind: str = "weight"
    optional: bool = False


# -------------------------------------------------------------------------------------------------- the list


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
        "lm_head.weight": Entry((rows, width), optional=not _own_head(config)),
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


def _own_head(config: DraftConfig) -> bool:
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
    if config.markov != "none" or zero_head:
        entries["markov_head.markov_w1.weight"] = Entry((config.target_vocab_size, rank))
        entries["markov_head.markov_w2.weight"] = Entry((config.vocab_size, rank))
    if config.markov == "gated":
        entries["markov_head.gate_proj.weight"] = Entry((rank, width + rank))
        entries["markov_head.gate_proj.bias"] = Entry((rank,))
    if config.markov == "rnn":
        entries["markov_head.joint_proj.weight"] = Entry((3 * rank, 2 * rank + width))
        entries["markov_head.joint_proj.bias"] = Entry((3 * rank,))
    if config.confidence:
        entries["confidence_head.proj.weight"] = Entry((1, width + config.markov_rank))
        entries["confidence_head.proj.bias"] = Entry((1,))
    return entries


def list_problems(found: Mapping[str, Tensor], entries: Mapping[str, Entry], *, dtype: torch.dtype | None) -> list[str]:
    """Missing, unexpected and misshapen tensors, wrong dtypes, non-finite values; empty when all is as listed.

    With `dtype` None any floating dtype passes (checkpoints from elsewhere); otherwise it is the one expected.
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


def _dtype_problem(tensor: Tensor, entry: Entry, dtype: torch.dtype | None) -> str | None:
    if entry.kind == "weight":
        right = tensor.dtype == dtype if dtype is not None else tensor.is_floating_point()
        return None if right else f"stored as {tensor.dtype}, {dtype or 'a floating dtype'} expected"
    whole = not tensor.is_floating_point() and not tensor.is_complex()
    return None if whole else f"stored as {tensor.dtype}, whole numbers expected"


# ------------------------------------------------------------------------------------------- drafter -> layout


def to_layout(
    config: DraftConfig,
    state: Mapping[str, Tensor],
    layout: str,
    *,
    frozen: Frozen,
    dtype: torch.dtype,
    target_tensors: bool,
) -> dict[str, Tensor]:
    """The drafter's state under the layout's names, in the stored dtype.

    Args:
        state: `drafter.state_dict()`.
        target_tensors: add the target's embedding and head where the layout has room for them. A head of its own is
            written in any case where the layout needs one (draft vocabulary, Eagle3).
    """
    if layout == "mtp":
        return {name: tensor.to(dtype) for name, tensor in mtp.to_published(config, state).items()}
    entries = table(config, layout)
    out = {_rename(name, config, layout): tensor for name, tensor in state.items()}
    if left_out(config, layout):
        out = {name: tensor for name, tensor in out.items() if not name.startswith("confidence_head.")}
    out |= {name: torch.zeros(entry.shape) for name, entry in entries.items() if _zero(name, config)}
    if target_tensors or _own_head(config):
        rows = state["d2t"] + torch.arange(len(state["d2t"])) if config.draft_vocab_size is not None else slice(None)
        out["lm_head.weight"] = frozen.head_VD[rows] * frozen.logit_scale
    if target_tensors:
        out["embed_tokens.weight"] = frozen.embed_VD * frozen.embed_scale
    return {name: _stored(tensor, entries.get(name), dtype) for name, tensor in out.items()}


def _stored(tensor: Tensor, entry: Entry | None, dtype: torch.dtype) -> Tensor:
    kinds = {"id": torch.int64, "flag": torch.bool}
    return tensor.to(kinds.get(entry.kind, dtype) if entry is not None else dtype).contiguous()


def _rename(name: str, config: DraftConfig, layout: str) -> str:
    if config.kind == "eagle3" and layout != "speculators":
        return name.replace("layers.0.", "midlayer.", 1)
    return name


def left_out(config: DraftConfig, layout: str) -> bool:
    """Whether a trained confidence head has no place: in fill-in, Eagle3 and MTP layouts no engine reads one."""
    return config.confidence and "confidence_head.proj.weight" not in table(config, layout)


def _zero(name: str, config: DraftConfig) -> bool:
    """Tensors engines need that this drafter does not have: an empty Markov head, the output bias of a biased layer."""
    return name.endswith("o_proj.bias") or (name.startswith("markov_head.") and config.markov == "none")


# ------------------------------------------------------------------------------------------- layout -> drafter


def from_layout(
    config: DraftConfig, found: Mapping[str, Tensor], layout: str, *, where: str
) -> tuple[DraftConfig, dict[str, Tensor]]:
    """(config, fp32 state with `d2t` and `t2d`) from a layout's tensors, which have passed `list_problems`.

    A Markov head of zeros is how a next-token DFlash travels, and comes back as one. A confidence head that does not
    read the Markov embedding gets zero columns for it.

    Raises ArtifactError for values we have no place for: an output bias that is not zero, tables that contradict.
    """
    if layout == "mtp":
        return config, mtp.from_published(config, found, where=where)
    problems: list[str] = []
    state = {
        name.replace("midlayer.", "layers.0.", 1): tensor.float()
        for name, tensor in found.items()
        if name not in ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d") and not name.endswith("o_proj.bias")
    }
    problems += [
        f"{name} is not zero; our layers have no output bias"
        for name, tensor in found.items()
        if name.endswith("o_proj.bias") and bool(tensor.any())
    ]
    if config.draft_vocab_size is not None:
        state |= _tables(config, found, problems)
    elif "d2t" in found and bool(found["d2t"].any()):
        problems.append("d2t moves ids although the vocabulary is the target's")
    if problems:
        raise ArtifactError("\n".join(f"{where}: {problem}" for problem in problems))
    if config.markov == "vanilla" and not any(bool(state[name].any()) for name in _MARKOV):
        config = replace(config, kind="dflash", markov="none", markov_rank=0)
        state = {name: tensor for name, tensor in state.items() if name not in _MARKOV}
    return config, _fit_confidence(config, state)


_MARKOV = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
_CONFIDENCE = "confidence_head.proj.weight"


def _fit_confidence(config: DraftConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Pad (or cut) the confidence row to [h; W1[x]]: the columns added multiply nothing, those cut multiplied zeros."""
    if _CONFIDENCE in state:
        width = config.hidden_size + config.markov_rank
        row = state[_CONFIDENCE][:, :width]
        state[_CONFIDENCE] = torch.cat([row, row.new_zeros(1, width - row.shape[1])], dim=1)
    return state


def _tables(config: DraftConfig, found: Mapping[str, Tensor], problems: list[str]) -> dict[str, Tensor]:
    """d2t (target = draft + d2t) and t2d; the second is rebuilt when absent and must agree when present."""
    d2t = found["d2t"].to(torch.int64)
    ids = d2t + torch.arange(len(d2t))
    inside = bool(((ids >= 0) & (ids < config.target_vocab_size)).all())
    if not inside or bool((ids.diff() <= 0).any()):
        problems.append("d2t does not lead to rising ids of the target's vocabulary (offsets: target = draft + d2t)")
        return {}
    t2d = torch.zeros(config.target_vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    if "t2d" in found and not torch.equal(found["t2d"].bool(), t2d):
        problems.append("d2t and t2d disagree")
    return {"d2t": d2t, "t2d": t2d}
