"""Accept a prefix of each drafted block and correct the first wrong token, so that the output law is the target's.

S20: slot k is accepted iff u_k < p_t(x_k) / p_d(x_k); the first rejection ends the block.
S21: the token after the accepted prefix is drawn from max(p_t - p_d, 0) after a rejection, else from p_t.
Everything here works on the same fp32 probabilities the draft was drawn from, and takes its random numbers as
arguments: the functions are pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Law:
    """How logits become a distribution: temperature (0 is greedy), then the top_k most likely, then a top_p nucleus."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @property
    def greedy(self) -> bool:
        """Whether both laws are one-hot."""
        return self.temperature == 0.0

    def probs(self, logits_NV: Tensor) -> Tensor:
        """fp32 probabilities [N, V] that sum to one; one-hot argmax when greedy (first of equal maxima)."""
        if self.greedy:
            return torch.zeros_like(logits_NV, dtype=torch.float32).scatter_(
                -1, logits_NV.argmax(-1, keepdim=True), 1.0
            )
        scaled = logits_NV.float() / self.temperature if self.temperature != 1.0 else logits_NV.float()
        if 0 < self.top_k < logits_NV.shape[-1]:
            least = scaled.topk(self.top_k, dim=-1).values[..., -1:]
            scaled = scaled.masked_fill(scaled < least, float("-inf"))
        probs = torch.softmax(scaled, dim=-1)
        return nucleus(probs, self.top_p) if self.top_p < 1.0 else probs


def nucleus(probs_NV: Tensor, top_p: float) -> Tensor:
    """The fewest most likely tokens whose mass reaches top_p, renormalised. The most likely token always stays."""
    ordered, order = probs_NV.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    ordered = ordered.masked_fill((before >= top_p) & (before > 0), 0.0)
    kept = torch.zeros_like(probs_NV).scatter_(-1, order, ordered)
    return kept / kept.sum(-1, keepdim=True)


def draw(weights_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """One token per row with chance weights/sum, by inverting the cumulative sum. A weight of zero is never drawn.

    `torch.multinomial` would cost 30 times as much on a real vocabulary. Rows need a positive sum.
    """
    cumulative = weights_NV.cumsum(-1)
    total = cumulative[:, -1]
    below = torch.nextafter(total, torch.zeros_like(total))
    threshold = torch.minimum(uniform_N.to(total.dtype) * total, below)
    return torch.searchsorted(cumulative, threshold[:, None], right=True)[:, 0]


@dataclass(frozen=True)
class Drafted:
    """A block of proposals per row.

    tokens_BK: target ids. probs_BKD: fp32 draft law of each slot over the draft vocabulary, None for a proposal that
    was certain (greedy drafts, prompt lookup). vocabulary_D: the target id of each draft row, rising (S30); None when
    both vocabularies are one.
    """

    tokens_BK: Tensor
    probs_BKD: Tensor | None = None
    vocabulary_D: Tensor | None = None

    def chance_BK(self) -> Tensor:
        """p_d of the proposed tokens."""
        if self.probs_BKD is None:
            return torch.ones_like(self.tokens_BK, dtype=torch.float32)
        ids = self.tokens_BK
        if self.vocabulary_D is not None:
            ids = torch.searchsorted(self.vocabulary_D, ids)
        return self.probs_BKD.gather(-1, ids[..., None])[..., 0]

    def subtract_from(self, probs_BV: Tensor, slots_B: Tensor) -> Tensor:
        """max(p_t - p_d, 0), where p_d is each row's law at its slot; p_d is zero outside the draft vocabulary."""
        rows = torch.arange(len(slots_B), device=slots_B.device)
        if self.probs_BKD is None:
            residual = probs_BV.clone()
            residual[rows, self.tokens_BK[rows, slots_B]] -= 1.0
        elif self.vocabulary_D is None:
            residual = probs_BV - self.probs_BKD[rows, slots_B]
        else:
            residual = probs_BV.index_add(1, self.vocabulary_D, self.probs_BKD[rows, slots_B], alpha=-1.0)
        return residual.clamp_(min=0.0)


@dataclass(frozen=True)
class Verdict:
    """accepted_B: drafted tokens kept (before any stop cut); token_B: the target's own token after them."""

    accepted_B: Tensor
    token_B: Tensor


def verify(
    drafted: Drafted,
    logits_NV: Tensor,
    *,
    lengths_B: Tensor,
    law: Law,
    accept_BK: Tensor,
    final_B: Tensor,
) -> Verdict:
    """Judge each row's first `lengths_B` proposals (S20, S21).

    logits_NV holds the target's logits of every scheduled position, rows one after the other: 1 + lengths_B[b] each,
    the first of them at the anchor. accept_BK and final_B are uniform numbers in [0, 1).
    """
    slots_K = torch.arange(drafted.tokens_BK.shape[1], device=lengths_B.device)
    scheduled_BK = slots_K < lengths_B[:, None]
    start_B = (1 + lengths_B).cumsum(0) - (1 + lengths_B)
    row_BK = start_B[:, None] + torch.minimum(slots_K, lengths_B[:, None])
    if law.greedy:
        best_N = logits_NV.argmax(-1)
        accepted_B = prefix_length((best_N[row_BK] == drafted.tokens_BK) & scheduled_BK)
        return Verdict(accepted_B, best_N[start_B + accepted_B])
    probs_NV = law.probs(logits_NV)
    target_BK = probs_NV[row_BK, drafted.tokens_BK]
    accepted_B = prefix_length((accept_BK * drafted.chance_BK() < target_BK) & scheduled_BK)
    final_BV = probs_NV[start_B + accepted_B]
    weights_BV = correction(drafted, final_BV, accepted_B, rejected_B=accepted_B < lengths_B)
    return Verdict(accepted_B, draw(weights_BV, final_B))


def prefix_length(passed_BK: Tensor) -> Tensor:
    """Number of slots passed before the first failure, per row."""
    return passed_BK.long().cumprod(-1).sum(-1)


def correction(drafted: Drafted, probs_BV: Tensor, accepted_B: Tensor, *, rejected_B: Tensor) -> Tensor:
    """Weights [B, V] of the token after the accepted prefix (S21): the residual after a rejection, else p_t itself.

    A residual without mass (p_t = p_d up to rounding) falls back to p_t.
    """
    if drafted.tokens_BK.shape[1] == 0:
        return probs_BV
    slots_B = accepted_B.clamp(max=drafted.tokens_BK.shape[1] - 1)
    residual = drafted.subtract_from(probs_BV, slots_B)
    use_B = rejected_B & (residual.sum(-1) > 0)
    return torch.where(use_B[:, None], residual, probs_BV)
