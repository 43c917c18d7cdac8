"""Going on where a run stopped (contract 4), on one rank: bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.training import STEPS, steps
from tests.ranks import run_ranks


def _slow_start(folder: str, stop: int) -> Any:
    return steps("single", folder, stop, warmup_fraction=0.25)


def run(folder: Path, stop: int) -> Any:
    return run_ranks(_slow_start, 1, str(folder), stop, needs=("accelerate", "torch._dynamo"))[0]


@pytest.mark.case("DST-05")
@pytest.mark.case("LDR-08")
@pytest.mark.parametrize("cut", [1, 8])
def test_weights_moments_and_rates_are_bit_equal_after_a_resume(cut: int, tmp_path: Path) -> None:
    """Cut in the warm-up, or in the decay in the middle of an epoch: fp32 on the CPU, every number of every step."""
    lines, weights = run(tmp_path / "whole", STEPS)
    first, _ = run(tmp_path / "cut", cut)
    rest, resumed = run(tmp_path / "cut", STEPS)
    assert first + rest == lines
    assert all(torch.equal(value, resumed[name]) for name, value in weights.items())
    assert lines[-1]["loss"] < lines[0]["loss"]
