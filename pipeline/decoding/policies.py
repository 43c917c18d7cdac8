"""Scheduling policies as the engine uses them: confidence logits in, verify lengths out (S24, S26, S27)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.config import Evaluate
from pipeline.errors import ConfigError
from pipeline.speculative.scheduler import Scheduler, SpsTable
from pipeline.speculative.sts import scaled


@dataclass
class Calibrated:
    """A scheduler on calibrated confidences: sigmoid(logit / T_k) with the STS temperatures [K] (None: raw)."""

    scheduler: Scheduler
    temperatures_K: Tensor | None = None

    def lengths(self, confidence_BK: Tensor | None, rows: int, block_size: int, device: torch.device) -> Tensor:
        """The scheduler's lengths for this round."""
        if confidence_BK is None:  # policies that read none still need its shape
            confidence_BK = torch.zeros(rows, block_size, device=device)
        scale = 1.0 if self.temperatures_K is None else self.temperatures_K.to(confidence_BK.device)
        return self.scheduler.lengths(scaled(confidence_BK.float(), scale))


def policy_for(
    settings: Evaluate, *, confidence: bool, temperatures: Sequence[float] | None, sps: dict[str, Any] | None
) -> Calibrated | None:
    """The configured policy for one evaluation unit (its memory starts anew), or None for full blocks.

    Raises ConfigError when a setting is missing, or the policy reads confidences and the drafter has no such head.
    """
    name = settings.policy
    if name == "full":
        return None
    if name != "static_length" and not confidence:
        raise ConfigError(f"evaluate.policy {name} reads confidences, and this drafter has no confidence head")
    if name == "static_length" and settings.policy_length is None:
        raise ConfigError("evaluate.policy static_length needs evaluate.policy_length")
    if name == "static_threshold" and settings.policy_threshold is None:
        raise ConfigError("evaluate.policy static_threshold needs evaluate.policy_threshold")
    table = SpsTable.read(sps) if sps is not None else None
    scheduler = Scheduler(name, sps=table, length=settings.policy_length, threshold=settings.policy_threshold)
    scale = None if temperatures is None else torch.tensor(list(temperatures))
    return Calibrated(scheduler, scale)
