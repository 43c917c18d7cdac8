"""AdamW and the learning rate, a closed formula of the step: a resumed run cannot drift from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from pipeline.config import Train


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up, then half a cosine: the peak is reached exactly, and the last step uses the minimum exactly.

    Steps count from 0. Warm-up step n uses peak * (n + 1) / warmup. Without a step after the peak there is no decay.
    """

    total: int
    warmup: int
    peak: float
    minimum: float = 0.0

    @classmethod
    def of(cls, train: Train, total: int) -> LearningRate:
        return cls(total, round(train.warmup_fraction * total), train.learning_rate, train.min_learning_rate)

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        top = max(self.warmup - 1, 0)
        done = (step - top) / max(self.total - 1 - top, 1)
        if done >= 1:
            return self.minimum
        return self.minimum + (self.peak - self.minimum) * (0.5 + 0.5 * math.cos(math.pi * done))


def adamw(module: nn.Module, train: Train) -> torch.optim.AdamW:
    """AdamW over every parameter of the drafter, one group; the rate is set at each step."""
    return torch.optim.AdamW(
        module.parameters(), lr=train.learning_rate, betas=train.betas, weight_decay=train.weight_decay, fused=True
    )
