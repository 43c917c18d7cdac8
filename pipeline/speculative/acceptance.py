"""Accepted length and acceptance curves from verify rounds (S23), pooled over requests, with bootstrap intervals.

Three numbers are called acceptance rate elsewhere; here each has its own name. At slot k:
    prefix_acceptance        P(accepted >= k)                          what survival predicts
    conditional_acceptance   P(accepted >= k | accepted >= k - 1)      what the slot's own confidence predicts
    teacher_forced           mean of 1 - TV(p_d, p_t) after the target's own tokens, every slot counted
A slot without data is None with n = 0, never 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rounds:
    """Verify rounds as columns [N] (int64). A bonus of 0 marks a round that ended in an accepted stop token."""

    request_N: Tensor
    scheduled_N: Tensor
    accepted_N: Tensor
    bonus_N: Tensor
    requests: int

    @classmethod
    def of(cls, rows: Sequence[Sequence[Sequence[int]]]) -> Rounds:
        """From one list of (scheduled, accepted, bonus) per request."""
        flat = [(request, *step[:3]) for request, steps in enumerate(rows) for step in steps]
        request, scheduled, accepted, bonus = torch.tensor(flat, dtype=torch.long).reshape(-1, 4).unbind(1)
        return cls(request, scheduled, accepted, bonus, len(rows))

    def per_request(self, values_N: Tensor) -> Tensor:
        """Sums [requests] (fp64) of a value per round."""
        return torch.zeros(self.requests, dtype=torch.float64).index_add_(0, self.request_N, values_N.double())

    def excluded_NK(self, block_size: int) -> Tensor:
        """Slots that say nothing: not scheduled, or after an accepted stop."""
        slots_K = torch.arange(1, block_size + 1)
        unscheduled = slots_K > self.scheduled_N[:, None]
        stopped = (self.bonus_N == 0)[:, None] & (slots_K > self.accepted_N[:, None])
        return unscheduled | stopped


def ratio(numerator: Tensor | float, denominator: Tensor | float) -> float | None:
    """numerator / denominator as a float, None without data."""
    return float(numerator) / float(denominator) if float(denominator) > 0 else None


def accepted_length(rounds: Rounds) -> float | None:
    """tau: tokens per verify step, bonus included, pooled (sum over sum, never a mean of means)."""
    return ratio((rounds.accepted_N + rounds.bonus_N).sum(), len(rounds.accepted_N))


def curves(rounds: Rounds, block_size: int) -> dict[str, list[Any]]:
    """Prefix and conditional acceptance per slot, each with its n."""
    slots_K = torch.arange(1, block_size + 1)
    counted_NK = ~rounds.excluded_NK(block_size)
    reached_NK = counted_NK & (rounds.accepted_N[:, None] >= slots_K - 1)
    passed_K = (counted_NK & (rounds.accepted_N[:, None] >= slots_K)).sum(0)
    out: dict[str, list[Any]] = {}
    for name, population_NK in (("prefix_acceptance", counted_NK), ("conditional_acceptance", reached_NK)):
        n_K = population_NK.sum(0)
        out[name] = [ratio(hit, n) for hit, n in zip(passed_K, n_K, strict=True)]
        out[f"{name}_n"] = n_K.tolist()
    return out


def bootstrap(numerator_R: Tensor, denominator_R: Tensor, *, resamples: int, seed: int) -> tuple[float, float] | None:
    """95 % interval of sum(numerator)/sum(denominator) when requests are drawn with replacement; None without data."""
    requests = len(numerator_R)
    if requests == 0 or float(denominator_R.sum()) == 0:
        return None
    generator = torch.Generator().manual_seed(seed)
    values = []
    for start in range(0, resamples, 256):
        draw = torch.randint(0, requests, (min(256, resamples - start), requests), generator=generator)
        top, bottom = numerator_R[draw].sum(1), denominator_R[draw].sum(1)
        values.append(top[bottom > 0] / bottom[bottom > 0])
    spread = torch.cat(values)
    low, high = torch.quantile(spread, torch.tensor([0.025, 0.975], dtype=spread.dtype)).tolist()
    return low, high


def summarise(rounds: Rounds, *, block_size: int, resamples: int, seed: int) -> dict[str, Any]:
    """All that S23 asks for, as plain data."""
    tokens_N = rounds.accepted_N + rounds.bonus_N
    tokens_R, rounds_R = rounds.per_request(tokens_N), rounds.per_request(torch.ones_like(tokens_N))
    interval = bootstrap(tokens_R, rounds_R, resamples=resamples, seed=seed)
    active = rounds_R > 0
    return {
        "num_requests": rounds.requests,
        "num_rounds": len(tokens_N),
        "tau": accepted_length(rounds),
        "tau_interval": None if interval is None else list(interval),
        "tau_draft_only": ratio(rounds.accepted_N.sum(), len(tokens_N)),
        "tau_request_mean": ratio((tokens_R[active] / rounds_R[active]).sum(), int(active.sum())),
        "scheduled_per_round": ratio(rounds.scheduled_N.sum(), len(tokens_N)),
        "accepted_per_scheduled": ratio(rounds.accepted_N.sum(), rounds.scheduled_N.sum()),
        **curves(rounds, block_size),
    }
