"""Sequential temperature scaling: per-slot temperatures that make survival mean what it says (S24, S25).

    fitted = fit(records, bins=15)                         # left to right, on some prompts
    report = judge(records_of_other_prompts, fitted, bins=15)

Survival at slot k is the product of the confidences of slots 1..k; it is compared with the outcome "slots 1..k were all
accepted". Slots after an accepted stop token say nothing and are left out. A record is one block, drafted and verified
at full length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

GRID_POINTS = 101  # log-spaced over [0.1, 10]; an even number would not contain 1
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Records:
    """logits_NK: the confidence head's logits. accepted_N: accepted drafts, a stop token being the last of them.

    stopped_N: whether the block ended in an accepted stop.
    """

    logits_NK: Tensor
    accepted_N: Tensor
    stopped_N: Tensor

    def __post_init__(self) -> None:
        n, block_size = self.logits_NK.shape
        if self.accepted_N.shape != (n,) or self.stopped_N.shape != (n,):
            raise ValueError(f"{n} records, but accepted {self.accepted_N.shape} and stopped {self.stopped_N.shape}")
        if n and not 0 <= int(self.accepted_N.min()) <= int(self.accepted_N.max()) <= block_size:
            raise ValueError(f"accepted lengths outside [0, {block_size}]")

    @property
    def block_size(self) -> int:
        """K."""
        return self.logits_NK.shape[1]

    def __len__(self) -> int:
        return self.logits_NK.shape[0]

    def take(self, index: Tensor) -> Records:
        """The records an index or a mask selects."""
        return Records(self.logits_NK[index], self.accepted_N[index], self.stopped_N[index])

    def counts(self, slot: int) -> Tensor:
        """Which records say something about slot `slot` (from 1)."""
        return ~self.stopped_N | (self.accepted_N >= slot)


def grid(device: torch.device | None = None) -> Tensor:
    """Candidate temperatures, rising."""
    return torch.logspace(-1.0, 1.0, GRID_POINTS, dtype=torch.float64, device=device)


def scaled(logits: Tensor, temperature: float | Tensor, form: str = "logit") -> Tensor:
    """Calibrated confidence: sigmoid(logit / T), or the `power` form c^(1/T), another map that is never exported."""
    if form == "power":
        return torch.exp(torch.nn.functional.logsigmoid(logits) / temperature)
    return torch.sigmoid(logits / temperature)


def survival(records: Records, temperatures: Tensor | None = None, form: str = "logit") -> Tensor:
    """Survival [N, K] under the given temperatures [K] (None: raw)."""
    scale = torch.ones(records.block_size) if temperatures is None else temperatures
    return scaled(records.logits_NK.float(), scale.float(), form).cumprod(-1)


def ece(value_N: Tensor, outcome_N: Tensor, bins: int) -> float | None:
    """Expected calibration error over equal-width bins of [0, 1]: sum over bins of |sum(value - outcome)| / n."""
    if len(value_N) == 0:
        return None
    total = torch.zeros(bins, dtype=torch.float64)
    for value, outcome in zip(value_N.split(_CHUNK), outcome_N.split(_CHUNK), strict=True):
        place = _bin(value, bins)
        total += torch.bincount(place, weights=value - outcome, minlength=bins).double().cpu()
    return float(total.abs().sum()) / len(value_N)


def _bin(value: Tensor, bins: int) -> Tensor:
    """Which of the equal-width bins of [0, 1] a value lies in."""
    return (value * bins).to(torch.int32).clamp_(max=bins - 1)


@dataclass(frozen=True)
class Fitted:
    """Temperatures [K], None where a slot had no data. ece_at_one: ECE_k with T_k = 1 given the earlier ones."""

    temperatures: list[float]
    n: list[int]
    ece_raw: list[float | None]
    ece_at_one: list[float | None]
    ece_fitted: list[float | None]
    form: str = "logit"


def fit(records: Records, *, bins: int, form: str = "logit") -> Fitted:
    """Left to right: with T_1..T_{k-1} fixed, take the T_k on the grid with the smallest ECE of survival at slot k.

    Among equal ones the nearest to 1 wins, so the fitted ECE_k is never above its value at T_k = 1 (S24). A slot
    without data keeps T = 1 with n = 0.
    """
    candidates = grid()
    nearest_first = candidates.log().abs().sort(stable=True).indices
    before_N = torch.ones(len(records))
    raw_NK = survival(records, form=form)
    temperatures, n, raw, at_one, fitted = [], [], [], [], []
    for slot in range(1, records.block_size + 1):
        keep = records.counts(slot)
        logits, outcome = records.logits_NK[keep, slot - 1].float(), (records.accepted_N[keep] >= slot).float()
        base, count = before_N[keep], int(keep.sum())
        best, chosen, one = None, 1.0, None
        for index in nearest_first.tolist() if count else []:
            temperature = float(candidates[index])
            error = _ece_at(logits, base, outcome, temperature, bins, form)
            one = error if one is None else one
            if best is None or error < best:
                best, chosen = error, temperature
        temperatures.append(chosen)
        n.append(count)
        raw.append(ece(raw_NK[keep, slot - 1], outcome, bins))
        at_one.append(one)
        fitted.append(best)
        before_N = before_N * scaled(records.logits_NK[:, slot - 1].float(), chosen, form)
    return Fitted(temperatures, n, raw, at_one, fitted, form)


def _ece_at(logits: Tensor, base: Tensor, outcome: Tensor, temperature: float, bins: int, form: str) -> float:
    """ECE of base * scaled(logits), in pieces that stay in the cache."""
    total = torch.zeros(bins, dtype=torch.float64)
    for z, a, y in zip(logits.split(_CHUNK), base.split(_CHUNK), outcome.split(_CHUNK), strict=True):
        value = scaled(z, temperature, form).mul_(a)
        place = _bin(value, bins)
        total += torch.bincount(place, weights=value.sub_(y), minlength=bins).double()
    return float(total.abs().sum()) / len(logits)


# ------------------------------------------------------------------------------------------------ judging


def auc(value_N: Tensor, outcome_N: Tensor) -> float | None:
    """Chance that an accepted record scores above a rejected one, ties counting half; None without both kinds."""
    positives = int(outcome_N.sum())
    negatives = len(outcome_N) - positives
    if positives == 0 or negatives == 0:
        return None
    _, group, count = value_N.unique(return_inverse=True, return_counts=True)
    last = count.cumsum(0).double()
    rank = last - (count.double() - 1) / 2
    return float((rank[group][outcome_N > 0].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def reliability(value_N: Tensor, outcome_N: Tensor, bins: int) -> list[dict[str, Any]]:
    """Bins of a reliability diagram: n, mean value and mean outcome (None where empty)."""
    place = _bin(value_N, bins)
    n = torch.bincount(place, minlength=bins)
    value = torch.bincount(place, weights=value_N.double(), minlength=bins)
    outcome = torch.bincount(place, weights=outcome_N.double(), minlength=bins)
    return [
        {
            "n": int(n[b]),
            "value": float(value[b] / n[b]) if n[b] else None,
            "outcome": float(outcome[b] / n[b]) if n[b] else None,
        }
        for b in range(bins)
    ]


def judge(records: Records, fitted: Fitted, *, bins: int) -> dict[str, list[Any]]:
    """Per slot on these records: n, ECE, AUC, Brier and reliability bins, before (T = 1) and after."""
    out: dict[str, list[Any]] = {"n": []}
    values = {
        "before": survival(records, form=fitted.form),
        "after": survival(records, torch.tensor(fitted.temperatures), fitted.form),
    }
    for slot in range(1, records.block_size + 1):
        keep = records.counts(slot)
        outcome = (records.accepted_N[keep] >= slot).float()
        out["n"].append(int(keep.sum()))
        for when, value_NK in values.items():
            value = value_NK[keep, slot - 1]
            brier = float((value - outcome).square().mean()) if len(value) else None
            for name, figure in (
                ("ece", ece(value, outcome, bins)),
                ("auc", auc(value, outcome)),
                ("brier", brier),
                ("reliability", reliability(value, outcome, bins)),
            ):
                out.setdefault(f"{name}_{when}", []).append(figure)
    return out


def ece_change(
    records: Records, prompt_N: Tensor, fitted: Fitted, *, bins: int, resamples: int = 1000, seed: int = 0
) -> tuple[float, float] | None:
    """95 % interval of how calibration changes mean ECE, when prompts are drawn with replacement; None without data.

    prompt_N: the prompt of each record. The temperatures stay as fitted. An interval that holds 0 is a change that this
    number of prompts cannot tell from none.
    """
    if len(records) == 0:
        return None
    prompts, place_N = prompt_N.unique(return_inverse=True)
    generator = torch.Generator().manual_seed(seed)
    drawn_BP = torch.randint(len(prompts), (resamples, len(prompts)), generator=generator)
    times_BP = torch.zeros(resamples, len(prompts), dtype=torch.float64)
    times_BP.scatter_add_(1, drawn_BP, torch.ones_like(drawn_BP, dtype=torch.float64))
    values = survival(records, form=fitted.form), survival(records, torch.tensor(fitted.temperatures), fitted.form)
    changes = []
    for slot in range(1, records.block_size + 1):
        keep = records.counts(slot)
        outcome, place = (records.accepted_N[keep] >= slot).float(), place_N[keep]
        n_B = times_BP @ torch.bincount(place, minlength=len(prompts)).double()
        before_B, after_B = (
            (times_BP @ _gaps(value_NK[keep, slot - 1], outcome, place, len(prompts), bins)).abs().sum(1) / n_B
            for value_NK in values
        )
        changes.append(after_B - before_B)
    mean_B = torch.stack(changes).nanmean(0)
    low, high = mean_B.nanquantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def _gaps(value: Tensor, outcome: Tensor, place: Tensor, prompts: int, bins: int) -> Tensor:
    """Sum of value - outcome per prompt and bin, [prompts, bins]."""
    cell = place * bins + _bin(value, bins)
    return torch.bincount(cell, weights=(value - outcome).double(), minlength=prompts * bins).view(prompts, bins)
