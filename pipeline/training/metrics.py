"""What is reported about training: sums that add over micro-batches and ranks, and the numbers made from them (S14).

No mean of means anywhere: numerators and denominators travel separately, and are divided once, at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.speculative.losses import SlotStatistics
from pipeline.speculative.teacher import TopTeacher
from pipeline.training.microbatch import MicroBatch
from pipeline.training.terms import Terms

SLOT_COLUMNS = ("slots", "acceptance", "greedy", "tv", "ce", "in_vocabulary", "covered_mass", "confidence_error")
TOTALS = (
    "weight",
    "ce_weight",
    "ce",
    "divergence",
    "confidence",
    "confidence_floor",
    "confidence_gap",
    "confidence_spread",
    "blocks",
    "tau",
    "tail",
    "distributions",
    "tokens",
    "rows",
)


class Sums:
    """Numerators and denominators of every reported number, additive over micro-batches and ranks (S14).

    `slots_KM` has a row per slot and the columns `SLOT_COLUMNS`; `totals_N` the entries `TOTALS`.
    """

    def __init__(self, slots_KM: Tensor, totals_N: Tensor) -> None:
        self.slots_KM, self.totals_N = slots_KM, totals_N

    @classmethod
    def zero(cls, block_size: int, device: torch.device | str = "cpu") -> Sums:
        slots_KM = torch.zeros(block_size, len(SLOT_COLUMNS), dtype=torch.float64, device=device)
        return cls(slots_KM, torch.zeros(len(TOTALS), dtype=torch.float64, device=device))

    def plus(self, other: Sums) -> Sums:
        return Sums(self.slots_KM + other.slots_KM, self.totals_N + other.totals_N)

    def total(self, name: str) -> float:
        """One of `TOTALS`."""
        return float(self.totals_N[TOTALS.index(name)])

    def flat(self) -> Tensor:
        return torch.cat([self.slots_KM.flatten(), self.totals_N])

    @classmethod
    def of_flat(cls, flat: Tensor) -> Sums:
        slots, totals = flat[: -len(TOTALS)], flat[-len(TOTALS) :]
        return cls(slots.view(-1, len(SLOT_COLUMNS)), totals)


def measure(batch: MicroBatch, slots: SlotStatistics, weights_S: Tensor) -> Sums:
    """Everything reported about a micro-batch but the confidence head."""
    anchors, block_size = batch.anchors.valid_AK.shape
    known_S = batch.labels_S >= 0
    accepted_S = slots.acceptance_S.double()
    facts = {
        "slots": torch.ones_like(accepted_S),
        "acceptance": accepted_S,
        "greedy": slots.greedy_S.double(),
        "tv": 0.5 * slots.l1_S.double(),
        "ce": slots.ce_S.double() * known_S,
        "in_vocabulary": known_S.double(),
        "covered_mass": 1 - slots.outside_S.double(),
        "confidence_error": torch.zeros_like(accepted_S),
    }
    sums = Sums.zero(block_size, accepted_S.device)
    sums.slots_KM.index_add_(0, batch.slots_S % block_size, torch.stack([facts[name] for name in SLOT_COLUMNS], 1))
    chances_AK = accepted_S.new_zeros(anchors * block_size).index_copy_(0, batch.slots_S, accepted_S)
    whole_A = batch.anchors.valid_AK.all(1)
    tau_A = 1 + chances_AK.view(anchors, block_size).cumprod(1).sum(1)
    weights_S = weights_S.double()
    tail = batch.teacher.tail_mass().double() if isinstance(batch.teacher, TopTeacher) else weights_S.new_zeros(0)
    totals = {
        "weight": weights_S.sum(),
        "ce_weight": (weights_S * known_S).sum(),
        "ce": (weights_S * known_S * slots.ce_S).sum(),
        "divergence": (weights_S * slots.divergence_S).sum(),
        "confidence_floor": (weights_S * _entropy(accepted_S)).sum(),
        "blocks": whole_A.sum(),
        "tau": (tau_A * whole_A).sum(),
        "tail": tail.sum(),
        "distributions": torch.tensor(tail.numel()),
        "tokens": torch.tensor(batch.tokens if batch.keys else 0),
        "rows": torch.tensor(len(batch.keys)),
    }
    for index, name in enumerate(TOTALS):
        if name in totals:
            sums.totals_N[index] = totals[name]
    return sums


def _entropy(chance_S: Tensor) -> Tensor:
    """-c log c - (1-c) log(1-c): the least a cross-entropy against the soft label c can be."""
    chance_S = chance_S.clamp(0.0, 1.0)  # rounding leaves some a hair outside, where the logarithm is not a number
    return -(torch.xlogy(chance_S, chance_S) + torch.xlogy(1 - chance_S, 1 - chance_S))


def report(sums: Sums, terms: Terms) -> dict[str, float]:
    """Reported numbers from reduced sums. Numbers without data are left out, never 0.

    `confidence_excess` is the confidence loss above the entropy of its soft labels: what the head can still learn. The
    loss itself rises while a drafter improves, because labels near 0 become labels in between. `confidence_gap` is the
    mean confidence above the mean c*, `confidence_spread` its slope in the head's bias (mean of c(1 - c)).
    `in_vocabulary` is the share of labels a draft vocabulary holds, `covered_mass` the target's mass in it, which
    bounds acceptance (S30).
    """
    totals = dict(zip(TOTALS, sums.totals_N.tolist(), strict=True))
    ce = _ratio(totals["ce"], totals["ce_weight"])
    divergence = _ratio(totals["divergence"], totals["weight"])
    confidence = _ratio(totals["confidence"], totals["weight"])
    floor = _ratio(totals["confidence_floor"], totals["weight"]) or 0.0
    found: dict[str, float | None] = {
        "loss": terms.ce * (ce or 0.0)
        + terms.divergence * (divergence or 0.0)
        + terms.confidence * (confidence or 0.0),
        "ce": ce,
        terms.kind: None if divergence is None else divergence * (0.5 if terms.kind == "tv" else 1.0),
        "confidence_loss": confidence if terms.confidence else None,
        "confidence_excess": confidence - floor if terms.confidence and confidence is not None else None,
        "confidence_gap": _ratio(totals["confidence_gap"], totals["weight"]) if confidence is not None else None,
        "confidence_spread": _ratio(totals["confidence_spread"], totals["weight"]) if confidence is not None else None,
        "expected_tau": _ratio(totals["tau"], totals["blocks"]),
        "tail_mass": _ratio(totals["tail"], totals["distributions"]),
    }
    columns = dict(zip(SLOT_COLUMNS, sums.slots_KM.T.tolist(), strict=True))
    count = sum(columns["slots"])
    found |= {name: _ratio(sum(columns[name]), count) for name in ("acceptance", "greedy", "confidence_error")}
    found |= {name: _ratio(sum(columns[name]), count) for name in ("in_vocabulary", "covered_mass")}
    for slot, slots in enumerate(columns["slots"]):
        found[f"acceptance_{slot + 1}"] = _ratio(columns["acceptance"][slot], slots)
    return {name: value for name, value in found.items() if value is not None}


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
