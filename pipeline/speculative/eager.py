"""The slot loss written as the formulas read, for tests and the benchmark: everything at once, gradients by autograd.

It shares nothing with `losses.py` but the argument types: p_t is built in full over the whole vocabulary, p_d is put
back into it, and every slot repeats its target's softmax.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.speculative.losses import Divergence, SlotStatistics, SlotWeights
from pipeline.speculative.teacher import DraftVocabulary, FullTeacher, Head, HiddenTeacher, Teacher, TopTeacher


def target_probs(teacher: Teacher, rows_S: Tensor, head: Head, dtype: torch.dtype) -> Tensor:
    """p_t of every slot over the whole target vocabulary, [S, V] (S11)."""
    if isinstance(teacher, HiddenTeacher):
        return torch.softmax(_logits(teacher.hidden_PD[rows_S].to(dtype), head), dim=-1)
    if isinstance(teacher, FullTeacher):
        return torch.softmax(teacher.logits_PV[rows_S].to(dtype), dim=-1)
    assert isinstance(teacher, TopTeacher)
    kept_Sn = teacher.logprobs_Pn[rows_S].to(dtype).exp()
    tail_S = teacher.tail_P[rows_S].to(dtype).exp()
    others = teacher.vocab_size - kept_Sn.shape[1]
    probs_SV = (tail_S / max(others, 1))[:, None].repeat(1, teacher.vocab_size)
    probs_SV.scatter_(1, teacher.ids_Pn[rows_S].long(), kept_Sn)
    return probs_SV / probs_SV.sum(-1, keepdim=True)


def slot_loss_eager(
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
    chunk: int = 0,
) -> tuple[Tensor, SlotStatistics]:
    """Same arguments and results as `slot_loss`; `chunk` is ignored. Memory grows with slots x vocabulary."""
    dtype = torch.float64 if hidden_SD.dtype == torch.float64 else torch.float32
    logits_SC = _logits(hidden_SD.to(dtype), draft_head)
    if markov_Sr is not None and w2_Cr is not None:
        logits_SC = logits_SC + markov_Sr.to(dtype) @ w2_Cr.to(dtype).t()
    with torch.no_grad():
        p_t_SV = target_probs(teacher, rows_S, target_head, dtype)
    p_d_SV = torch.softmax(logits_SC, dim=-1)
    best_S = logits_SC.argmax(-1)
    inside_SC = p_t_SV
    if words is not None:
        p_d_SV = torch.zeros_like(p_t_SV).index_copy(1, words.ids_C, p_d_SV)
        inside_SC, best_S = p_t_SV[:, words.ids_C], words.ids_C[best_S]

    ce_S = F.cross_entropy(logits_SC, labels_S.clamp(min=0), reduction="none")
    l1_S = (p_d_SV - p_t_SV).abs().sum(-1)
    divergence_S = l1_S
    if divergence == "kl":
        mass_S1 = inside_SC.sum(-1, keepdim=True)
        inside_SC = torch.where(mass_S1 > 0, inside_SC / mass_S1, 1 / inside_SC.shape[1])
        divergence_S = F.kl_div(torch.log_softmax(logits_SC, -1), inside_SC, reduction="none").sum(-1)
    loss = (weights.ce_S * ce_S + weights.divergence_S * divergence_S).sum()
    greedy_S = (best_S == p_t_SV.argmax(-1)).to(dtype)
    outside_S = torch.zeros_like(l1_S) if words is None else p_t_SV[:, words.t2d_V < 0].sum(-1)
    return loss, SlotStatistics(ce_S.detach(), l1_S.detach(), divergence_S.detach(), greedy_S, outside_S)


def _logits(hidden_SD: Tensor, head: Head) -> Tensor:
    logits_SV = hidden_SD @ head.weight_VD.to(hidden_SD.dtype).t() * head.scale
    return logits_SV if head.softcap is None else head.softcap * torch.tanh(logits_SV / head.softcap)
