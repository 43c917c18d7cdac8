"""Matrix products of bf16 tensors whose results are not rounded to bf16 (S15).

    logits_NV = wide_product([(hidden_ND, head_VD), (markov_Nr, w2_Vr)], torch.empty(N, V), Workspace(device))

CUDA writes fp32. The CPU has no such product, so there the factors are widened, some columns of the result at a time,
and multiplied by oneDNN, which is told that bf16 is enough inside: what was bf16 loses nothing by it, and the sums are
fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

COLUMNS = 2048  # widened at a time: what was just written is still in the cache when multiplied


class Workspace:
    """Buffers that successive chunks reuse: fresh memory is mapped page by page, which costs more than computing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flat: dict[tuple[str, torch.dtype], Tensor] = {}

    def get(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """The buffer `name` as [rows, columns], content undefined; it overwrites what the same name held before."""
        flat = self._flat.get((name, dtype))
        if flat is None or flat.numel() < rows * columns:
            flat = self._flat[name, dtype] = torch.empty(rows * columns, dtype=dtype, device=self._device)
        return flat[: rows * columns].view(rows, columns)


def wide_product(pairs: list[tuple[Tensor, Tensor]], out: Tensor, work: Workspace, *, add: bool = False) -> Tensor:
    """out = the sum of a @ b.T over pairs ([N, d], [V, d]), or out += it; `out` is fp32 or fp64 whatever they are."""
    narrow = any(a.dtype != out.dtype for a, _ in pairs)
    if narrow and not out.is_cuda:
        return _widened(pairs, out, work, add)
    for a_Nd, b_Vd in pairs:
        if narrow:
            wide_NV = torch.mm(a_Nd, b_Vd.t(), out_dtype=out.dtype)
            _ = out.add_(wide_NV) if add else out.copy_(wide_NV)
        else:
            out.addmm_(a_Nd, b_Vd.t(), beta=1.0 if add else 0.0)
        add = True
    return out


def _widened(pairs: list[tuple[Tensor, Tensor]], out: Tensor, work: Workspace, add: bool) -> Tensor:
    """The pairs side by side, as one product."""
    a_Nd = torch.cat([a for a, _ in pairs], dim=1).to(out.dtype)
    exact = all(factor.dtype == torch.bfloat16 for pair in pairs for factor in pair)
    with _bf16_inside() if exact else nullcontext():
        for first in range(0, out.shape[1], COLUMNS):
            out_Nv = out[:, first : first + COLUMNS]
            b_vd = work.get("widened", out_Nv.shape[1], a_Nd.shape[1], out.dtype)
            parts = b_vd.split([b.shape[1] for _, b in pairs], dim=1)
            for part, (_, b) in zip(parts, pairs, strict=True):
                part.copy_(b[first : first + COLUMNS])
            out_Nv.addmm_(a_Nd, b_vd.t(), beta=1.0 if add else 0.0)
    return out


@contextmanager
def _bf16_inside() -> Iterator[None]:
    """fp32 products of this block may round their factors to bf16; where oneDNN has no such kernel they stay fp32."""
    products = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, products.fp32_precision = products.fp32_precision, "bf16"
    try:
        yield
    finally:
        products.fp32_precision = before
