"""What the target says at a position, over the tokens a drafter may propose (S11, S30).

Three sources give the same thing, a `Law` for a run of teacher rows: cached top-n log-probabilities, cached last hidden
states that go through the frozen head, or cached full logits. A law over a draft vocabulary D keeps the target's full
mass in view: what falls outside D is `outside`, so that total variation and c* are those against the whole target.

    P teacher rows   n kept tokens   V target vocabulary   D target width   C draft vocabulary (= V without a table)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeline.kernels.argmax import argmax_rows
from pipeline.kernels.products import Workspace, wide_product

# On a CPU, work between two matrix products goes tile by tile: what was just written is still in the cache when read.
TILE_ELEMENTS = 2**21


def row_tile(values: Tensor) -> int:
    """Rows of [N, C] to work on at a time between two matrix products."""
    return max(1, len(values) if values.is_cuda else TILE_ELEMENTS // values.shape[1])


@dataclass(frozen=True)
class Head:
    """The target's frozen output head, whole or cut to the rows of a draft vocabulary."""

    weight_VD: Tensor
    scale: float = 1.0
    softcap: float | None = None

    def rows(self, words: DraftVocabulary | None) -> Head:
        """The same head for the tokens of a draft vocabulary, in draft order."""
        return self if words is None else replace(self, weight_VD=self.weight_VD.index_select(0, words.ids_C))


@dataclass(frozen=True)
class DraftVocabulary:
    """The tokens a drafter may propose (S30): the target id of each draft id, and back (-1 for tokens outside)."""

    ids_C: Tensor
    t2d_V: Tensor

    @classmethod
    def of(cls, ids_C: Tensor, vocab_size: int) -> DraftVocabulary:
        t2d_V = torch.full((vocab_size,), -1, dtype=torch.long, device=ids_C.device)
        t2d_V[ids_C] = torch.arange(ids_C.numel(), device=ids_C.device)
        return cls(ids_C.long(), t2d_V)

    @property
    def size(self) -> int:
        return int(self.ids_C.numel())

    def labels(self, tokens: Tensor) -> Tensor:
        """Draft ids of target ids, -1 outside; any shape."""
        return self.t2d_V[tokens]


@dataclass(frozen=True)
class Law:
    """p_t on P positions over the draft vocabulary: either dense, or `uniform` everywhere but at the kept tokens.

    Where a kept token has no draft id, `ids` and `probs` repeat another entry of the same row: writing it twice does no
    harm. `inside` is p_t's mass in the draft vocabulary, which has `size` tokens; `best` the draft id of its most
    likely token, or -1. Where `divisor` is set, the law is what was stored over it, and uniform where it is zero.
    """

    inside_P: Tensor
    best_P: Tensor
    size: int
    dense_PC: Tensor | None = None
    uniform_P: Tensor | None = None
    ids_Pn: Tensor | None = None
    probs_Pn: Tensor | None = None
    divisor_P: Tensor | None = None

    @property
    def outside_P(self) -> Tensor:
        """p_t's mass outside the draft vocabulary."""
        return (1 - self.inside_P).clamp(min=0)

    def within(self) -> Law:
        """The law given that the token is one of the draft vocabulary.

        Its divisor is not 1 - `outside`: a sure target leaves less mass inside than that difference can hold. Where it
        leaves none at all, the law is uniform.
        """
        return replace(self, inside_P=torch.ones_like(self.inside_P), divisor_P=self.inside_P)

    def subtract_from(self, p_cC: Tensor, row_c: Tensor, out: Tensor) -> Tensor:
        """out = p - p_t, where slot c of the chunk reads row `row_c`; in the sparse form p_t itself is never built."""
        if self.dense_PC is not None:
            law_cC = self._divided(torch.index_select(self.dense_PC, 0, row_c, out=out), row_c)
            return torch.sub(p_cC, law_cC, out=out)
        assert self.uniform_P is not None and self.ids_Pn is not None and self.probs_Pn is not None
        ids_cn = self.ids_Pn[row_c]
        kept_cn = p_cC.gather(1, ids_cn) - self._divided(self.probs_Pn[row_c], row_c)
        uniform_c1 = self._divided(self.uniform_P[row_c][:, None], row_c)
        return torch.sub(p_cC, uniform_c1, out=out).scatter_(1, ids_cn, kept_cn)

    def _divided(self, stored: Tensor, row_c: Tensor) -> Tensor:
        """Stored probabilities of some slots [c, any], divided in place."""
        if self.divisor_P is None:
            return stored
        divisor_c1 = self.divisor_P[row_c][:, None]
        empty_c1 = divisor_c1 <= 0
        return stored.div_(divisor_c1.masked_fill(empty_c1, 1.0)).masked_fill_(empty_c1, 1 / self.size)


@dataclass(frozen=True)
class TopTeacher:
    """Top-n log-probabilities with the log of the remaining mass, spread evenly over the other V - n tokens (S11)."""

    ids_Pn: Tensor
    logprobs_Pn: Tensor
    tail_P: Tensor
    vocab_size: int

    @property
    def rows(self) -> int:
        return int(self.ids_Pn.shape[0])

    def probs(self, rows_P: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(kept probabilities [P, n], probability of each other token [P]), summing to one whatever was rounded."""
        probs_Pn = self.logprobs_Pn[rows_P].to(dtype).exp()
        others = self.vocab_size - probs_Pn.shape[1]
        tail_P = self.tail_P[rows_P].to(dtype).exp() if others else torch.zeros_like(probs_Pn[:, 0])
        total_P = probs_Pn.sum(1) + tail_P
        return probs_Pn / total_P[:, None], tail_P / total_P / max(others, 1)

    def law(
        self, rows_P: Tensor, words: DraftVocabulary | None, dtype: torch.dtype, head: Head, work: Workspace
    ) -> Law:
        probs_Pn, uniform_P = self.probs(rows_P, dtype)
        ids_Pn = self.ids_Pn[rows_P].long()
        best_P = ids_Pn.gather(1, probs_Pn.argmax(1, keepdim=True)).squeeze(1)
        if words is None:
            return Law(torch.ones_like(uniform_P), best_P, self.vocab_size, None, uniform_P, ids_Pn, probs_Pn)
        ids_Pn = words.labels(ids_Pn)
        known_Pn = ids_Pn >= 0
        inside_P = (probs_Pn * known_Pn).sum(1) + uniform_P * (words.size - known_Pn.sum(1))
        first_P1 = known_Pn.to(torch.uint8).argmax(1, keepdim=True)
        some_P1 = known_Pn.any(1, keepdim=True)
        spare_P1 = torch.where(some_P1, probs_Pn.gather(1, first_P1), uniform_P[:, None])
        probs_Pn = torch.where(known_Pn, probs_Pn, spare_P1)
        ids_Pn = torch.where(known_Pn, ids_Pn, ids_Pn.gather(1, first_P1).clamp(min=0))
        return Law(inside_P, words.labels(best_P), words.size, None, uniform_P, ids_Pn, probs_Pn)

    def tail_mass(self) -> Tensor:
        """Mass of the tokens that were not kept, [P]: it bounds the error of 1/2 TV."""
        return self.tail_P.exp()

    def argmax(self, head: Head) -> Tensor:
        """The target's most likely token at every row, target ids [P]."""
        return self.ids_Pn.long().gather(1, self.logprobs_Pn.argmax(1, keepdim=True)).squeeze(1)


@dataclass(frozen=True)
class HiddenTeacher:
    """Last hidden states after the target's final norm; each row goes through the frozen head once (S11)."""

    hidden_PD: Tensor

    @property
    def rows(self) -> int:
        return int(self.hidden_PD.shape[0])

    def law(
        self, rows_P: Tensor, words: DraftVocabulary | None, dtype: torch.dtype, head: Head, work: Workspace
    ) -> Law:
        hidden_PD = self.hidden_PD[rows_P].to(head.weight_VD.dtype)
        out = work.get("target", rows_P.numel(), head.weight_VD.shape[0], dtype)
        return _dense(head_logits(hidden_PD, head, out, work), words, work)

    def argmax(self, head: Head) -> Tensor:
        parts = self.hidden_PD.split(max(1, 2**24 // head.weight_VD.shape[0]))
        work, best = Workspace(self.hidden_PD.device), [torch.zeros(0, dtype=torch.long, device=self.hidden_PD.device)]
        for part in parts:
            out = work.get("target", part.shape[0], head.weight_VD.shape[0], torch.float32)
            best.append(argmax_rows(head_logits(part.to(head.weight_VD.dtype), head, out, work)))
        return torch.cat(best)


@dataclass(frozen=True)
class FullTeacher:
    """The target's logits themselves: for small studies only."""

    logits_PV: Tensor

    @property
    def rows(self) -> int:
        return int(self.logits_PV.shape[0])

    def law(
        self, rows_P: Tensor, words: DraftVocabulary | None, dtype: torch.dtype, head: Head, work: Workspace
    ) -> Law:
        out = work.get("target", rows_P.numel(), self.logits_PV.shape[1], dtype)
        return _dense(out.copy_(self.logits_PV[rows_P]), words, work)

    def argmax(self, head: Head) -> Tensor:
        return self.logits_PV.argmax(1)


Teacher = TopTeacher | HiddenTeacher | FullTeacher


def _dense(logits_PV: Tensor, words: DraftVocabulary | None, work: Workspace) -> Law:
    """The law of logits, which are overwritten."""
    probs_PV, best_P = logits_PV, torch.empty(len(logits_PV), dtype=torch.long, device=logits_PV.device)
    rows = row_tile(logits_PV)
    for part_tV, best_t in zip(logits_PV.split(rows), best_P.split(rows), strict=True):
        best_t.copy_(argmax_rows(part_tV))
        law_tV = work.get("law tile", len(part_tV), part_tV.shape[1], part_tV.dtype)
        part_tV.copy_(torch.softmax(part_tV, 1, out=law_tV))
    if words is None:
        return Law(torch.ones_like(probs_PV[:, 0]), best_P, probs_PV.shape[1], probs_PV)
    inside_PC = probs_PV.index_select(1, words.ids_C)
    return Law(inside_PC.sum(1), words.labels(best_P), words.size, inside_PC)


def head_logits(
    hidden_ND: Tensor,
    head: Head,
    out: Tensor,
    work: Workspace,
    *,
    bias: tuple[Tensor, Tensor] | None = None,
    slope: Tensor | None = None,
) -> Tensor:
    """Logits [N, V] into `out` (fp32 or fp64), with the head's scale and soft-cap; hidden and head share a dtype.

    bias: a pair ([N, r], [V, r]) whose product is added last. slope: gets the soft-cap's derivative at every logit.
    """
    factors, last = [(hidden_ND, head.weight_VD)], [] if bias is None else [bias]
    if head.scale == 1.0 and head.softcap is None:
        return wide_product([*factors, *last], out, work)
    wide_product(factors, out, work)
    if head.scale != 1.0:
        out.mul_(head.scale)
    if head.softcap is not None:
        out.div_(head.softcap).tanh_()
        if slope is not None:
            torch.square(out, out=slope).neg_().add_(1)
        out.mul_(head.softcap)
    return wide_product(last, out, work, add=True)
