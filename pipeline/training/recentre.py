"""The confidence head's bias, fitted on held-out rows once training is over.

A drafter is better on rows it was trained on than on new ones, and its confidence head has learned from the former: its
scores are too high by that difference, nearly everywhere. Calibration cannot take that back: a temperature moves scores
towards one half or away from it (S24). So the published head's bias moves by one Newton step to where mean confidence
and mean c* agree on the validation rows. Nothing that is drafted or accepted changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from pipeline.training.journal import read

BIAS = "confidence_head.proj.bias"
FARTHEST = 1.0  # logit; beyond it a straight line no longer says where the means agree


def bias_step(metrics: Path, step: int) -> float:
    """What the bias moves by, from the validation after the last step; 0 without one, or without a confidence head."""
    for line in read(metrics):
        if line["step"] == step and line.get("split") == "validation" and line.get("confidence_spread"):
            return max(-FARTHEST, min(FARTHEST, -float(line["confidence_gap"]) / float(line["confidence_spread"])))
    return 0.0


def recentred(weights: Mapping[str, Tensor], by: float) -> dict[str, Tensor]:
    """The weights with the confidence head's bias moved."""
    return {**weights, BIAS: weights[BIAS] + by} if by else dict(weights)
