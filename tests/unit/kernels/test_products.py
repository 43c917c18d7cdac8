"""Products of bf16 factors with fp32 results (S15)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipeline.kernels import products
from pipeline.kernels.products import Workspace, wide_product

N, V = 5, 19


def factors(width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(width)
    return torch.randn(N, width, generator=draw).to(dtype), torch.randn(V, width, generator=draw).to(dtype)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("columns", [1, 7, 19, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_s15_results_are_those_of_fp32(dtype: torch.dtype, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the inner widths are odd, the columns do not divide, and something stood in the result before."""
    monkeypatch.setattr(products, "COLUMNS", columns)
    pairs, work = [factors(33, dtype), factors(6, dtype)], Workspace(torch.device("cpu"))
    expected = sum((a.double() @ b.double().t() for a, b in pairs), start=torch.zeros(N, V, dtype=torch.float64))
    out = torch.full((N, V), float("nan"))
    assert relative(wide_product(pairs, out, work), expected) < 1e-6
    assert relative(wide_product(pairs, out, work, add=True), 2 * expected) < 1e-6


def test_no_pairs_add_nothing_and_no_rows_give_none() -> None:
    work = Workspace(torch.device("cpu"))
    out = torch.ones(N, V)
    assert torch.equal(wide_product([], out, work, add=True), torch.ones(N, V))
    a, b = factors(4, torch.bfloat16)
    assert wide_product([(a[:0], b)], out[:0], work).shape == (0, V)


def test_the_precision_of_other_products_stays_as_it_was() -> None:
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    with pytest.raises(RuntimeError):
        wide_product([factors(4, torch.bfloat16)], torch.empty(N, V + 1), Workspace(torch.device("cpu")))
    assert settings.fp32_precision == before


@pytest.mark.gpu
def test_cuda_writes_fp32() -> None:
    a, b = (x.cuda() for x in factors(33, torch.bfloat16))
    out = wide_product([(a, b)], torch.empty(N, V, device="cuda"), Workspace(a.device))
    assert relative(out.cpu(), a.double().cpu() @ b.double().t().cpu()) < 1e-6
