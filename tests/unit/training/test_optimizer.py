"""The learning rate as a formula of the step."""

from __future__ import annotations

import math

import pytest
import torch

from pipeline.config import Tokens, Train
from pipeline.training.optimizer import LearningRate, adamw
from tests.unit.training.world import world


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


@pytest.mark.case("NUM-09")
def test_the_released_recipe_is_the_default() -> None:
    """S12, S13: rates, batch and length as released; the terms' weights and the position decay as documented."""
    train = Train()
    assert Tokens().max_length == 4096 and train.position_decay == 4.0 and train.divergence == "tv"
    assert (train.ce_weight, train.tv_weight, train.confidence_weight) == (0.1, 0.9, 1.0)
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


def test_weights_and_moments_stay_fp32_under_bf16_compute() -> None:
    """A step far smaller than bf16 can add to a weight still moves it."""
    made = world(rows=4, dtype=torch.bfloat16, learning_rate=1e-6)
    optimizer = adamw(made.objective, made.train)
    before = {name: parameter.detach().clone() for name, parameter in made.objective.named_parameters()}
    batch = made.reader.micro_batch([0, 1, 2, 3], 0).to(torch.device("cpu"), torch.bfloat16)
    made.objective(batch, made.frozen, 0.1, 0.1)[0].backward()
    optimizer.step()
    for name, parameter in made.objective.named_parameters():
        state = optimizer.state[parameter]
        assert {parameter.dtype, parameter.grad.dtype, state["exp_avg"].dtype, state["exp_avg_sq"].dtype} == {
            torch.float32
        }, name
    moved = made.objective.drafter.norm.weight - before["drafter.norm.weight"]
    assert 0 < float(moved.abs().max()) < 2e-6
