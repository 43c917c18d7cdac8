"""The two-level argmax against torch's."""

from __future__ import annotations

import pytest
import torch

from pipeline.kernels.argmax import argmax_rows


@pytest.mark.parametrize("columns", [1, 63, 64, 128, 1000, 6400])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_torchs_and_the_first_of_equals(columns: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(columns)
    values = torch.randn(50, columns, generator=draw).to(dtype)
    coarse = torch.randint(0, 3, (50, columns), generator=draw).to(dtype)
    for given in (values, coarse, torch.zeros(3, columns), values[:0], torch.full((2, columns), float("-inf"))):
        at = torch.arange(columns).expand_as(given)
        first = torch.where(given == given.amax(1, keepdim=True), at, columns).amin(1) if len(given) else at[:, 0]
        assert torch.equal(argmax_rows(given), first)


def test_rows_that_are_part_of_something_wider() -> None:
    values = torch.randn(6, 256, generator=torch.Generator().manual_seed(0))[2:5]
    assert torch.equal(argmax_rows(values), values.argmax(1))
