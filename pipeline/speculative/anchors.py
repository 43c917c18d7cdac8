"""Which tokens start a draft block in training, and which of its slots are taught (S7, S8, S9).

Slot k of a block anchored at position a predicts token a + k, with k = 1 ... K in the text and column k - 1 in tensors.
Everything here looks at one document at a time, so no block can reach into a neighbour of a packed batch.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import torch
from torch import Tensor

Rule = Literal["generated", "label"]


def eligible(mask_T: Tensor, rule: Rule = "generated") -> Tensor:
    """Positions that may be anchors (S7), as bool [T].

    `generated` asks mask[a] = mask[a+1] = 1: when decoding, the anchor is always a token the target wrote. `label` asks
    only that the first predicted token is supervised, so the last prompt token may be an anchor too.
    """
    mask = mask_T.bool()
    out = torch.zeros_like(mask)
    if mask.numel() > 1:
        out[:-1] = mask[1:] if rule == "label" else mask[:-1] & mask[1:]
    return out


def sample_anchors(
    mask_T: Tensor, *, num_anchors: int, seed: int, epoch: int, sample_id: str, rule: Rule = "generated"
) -> Tensor:
    """Up to `num_anchors` eligible positions, uniform without replacement, sorted; int64 [A] on the CPU (S8).

    A pure function of its arguments: ranks, batch shapes, workers and restarts cannot change it.
    """
    candidates = eligible(mask_T.cpu(), rule).nonzero().flatten()
    if candidates.numel() <= num_anchors:
        return candidates
    generator = torch.Generator().manual_seed(_seed(seed, epoch, sample_id))
    chosen = torch.randperm(candidates.numel(), generator=generator)[:num_anchors]
    return candidates[chosen].sort().values


def supervised_slots(mask_T: Tensor, anchors_A: Tensor, block_size: int) -> Tensor:
    """Slots that count, bool [A, K]: slot k does iff mask[a+1 ... a+k] are all 1, inside the document (S9)."""
    length = mask_T.numel()
    labels_AK = anchors_A[:, None] + torch.arange(1, block_size + 1, device=anchors_A.device)
    inside_AK = labels_AK < length
    taught_AK = inside_AK & mask_T.bool()[labels_AK.clamp(max=max(length - 1, 0))]
    return taught_AK.long().cumprod(dim=1).bool()


def _seed(seed: int, epoch: int, sample_id: str) -> int:
    key = f"{seed}/{epoch}/{sample_id}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "little") >> 1
