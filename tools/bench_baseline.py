"""The training step as the reference implementation computes it: the bar `make bench` measures against.

Operations of one step, in order. Nothing here is made slower than it has to be: one GEMM per product, the fused kernels
of PyTorch for attention, softmax and AdamW, no Python loop over anchors, slots or layers' heads.

    1. blocks      always `num_anchors` of them; where a row has fewer eligible anchors the rest is padding
    2. attention   a dense boolean mask [A*K, T + A*K], made once, and scaled_dot_product_attention over all keys
    3. logits      head(hidden) for every slot, padding and unsupervised ones included, plus the Markov bias: [A*K, V]
    4. target      the last hidden state gathered for every slot, then the head: [A*K, V]
    5. CE          cross_entropy on fp32 logits, on its own
    6. TV          softmax of both in fp32, |p_d - p_t| summed over the vocabulary
    7. acceptance  softmax of both in fp32 again, without gradient, sum of the minimum: c*
    8. confidence  BCE-with-logits against c*
    9. sums        each term weighted by mask and position weight, divided by the sum of weights
   10. backward    by autograd; clip by global norm; AdamW (fused)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.draft.attention import visible_ranges
from pipeline.draft.block import BlockDrafter
from pipeline.draft.interface import Context
from pipeline.training.objective import FrozenTensors
from pipeline.training.terms import Terms


@dataclass
class DenseBatch:
    """One micro-batch with a fixed number of anchors. `weights_AK` is 0 for padding and unsupervised slots."""

    context: Context
    index_A: Tensor
    previous_AK: Tensor
    labels_AK: Tensor
    weights_AK: Tensor
    last_hidden_TD: Tensor


class DenseAttention:
    """Every block against every key, under one dense mask, computed once per step."""

    def __init__(self, start_A: Tensor, stop_A: Tensor, context: int, block: int) -> None:
        at_T = torch.arange(context, device=start_A.device)
        seen_AT = (at_T >= start_A[:, None]) & (at_T < stop_A[:, None])
        own_AS = torch.eye(len(start_A), dtype=torch.bool, device=start_A.device).repeat_interleave(block, 1)
        self.mask = torch.cat([seen_AT, own_AS], 1).repeat_interleave(block, 0)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor) -> Tensor:
        share = q.shape[2] // k.shape[1]
        keys = torch.cat([k, own_k.flatten(0, 1)]).repeat_interleave(share, 1)
        values = torch.cat([v, own_v.flatten(0, 1)]).repeat_interleave(share, 1)
        queries = q.flatten(0, 1).transpose(0, 1)[None]
        out = F.scaled_dot_product_attention(
            queries, keys.transpose(0, 1)[None], values.transpose(0, 1)[None], attn_mask=self.mask
        )
        return out[0].transpose(0, 1).reshape(q.shape)


def backbone(drafter: BlockDrafter, batch: DenseBatch, embed_VD: Tensor) -> Tensor:
    """States [A, K, D] after the draft's final norm."""
    context = batch.context
    assert context.taps_TLD is not None
    features = drafter.features(context.taps_TLD)
    hidden = F.embedding(drafter.block_ids(batch.previous_AK[:, 0]), embed_VD)
    tables = drafter.rope.tables(context.positions_T)
    slots_K = torch.arange(drafter.config.block_inputs, device=batch.index_A.device)
    own_tables = drafter.rope.tables(context.positions_T[batch.index_A][:, None] + slots_K)
    start_A, stop_A = visible_ranges(context.document_T, batch.index_A)
    attend = DenseAttention(start_A, stop_A, len(context.positions_T), drafter.config.block_inputs)
    for layer in drafter.layers:
        hidden = layer(hidden, features, own_tables, tables, attend)
    return drafter.norm(hidden)


def loss(drafter: BlockDrafter, batch: DenseBatch, frozen: FrozenTensors, terms: Terms, hidden_AKD: Tensor) -> Tensor:
    """Steps 3 to 9 on the states of all slots."""
    assert drafter.markov_head is not None and drafter.confidence_head is not None
    markov = drafter.markov_head.embed(batch.previous_AK, hidden_AKD)
    logits = F.linear(hidden_AKD, frozen.head.weight_VD) + drafter.markov_head.markov_w2(markov)
    slots_K = torch.arange(batch.previous_AK.shape[1], device=batch.index_A.device)
    at_AK = (batch.index_A[:, None] + slots_K).clamp(max=len(batch.last_hidden_TD) - 1)
    with torch.no_grad():
        target_logits = F.linear(batch.last_hidden_TD[at_AK], frozen.head.weight_VD)
    labels = batch.labels_AK.flatten()
    ce_AK = F.cross_entropy(logits.float().flatten(0, 1), labels, reduction="none").view(batch.labels_AK.shape)
    l1_AK = (logits.float().softmax(-1) - target_logits.float().softmax(-1)).abs().sum(-1)
    with torch.no_grad():
        draft_probs, target_probs = logits.float().softmax(-1), target_logits.float().softmax(-1)
        accepted_AK = torch.minimum(draft_probs, target_probs).sum(-1)
    confidence_AK = drafter.confidence_head(hidden_AKD, markov)
    bce_AK = F.binary_cross_entropy_with_logits(confidence_AK, accepted_AK, reduction="none")
    weights = batch.weights_AK
    total = terms.ce * ce_AK + terms.divergence * l1_AK + terms.confidence * bce_AK
    return (weights * total).sum() / weights.sum()


def step_loss(
    drafter: BlockDrafter, batch: DenseBatch, frozen: FrozenTensors, terms: Terms, dtype: torch.dtype
) -> Tensor:
    """The whole forward: backbone under autocast where `dtype` is bf16, then the loss."""
    with torch.autocast(batch.index_A.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        hidden = backbone(drafter, batch, frozen.embed_VD)
        return loss(drafter, batch, frozen, terms, hidden)
