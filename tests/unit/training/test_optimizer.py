"""The learning rate as a formula of the step."""

from __future__ import annotations

import math

import pytest
import torch

from pipeline.config import Train
from pipeline.training.optimizer import LearningRate, adamw


@pytest.mark.case("NUM-01")
@pytest.mark.parametrize(("total", "warmup"), [(20, 5), (100, 4), (10, 0), (5, 5), (1, 0), (3600, 144)])
@pytest.mark.parametrize("minimum", [0.0, 1e-5])
def test_warm_up_and_cosine_hit_peak_and_minimum_exactly(total: int, warmup: int, minimum: float) -> None:
    """The peak is the maximum, reached exactly; the last step has the minimum; nothing rises after warm-up."""
    rate = LearningRate(total, warmup, 6e-4, minimum)
    values = [rate(step) for step in range(total)]
    top = max(warmup - 1, 0)
    assert max(values) == values[top] == 6e-4
    assert all(a < b for a, b in zip(values[:top], values[1 : top + 1], strict=True))
    assert all(a > b for a, b in zip(values[top:], values[top + 1 :], strict=False))
    if total - 1 > top:
        assert values[-1] == minimum
        middle = (top + total - 1) // 2
        done = (middle - top) / (total - 1 - top)
        assert values[middle] == pytest.approx(
            minimum + (6e-4 - minimum) * (1 + math.cos(math.pi * done)) / 2, rel=1e-12
        )


def test_the_released_recipe_is_the_default() -> None:
    train = Train()
    assert (train.learning_rate, train.warmup_fraction, train.weight_decay, train.max_grad_norm) == (6e-4, 0.04, 0, 1)
    assert (train.global_batch_size, train.epochs, train.num_anchors) == (512, 10, 512)
    assert LearningRate.of(train, 1000).warmup == 40


def test_adamw_is_the_textbook_update() -> None:
    """Two steps of one weight against the formulas; weight decay is decoupled."""
    module = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.constant_(module.weight, 1.0)
    optimizer = adamw(module, Train(learning_rate=0.1, weight_decay=0.01, betas=(0.9, 0.95)))
    weight, m, v = 1.0, 0.0, 0.0
    for step, gradient in enumerate((0.5, -0.25), start=1):
        module.weight.grad = torch.full_like(module.weight, gradient)
        optimizer.step()
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        weight = weight * (1 - 0.1 * 0.01) - 0.1 * (m / (1 - 0.9**step)) / (math.sqrt(v / (1 - 0.95**step)) + 1e-8)
        assert module.weight.item() == pytest.approx(weight, rel=1e-9)
