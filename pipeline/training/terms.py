"""The loss terms of a run: their weights and options (S12)."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config import Train
from pipeline.speculative.losses import Divergence


@dataclass(frozen=True)
class Terms:
    """Weights of the three loss terms (S12) and how the loss is computed."""

    ce: float
    divergence: float
    confidence: float
    kind: Divergence = "tv"
    detach_confidence: bool = False
    chunk: int = 512

    @classmethod
    def of(cls, train: Train) -> Terms:
        return cls(
            train.ce_weight, train.tv_weight, train.confidence_weight,
            train.divergence, train.detach_confidence, train.loss_chunk,
        )  # fmt: skip
