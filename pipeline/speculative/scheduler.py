"""How many drafted tokens of each request are verified: Algorithm 1 and the other policies (S26, S27).

    survival_RK = survival(confidence_RK)
    lengths_R = early_stop(survival_RK, sps)

R requests, K slots. Survival a_{r,k} is the product of the confidences of slots 1..k, so it never rises along a row:
sorting all candidates by it keeps each row's slots in order, and Algorithm 1 becomes a sort, a running sum and the
first step that does not gain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import ArtifactError

POLICIES = ("full", "early_stop", "lagged_global", "static_length", "static_threshold")
DIAGNOSTIC = "unlagged_global_diagnostic"


@dataclass(frozen=True)
class SpsTable:
    """Steps per second by forward batch in tokens (S28); between samples the value of the sample below holds.

    Below the first sample the first holds; beyond the last one tokens per second are taken to stay what they were,
    which never makes extra tokens look free where nobody measured.
    """

    batch_tokens: Tensor
    steps_per_second: Tensor

    @classmethod
    def of(cls, tokens: Sequence[int], speeds: Sequence[float]) -> SpsTable:
        """Raises ArtifactError unless the samples rise and the speeds are positive."""
        rising = all(a < b for a, b in zip(tokens, tokens[1:], strict=False))
        if not tokens or len(tokens) != len(speeds) or not rising or min(speeds) <= 0 or tokens[0] < 1:
            raise ArtifactError(
                f"SPS table: rising batch sizes with positive speeds expected, found {tokens}, {speeds}"
            )
        return cls(torch.tensor(tokens, dtype=torch.long), torch.tensor(speeds, dtype=torch.float64))

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> SpsTable:
        """From the content of an `sps.json`."""
        return cls.of(data["sample_batch_tokens"], data["sample_steps_per_sec"])

    def __call__(self, tokens: Tensor) -> Tensor:
        """Steps per second (fp64) at int64 batch sizes of any shape."""
        sample = torch.searchsorted(self.batch_tokens, tokens.cpu(), right=True) - 1
        beyond = (self.batch_tokens[-1] / tokens.cpu().double()).clamp(max=1.0)
        return self.steps_per_second[sample.clamp(min=0)] * beyond


def survival(confidence_RK: Tensor) -> Tensor:
    """a_{r,k}: the chance that slots 1..k are all accepted; non-increasing in k."""
    return confidence_RK.cumprod(-1)


def throughputs(survival_RK: Tensor, sps: SpsTable, epsilon: float = 0.0) -> tuple[Tensor, Tensor]:
    """(theta, order): expected tokens per second after admitting 0, 1, 2 … candidates, most likely first.

    `order` holds the candidates as flat slot-major indices k * R + r, so that a stable sort breaks ties by (slot, row).
    """
    requests = survival_RK.shape[0]
    flat = survival_RK.detach().cpu().double().t().reshape(-1)
    value, order = flat.sort(descending=True, stable=True)
    live = int((value > epsilon).sum())
    value, order = value[:live], order[:live]
    expected = requests + torch.cat([value.new_zeros(1), value.cumsum(0)])
    return expected * sps(requests + torch.arange(live + 1)), order


def top(order: Tensor, count: int, requests: int) -> Tensor:
    """Lengths [R] when the first `count` candidates are admitted."""
    return torch.bincount(order[:count] % requests, minlength=requests)


def early_stop(survival_RK: Tensor, sps: SpsTable, epsilon: float = 0.0) -> Tensor:
    """Algorithm 1 (S26): admit while expected throughput strictly rises. Lossless: whether slot k is verified never
    depends on the token drafted there or later.
    """
    theta, order = throughputs(survival_RK, sps, epsilon)
    falls = (theta[1:] <= theta[:-1]).nonzero()
    count = int(falls[0]) if len(falls) else len(order)
    return top(order, count, survival_RK.shape[0]).to(survival_RK.device)


def global_budget(survival_RK: Tensor, sps: SpsTable) -> int:
    """Number of drafted tokens at the global best expected throughput (the smallest of equals)."""
    return int(throughputs(survival_RK, sps)[0].argmax())


def with_budget(survival_RK: Tensor, budget: int) -> Tensor:
    """Lengths of the `budget` most likely candidates."""
    requests = survival_RK.shape[0]
    flat = survival_RK.detach().cpu().double().t().reshape(-1)
    order = flat.sort(descending=True, stable=True).indices
    return top(order, budget, requests).to(survival_RK.device)


def static_threshold(confidence_RK: Tensor, threshold: float, *, slot: bool = False) -> Tensor:
    """Cut each row at the first slot whose survival (`slot`: whose own confidence) is below the threshold."""
    value_RK = confidence_RK if slot else survival(confidence_RK)
    return (value_RK >= threshold).long().cumprod(-1).sum(-1)


class Scheduler:
    """A policy with its memory; one `lengths` call per decoding step (S27).

    lagged_global takes only its total budget from the confidences of step t - 2, so that no token drafted now can
    decide whether it is verified; steps 0 and 1 use early stop. The same choice on current confidences leaks (paper
    App. A) and exists only under its diagnostic name.
    """

    def __init__(
        self,
        policy: str,
        *,
        sps: SpsTable | None = None,
        length: int | None = None,
        threshold: float | None = None,
        slot: bool = False,
    ) -> None:
        """Raises ValueError when the policy is unknown or lacks what it needs."""
        table = ("an SPS table", sps)
        needs: dict[str, tuple[str, Any]] = {
            "early_stop": table, "lagged_global": table, DIAGNOSTIC: table, "static_length": ("a length", length),
            "static_threshold": ("a threshold", threshold), "full": ("nothing", 0),
        }  # fmt: skip
        if policy not in needs:
            raise ValueError(f"policy {policy!r} is not one of {', '.join(POLICIES)}")
        if needs[policy][1] is None:
            raise ValueError(f"policy {policy} needs {needs[policy][0]}")
        self.policy, self.sps, self.length, self.threshold, self.slot = policy, sps, length, threshold, slot
        self._budgets: list[int] = []

    def lengths(self, confidence_RK: Tensor) -> Tensor:
        """Scheduled lengths [R], each in [0, K], for this step's confidences (fp32, calibrated)."""
        requests, block_size = confidence_RK.shape
        if self.policy == "static_threshold":
            assert self.threshold is not None
            return static_threshold(confidence_RK, self.threshold, slot=self.slot)
        if self.policy in ("full", "static_length"):
            length = block_size if self.length is None else min(self.length, block_size)
            return torch.full((requests,), length, dtype=torch.long, device=confidence_RK.device)
        assert self.sps is not None
        survival_RK = survival(confidence_RK)
        if self.policy == "early_stop":
            return early_stop(survival_RK, self.sps)
        self._budgets.append(global_budget(survival_RK, self.sps))
        if self.policy == DIAGNOSTIC:
            return with_budget(survival_RK, self._budgets[-1])
        if len(self._budgets) < 3:
            return early_stop(survival_RK, self.sps)
        return with_budget(survival_RK, min(self._budgets.pop(0), requests * block_size))
