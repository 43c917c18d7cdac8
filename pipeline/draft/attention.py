"""Attention of many blocks over one packed context, without the [A·S, T + A·S] mask (S2).

    plan = AnchorPlan.build(start_A, stop_A, backend="sdpa")
    out_AQHd = plan.attend(q_AQHd, k_THd, v_THd, own_k_ASHd, own_v_ASHd)

Block a sees the context positions start_A[a] … stop_A[a] − 1 and its own S keys, in one softmax. Three ways compute it:

    sdpa    blocks that end near each other share one scaled_dot_product_attention over their common prefix;
            the masks built are [group · Q, prefix + group · S]
    flex    flex_attention with a block mask (CUDA)
    eager   the plain formula with the whole mask: the twin the other two are tested against
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

GROUP = 16  # blocks per shared prefix: larger groups waste scores beyond a block's own prefix, smaller ones the GEMM


@dataclass(frozen=True)
class Group:
    """Blocks first … last − 1 (in sorted order), whose prefixes all lie in context positions start … stop − 1."""

    first: int
    last: int
    start: int
    stop: int


@dataclass(frozen=True)
class AnchorPlan:
    """What each block may see, worked out once per forward and shared by all layers.

    Attributes:
        order_A: the permutation that sorts blocks by prefix; None where they came sorted.
        start_A, stop_A: visible context range per block, in the order given to `build`.
    """

    backend: str
    start_A: Tensor
    stop_A: Tensor
    order_A: Tensor | None
    groups: tuple[Group, ...]
    masks: dict[tuple[int, int, int], Any] = field(default_factory=dict)

    @classmethod
    def build(cls, start_A: Tensor, stop_A: Tensor, *, backend: str) -> AnchorPlan:
        """`backend` is `sdpa`, `flex` or `eager` (see `choose_backend`)."""
        if backend == "eager":
            return cls(backend, start_A, stop_A, None, ())
        order_A = torch.argsort(stop_A + start_A, stable=True)  # documents follow each other
        if backend == "flex":
            return cls(backend, start_A, stop_A, order_A, ())
        starts, stops = start_A[order_A].tolist(), stop_A[order_A].tolist()
        if torch.equal(order_A, torch.arange(len(stop_A), device=stop_A.device)):
            return cls(backend, start_A, stop_A, None, tuple(_groups(starts, stops)))
        return cls(backend, start_A, stop_A, order_A, tuple(_groups(starts, stops)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor) -> Tensor:
        """Queries [A, Q, H, d] over context [T, Hkv, d] and own keys [A, S, Hkv, d] → [A, Q, H, d]."""
        if self.backend == "eager":
            return attend_eager(q, k, v, own_k, own_v, self.dense_mask(q.shape[1], k.shape[0], own_k.shape[1]))
        if len(self.stop_A) == 0:
            # Nothing to attend for, yet every weight stays in the graph: ranks must reduce the same gradients.
            return q + 0.0 * (k.sum() + v.sum() + own_k.sum() + own_v.sum())
        if self.order_A is None:
            return self._grouped(q, k, v, own_k, own_v)
        compute = self._flex if self.backend == "flex" else self._grouped
        out = compute(q[self.order_A], k, v, own_k[self.order_A], own_v[self.order_A])
        return out[torch.argsort(self.order_A)]

    def dense_mask(self, queries: int, context: int, own: int) -> Tensor:
        """The whole boolean mask [A·Q, T + A·S]: for the eager twin only."""
        blocks = len(self.stop_A)
        at = torch.arange(context, device=self.stop_A.device)
        seen = (at >= self.start_A[:, None]) & (at < self.stop_A[:, None])
        same = torch.eye(blocks, dtype=torch.bool, device=self.stop_A.device).repeat_interleave(own, dim=1)
        return torch.cat([seen, same], dim=1).repeat_interleave(queries, dim=0)

    def _grouped(self, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor) -> Tensor:
        stop_A = self.stop_A if self.order_A is None else self.stop_A[self.order_A]
        sizes = [group.last - group.first for group in self.groups]
        # Split rather than sliced: backward then joins the groups' gradients instead of adding up padded ones.
        by_group = zip(self.groups, *(x.split(sizes) for x in (stop_A, q, own_k, own_v)), strict=True)
        parts = []
        for group, stop_G, q_G, own_k_G, own_v_G in by_group:
            prefix = slice(group.start, group.stop)
            seen_GP = torch.arange(group.start, group.stop, device=q.device) < stop_G[:, None]
            parts.append(_group_attention(q_G, k[prefix], v[prefix], own_k_G, own_v_G, seen_GP))
        return torch.cat(parts)

    def _flex(self, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor) -> Tensor:
        from pipeline.draft.flex import attend_flex, block_mask

        shape = (q.shape[1], k.shape[0], own_k.shape[1])
        if shape not in self.masks:
            ranges = (x[self.order_A] for x in (self.start_A, self.stop_A))
            self.masks[shape] = block_mask(*ranges, queries=shape[0], context=shape[1], own=shape[2])
        return attend_flex(q, k, v, own_k, own_v, self.masks[shape])


def _groups(starts: list[int], stops: list[int]) -> list[Group]:
    """Consecutive blocks of one document, at most GROUP at a time."""
    cuts = [0]
    for i in range(1, len(starts)):
        if starts[i] != starts[i - 1] or i - cuts[-1] == GROUP:
            cuts.append(i)
    cuts = [*cuts, len(starts)] if starts else []
    return [Group(a, b, starts[a], max(stops[b - 1], starts[a])) for a, b in pairwise(cuts)]


def _group_attention(q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, seen_GP: Tensor) -> Tensor:
    """One shared prefix [P, Hkv, d] for blocks [G, Q, H, d]; query heads of a key/value head are stacked as queries."""
    blocks, queries, heads, d = q.shape
    own, kv_heads = own_k.shape[1], own_k.shape[2]
    share = heads // kv_heads
    stacked = q.view(blocks * queries, kv_heads, share, d).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, d)
    keys = torch.cat([k, own_k.flatten(0, 1)]).transpose(0, 1)[None]
    values = torch.cat([v, own_v.flatten(0, 1)]).transpose(0, 1)[None]
    same = torch.eye(blocks, dtype=torch.bool, device=q.device).repeat_interleave(own, dim=1)
    mask = torch.cat([seen_GP, same], dim=1).repeat_interleave(queries, dim=0).repeat(share, 1)[None, None]
    out = F.scaled_dot_product_attention(stacked, keys, values, attn_mask=mask)
    return out.view(kv_heads, share, blocks * queries, d).permute(2, 0, 1, 3).reshape(blocks, queries, heads, d)


def attend_eager(q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, mask: Tensor) -> Tensor:
    """Masked softmax attention written out: scores, −inf, softmax in fp32 (at least), weighted sum."""
    blocks, queries, heads, d = q.shape
    share = heads // own_k.shape[2]
    keys = torch.cat([k, own_k.flatten(0, 1)]).repeat_interleave(share, dim=1)
    values = torch.cat([v, own_v.flatten(0, 1)]).repeat_interleave(share, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.flatten(0, 1), keys) / math.sqrt(d)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    return torch.einsum("hqk,khd->qhd", weights.to(q.dtype), values).view(blocks, queries, heads, d)


def choose_backend(requested: str, device: torch.device) -> tuple[str, str]:
    """(backend, reason) for `auto`, `flex`, `sdpa` or `eager` on a device; the reason is meant to be printed (DEP-04).

    flex_attention has no backward on CPU and needs Triton on CUDA; without them the same ranges go through sdpa.
    """
    if requested in ("sdpa", "eager"):
        return requested, f"{requested}, as configured"
    obstacle = _flex_obstacle(device)
    if obstacle is None:
        return "flex", "flex, as configured" if requested == "flex" else "flex: block-sparse on CUDA"
    return "sdpa", f"sdpa over shared prefixes: {obstacle}"


def _flex_obstacle(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"flex_attention has no backward on {device.type}"
    checks: list[tuple[str, Callable[[], object]]] = [
        ("torch has no flex_attention", lambda: __import__("torch.nn.attention.flex_attention")),
        ("Triton is not installed", lambda: __import__("triton")),
    ]
    for reason, check in checks:
        try:
            check()
        except ImportError:
            return reason
    return None


def visible_ranges(document_T: Tensor, index_A: Tensor) -> tuple[Tensor, Tensor]:
    """(start_A, stop_A): each anchor's document start and the anchor itself, as positions in the packed stream (S2)."""
    at = torch.arange(len(document_T), device=document_T.device)
    begins = torch.ones_like(document_T, dtype=torch.bool)
    begins[1:] = document_T[1:] != document_T[:-1]
    start_T = torch.where(begins, at, 0).cummax(0).values if len(at) else at
    return start_T[index_A], index_A


def trim(start_A: Tensor, stop_A: Tensor, context: int) -> tuple[Tensor, Tensor, Tensor]:
    """Context positions some anchor sees, and the ranges renumbered to them.

    Returns (kept positions, start_A, stop_A). Tokens after a document's last anchor need no features.
    """
    edges = torch.zeros(context + 1, dtype=torch.int64, device=stop_A.device)
    edges.index_add_(0, start_A, torch.ones_like(start_A))
    edges.index_add_(0, stop_A, -torch.ones_like(stop_A))
    seen = edges.cumsum(0)[:context] > 0
    before = F.pad(seen.cumsum(0), (1, 0))
    return seen.nonzero().flatten(), before[start_A], before[stop_A]
