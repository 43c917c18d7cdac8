"""The target's distributions of a micro-batch, laid end to end (S11)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from pipeline.speculative.teacher import FullTeacher, HiddenTeacher, Teacher, TopTeacher


class Kept(Protocol):
    """What a sample keeps: `kind` and the tensors of that kind, one row per position in `positions_P`."""

    @property
    def kind(self) -> str: ...

    @property
    def positions_P(self) -> Tensor: ...


def join(kept: Sequence[Kept], vocab_size: int) -> Teacher:
    """One teacher whose rows are those of `kept`, in order. All samples come from one artifact, so of one kind."""
    kinds = {one.kind for one in kept}
    assert len(kinds) == 1, kinds
    kind = kinds.pop()
    if kind == "topk":
        ids, logprobs, tail = (_cat(kept, name) for name in ("ids_Pn", "logprobs_Pn", "tail_P"))
        return TopTeacher(ids, logprobs, tail, vocab_size)
    if kind == "last_hidden":
        return HiddenTeacher(_cat(kept, "hidden_PD"))
    if kind == "full":
        return FullTeacher(_cat(kept, "logits_PV"))
    raise ValueError(f"unknown kind of teacher {kind!r}")


def _cat(kept: Sequence[Kept], name: str) -> Tensor:
    return torch.cat([getattr(one, name) for one in kept])


def rows_of(positions_P: Tensor, length: int) -> Tensor:
    """Teacher row of every position of a sample, -1 where its distribution was not kept; int64 [T]."""
    table_T = torch.full((length,), -1, dtype=torch.long)
    table_T[positions_P.cpu().long()] = torch.arange(positions_P.numel())
    return table_T
