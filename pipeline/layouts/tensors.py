"""The drafter's tensors under each layout's names, and back. What a folder must hold in all stands in table.py.

Names are the drafter's own (DeepSpec's) but for Eagle3, whose layer is `midlayer` where SGLang and vLLM read it and
`layers.0` for speculators, and MTP (mtp.py). A target with scaled embeddings or logits gets its embedding and head
written with the factors multiplied in, because an engine that runs a foreign drafter applies none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from pipeline.draft.config import DraftConfig
from pipeline.errors import ArtifactError
from pipeline.layouts import mtp
from pipeline.layouts.table import Entry, own_head, table


class Frozen(Protocol):
    """The target's frozen parts, as `pipeline.frozen.Frozen` holds them."""

    embed_VD: Tensor
    head_VD: Tensor
    embed_scale: float
    logit_scale: float
    logit_softcap: float | None


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
    if _CONFIDENCE in out:
        out[_CONFIDENCE] = _fitted(out[_CONFIDENCE], entries[_CONFIDENCE].shape[1])
    out |= {name: torch.zeros(entry.shape) for name, entry in entries.items() if _zero(name, config)}
    if target_tensors or own_head(config):
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
    if _CONFIDENCE in state:
        state[_CONFIDENCE] = _fitted(state[_CONFIDENCE], config.hidden_size + config.markov_rank)
    return config, state


_MARKOV = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
_CONFIDENCE = "confidence_head.proj.weight"


def _fitted(row: Tensor, width: int) -> Tensor:
    """Pad (or cut) a confidence row to [h; W1[x]]: the columns added multiply nothing, those cut multiplied zeros."""
    row = row[:, :width]
    return torch.cat([row, row.new_zeros(1, width - row.shape[1])], dim=1)


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
