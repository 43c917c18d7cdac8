"""The slot loss with gradients formed chunk by chunk in the forward pass (S11, S12, S15, S30).

The head is frozen and the loss is a known weighted sum over slots, so its gradient with respect to the draft logits
is known as soon as a chunk of logits is: it is turned into gradients of the hidden states, the Markov vectors and W2
on the spot, and the next chunk overwrites the logits. Work buffers hold `chunk` x C numbers, whatever the number of
anchors. Slots come sorted by teacher row, so every target distribution is computed once.

    z = head(h) + e W2^T,   p = softmax(z)
    d CE / dz = p - onehot(label)                  CE = logsumexp(z) - z[label]
    d L1 / dz = p * (s - sum p s),  s = sign(p - p_t)      L1 = sum |p - p_t| + p_t(outside D)
    c* = 1 - L1 / 2

The plain formulas are in `eager.py`; the tests hold the two together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from pipeline.kernels.products import Workspace
from pipeline.speculative.teacher import (
    DraftVocabulary,
    Head,
    Law,
    Teacher,
    head_logits,
    row_tile,
)

Divergence = Literal["tv", "kl"]

# Work buffers are kept near the caches (2**23 numbers, 32 MB in fp32), but never so short that products become slow.
_BUFFER_ELEMENTS, _FEWEST_SLOTS = 2**23, 128


@dataclass(frozen=True)
class SlotWeights:
    """Weight of every slot in the two terms, normalisation included: the loss is their weighted sum (S13, S14).

    `ce_S` is 0 where the label is outside the draft vocabulary.
    """

    ce_S: Tensor
    divergence_S: Tensor


@dataclass(frozen=True)
class SlotStatistics:
    """Detached facts per slot, fp32 (fp64 for fp64 inputs). `outside_S` is p_t's mass outside the draft vocabulary."""

    ce_S: Tensor
    l1_S: Tensor
    divergence_S: Tensor
    greedy_S: Tensor
    outside_S: Tensor

    @property
    def acceptance_S(self) -> Tensor:
        """c* = 1 - L1 / 2: the chance that the slot's own draw is accepted (S12)."""
        return 1 - 0.5 * self.l1_S


def slot_loss(
    hidden_SD: Tensor,
    *,
    markov_Sr: Tensor | None,
    w2_Cr: Tensor | None,
    draft_head: Head,
    target_head: Head,
    teacher: Teacher,
    words: DraftVocabulary | None,
    rows_S: Tensor,
    labels_S: Tensor,
    weights: SlotWeights,
    divergence: Divergence = "tv",
    chunk: int = 512,
) -> tuple[Tensor, SlotStatistics]:
    """Weighted cross-entropy plus divergence of the supervised slots, and their statistics.

    Args:
        hidden_SD: outputs of the draft's final norm, supervised slots only.
        markov_Sr, w2_Cr: the logits get the bias markov @ w2.T; None where the drafter has no Markov head.
        draft_head: frozen, cut to the draft vocabulary, in the dtype of `hidden_SD`; target_head: frozen, whole.
        rows_S: teacher row of each slot, ascending.
        labels_S: draft id of the label, -1 outside the draft vocabulary (its `ce_S` weight must be 0).
        divergence: what the second weight multiplies: full L1 in [0, 2], or KL(p_t || p_d) in D, p_t renormalised.
        chunk: slots whose logits exist at a time; lowered where the vocabulary is large. Results do not depend on it.

    Returns:
        (scalar fp32 loss, statistics). Zero slots give an exact zero that still carries a graph.
    """
    wanted = torch.is_grad_enabled()
    problem = _Problem(draft_head, target_head, teacher, words, rows_S, labels_S, weights, divergence, chunk, wanted)
    loss, *facts = _SlotLoss.apply(hidden_SD, markov_Sr, w2_Cr, problem)
    return loss, SlotStatistics(*facts)


def chunk_slots(chunk: int, vocabulary: int) -> int:
    """Slots whose logits exist at a time: `chunk`, or fewer where the vocabulary is large."""
    return max(1, min(chunk, max(_FEWEST_SLOTS, _BUFFER_ELEMENTS // vocabulary)))


def chunk_bounds(rows_S: Tensor, chunk: int, vocabulary: int) -> list[tuple[int, int]]:
    """Cut S sorted slots into runs of at most `chunk`, never between two slots of one teacher row (unless one row's
    slots alone are more), so that no target distribution is needed twice."""
    limit = chunk_slots(chunk, vocabulary)
    counts = torch.unique_consecutive(rows_S.cpu(), return_counts=True)[1].tolist()
    bounds, start, end = [], 0, 0
    for count in counts:
        if end > start and end + count - start > limit:
            bounds.append((start, end))
            start = end
        end += count
    return [*bounds, (start, end)] if end > start else bounds


@dataclass(frozen=True)
class _Problem:
    draft_head: Head
    target_head: Head
    teacher: Teacher
    words: DraftVocabulary | None
    rows_S: Tensor
    labels_S: Tensor
    weights: SlotWeights
    divergence: Divergence
    chunk: int
    gradients: bool  # autograd turns its mode off before a function's forward, so the forward cannot ask


class _SlotLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_SD: Tensor, markov_Sr: Tensor | None, w2_Cr: Tensor | None, problem: _Problem) -> Any:
        wanted = problem.gradients and any(ctx.needs_input_grad)
        sums = _Accumulator(hidden_SD, markov_Sr, w2_Cr, problem, gradients=wanted)
        vocabulary = problem.draft_head.weight_VD.shape[0]
        for start, end in chunk_bounds(problem.rows_S, problem.chunk, vocabulary):
            sums.add(start, end)
        # Kept on the context rather than saved: they are results of this node, and backward scales them in place.
        ctx.gradients = (sums.d_hidden_SD, sums.d_markov_Sr, sums.d_w2_Cr)
        weights = problem.weights
        terms = sums.ce_S * weights.ce_S + sums.divergence_S * weights.divergence_S
        outputs = (terms.sum(), sums.ce_S, sums.l1_S, sums.divergence_S, sums.greedy_S, sums.outside_S)
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        found, ctx.gradients = ctx.gradients, ()
        if not found:
            raise RuntimeError("the slot loss forms its gradients once: backward cannot run a second time")
        return *(None if d is None else d.mul_(grads[0].to(d.dtype)) for d in found), None


class _Accumulator:
    """Work buffers and running results of one call."""

    def __init__(
        self, hidden_SD: Tensor, markov_Sr: Tensor | None, w2_Cr: Tensor | None, problem: _Problem, gradients: bool
    ) -> None:
        self.hidden_SD, self.markov_Sr, self.w2_Cr, self.problem = hidden_SD, markov_Sr, w2_Cr, problem
        self.dtype = torch.float64 if hidden_SD.dtype == torch.float64 else torch.float32
        zeros_5S = hidden_SD.new_zeros((5, hidden_SD.shape[0]), dtype=self.dtype)
        self.ce_S, self.l1_S, self.divergence_S, self.greedy_S, self.outside_S = zeros_5S
        self.gradients = gradients
        self.d_hidden_SD = torch.zeros_like(hidden_SD) if gradients else None
        self.d_markov_Sr = torch.zeros_like(markov_Sr) if gradients and markov_Sr is not None else None
        self.d_w2_Cr = torch.zeros_like(w2_Cr, dtype=self.dtype) if gradients and w2_Cr is not None else None
        self.work = Workspace(hidden_SD.device)

    def buffer(self, name: str, rows: int, dtype: torch.dtype | None = None) -> Tensor:
        """A work buffer [rows, C]."""
        return self.work.get(name, rows, self.problem.draft_head.weight_VD.shape[0], dtype or self.dtype)

    def add(self, start: int, end: int) -> None:
        """Statistics and gradients of the slots start ... end - 1."""
        problem, here = self.problem, slice(start, end)
        z_cC, slope_cC = self.logits(here)
        used_P, law_row_c = torch.unique_consecutive(problem.rows_S[here], return_inverse=True)
        law = problem.teacher.law(used_P, problem.words, self.dtype, problem.target_head, self.work)
        rows = row_tile(z_cC)
        for first, (z_tC, law_row_t) in enumerate(zip(z_cC.split(rows), law_row_c.split(rows), strict=True)):
            at = start + first * rows
            self.judge(z_tC, law, law_row_t, slice(at, at + len(z_tC)))
        if self.gradients:
            self.spread(z_cC, slope_cC, here)

    def judge(self, z_tC: Tensor, law: Law, law_row_t: Tensor, here: slice) -> None:
        """Statistics of some slots of a chunk; where gradients are wanted, theirs take the place of the logits."""
        problem, kl = self.problem, self.problem.divergence == "kl"
        labels_t1 = problem.labels_S[here].clamp(min=0)[:, None]
        best_t1 = law.best_P[law_row_t][:, None]

        top_t1 = z_tC.amax(1, keepdim=True)
        hit_t1 = (z_tC.gather(1, best_t1.clamp(min=0)) >= top_t1) & (best_t1 >= 0)
        self.greedy_S[here] = hit_t1.squeeze(1).to(self.dtype)
        label_z_t1 = z_tC.gather(1, labels_t1)
        p_tC = torch.softmax(z_tC, dim=1, out=self.buffer("p", len(z_tC)))
        lse_t1 = top_t1 - p_tC.amax(1, keepdim=True).log()
        self.ce_S[here] = (lse_t1 - label_z_t1).squeeze(1)

        difference_tC = law.subtract_from(p_tC, law_row_t, out=self.buffer("difference", len(z_tC)) if kl else z_tC)
        outside_t = self.outside_S[here] = law.outside_P[law_row_t]
        self.l1_S[here] = torch.abs(difference_tC, out=self.buffer("absolute", len(z_tC))).sum(1) + outside_t
        if kl:
            difference_tC = law.within().subtract_from(p_tC, law_row_t, out=difference_tC)
            self.divergence_S[here] = _kl(p_tC, difference_tC, z_tC, lse_t1)
        else:
            self.divergence_S[here] = self.l1_S[here]
        if not self.gradients:
            return
        ce_t, weight_t = problem.weights.ce_S[here], problem.weights.divergence_S[here]
        if kl:
            g_tC = torch.mul(difference_tC, weight_t[:, None], out=z_tC).addcmul_(p_tC, ce_t[:, None])
        else:
            signed_tC = difference_tC.sign_().mul_(p_tC)
            mean_t = signed_tC.sum(1)
            g_tC = signed_tC.mul_(weight_t[:, None]).addcmul_(p_tC, (ce_t - weight_t * mean_t)[:, None])
        g_tC.scatter_add_(1, labels_t1, -ce_t[:, None])

    def logits(self, here: slice) -> tuple[Tensor, Tensor | None]:
        """Draft logits of a chunk, and where a soft-cap bends the head its slope at every logit."""
        head, slots = self.problem.draft_head, here.stop - here.start
        slope_cC = self.buffer("slope", slots) if head.softcap is not None and self.gradients else None
        bias = None if self.markov_Sr is None or self.w2_Cr is None else (self.markov_Sr[here], self.w2_Cr)
        z_cC = head_logits(self.hidden_SD[here], head, self.buffer("z", slots), self.work, bias=bias, slope=slope_cC)
        return z_cC, slope_cC

    def spread(self, g_cC: Tensor, slope_cC: Tensor | None, here: slice) -> None:
        """Send the gradient of the logits on to the hidden states, the Markov vectors and W2."""
        narrow = self.hidden_SD.dtype != self.dtype
        factor_cC = self.buffer("narrow", len(g_cC), self.hidden_SD.dtype).copy_(g_cC) if narrow else g_cC
        if self.markov_Sr is not None and self.w2_Cr is not None:
            torch.mm(factor_cC, self.w2_Cr, out=self.d_markov_Sr[here])  # type: ignore[index]
            if narrow:
                self.d_w2_Cr.add_((factor_cC.t() @ self.markov_Sr[here]).to(self.dtype))  # type: ignore[union-attr]
            else:
                self.d_w2_Cr.addmm_(factor_cC.t(), self.markov_Sr[here])  # type: ignore[union-attr]
        if slope_cC is not None:
            factor_cC.mul_(slope_cC)
        head = self.problem.draft_head
        torch.mm(factor_cC, head.weight_VD, out=self.d_hidden_SD[here])  # type: ignore[index]
        if head.scale != 1.0:
            self.d_hidden_SD[here].mul_(head.scale)  # type: ignore[index]


def _kl(p_cC: Tensor, difference_cC: Tensor, z_cC: Tensor, lse_c1: Tensor) -> Tensor:
    """KL(p_t || p_d) of a chunk from p_d - p_t, p_t renormalised over the draft vocabulary (p_d is zero outside it)."""
    target_cC = (p_cC - difference_cC).clamp_(min=0)
    cross_c = lse_c1.squeeze(1) - torch.linalg.vecdot(target_cC, z_cC)
    own_c: Tensor = torch.xlogy(target_cC, target_cC).sum(1)
    return own_c.add_(cross_c)
