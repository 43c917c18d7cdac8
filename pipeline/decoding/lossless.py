"""Greedy output with a drafter against the target's own: identical, or first different at a near-tie (S22).

The argmax of two logits closer than 1e-4 depends on the shape of the batch they were computed in. Such prompts are
listed with their gap; any other difference is a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

NEAR_TIE = 1e-4


@dataclass(frozen=True)
class Difference:
    """Where two greedy outputs part: position in the output, both tokens, and the target's top-2 logit gap there."""

    position: int
    token: int | None
    vanilla_token: int | None
    gap: float

    @property
    def tie(self) -> bool:
        """Whether rounding alone may have decided the token."""
        return self.gap < NEAR_TIE

    def plain(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**asdict(self), "near_tie": self.tie}


def first_difference(
    target: Any, prompt: Sequence[int], ids: Sequence[int], vanilla: Sequence[int]
) -> Difference | None:
    """None when both outputs are equal. Costs one forward of the target where they are not."""
    if list(ids) == list(vanilla):
        return None
    pairs = zip(ids, vanilla, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(vanilla)))
    before = torch.tensor([[*prompt, *ids[:place]]], device=target.device)
    logits = target.frozen.logits(target.forward(before).last_hidden_BTD[:, -1])[0]
    top = logits.topk(2).values
    token, other = (line[place] if place < len(line) else None for line in (ids, vanilla))
    return Difference(place, token, other, float(top[0] - top[1]))
