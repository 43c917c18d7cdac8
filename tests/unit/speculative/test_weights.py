"""Position weights (S13)."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pipeline.speculative.weights import describe, position_weights


@pytest.mark.case("NUM-08")
@pytest.mark.parametrize("decay", [4.0, "block_size", None, 0.5])
def test_the_first_predicted_slot_weighs_one(decay: Any) -> None:
    """The K columns are the predicting slots in both layouts, so no layout may start below 1."""
    assert position_weights(7, decay)[0] == 1


@pytest.mark.case("NUM-09")
def test_the_decay_is_its_own_knob() -> None:
    """S13: a number of slots, `block_size` for exp(-(k-1)/K), null for uniform; the summary line names it."""
    assert position_weights(5, 4.0).tolist() == pytest.approx([math.exp(-k / 4) for k in range(5)])
    assert position_weights(5, "block_size").tolist() == pytest.approx([math.exp(-k / 5) for k in range(5)])
    assert position_weights(5, None).tolist() == [1] * 5
    assert describe(3, None).startswith("uniform") and describe(3, 4.0).startswith("exp(-(k-1)/4): 1.000 0.779")
