"""Which positions learn: the mask is read at the token being predicted, for every member of the family."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeline.draft.interface import DraftOutput
from tests.unit.training.world import DRAFT, FakeRows, K, world

PROMPT, ANSWER = 5, 4
KINDS: dict[str, dict[str, Any]] = {
    "dspark": {},
    "dflash-fill-in": {"kind": "dflash", "markov": "none", "markov_rank": 0, "layout": "fill_in"},
    "eagle3": {"kind": "eagle3", "markov": "none", "markov_rank": 0, "mask_token_id": None},
    "mtp": {"kind": "mtp", "markov": "none", "markov_rank": 0, "mask_token_id": None},
    "medusa": {"kind": "medusa", "markov": "none", "markov_rank": 0, "mask_token_id": None},
}


@pytest.mark.case("DAT-01")
@pytest.mark.case("DAT-02")
@pytest.mark.parametrize("rule", ["generated", "label"])
@pytest.mark.parametrize("kind", KINDS)
def test_exactly_the_answer_is_learned(kind: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 prompt and 4 answer tokens, two tokens after it: gradient reaches exactly the slots that predict answer tokens
    2 ... n (`label`: the first too), none before, none after (S7, S9)."""
    length = PROMPT + ANSWER + 2
    mask = torch.tensor([0] * PROMPT + [1] * ANSWER + [0, 0], dtype=torch.uint8)
    ids = torch.arange(length) + 3
    monkeypatch.setattr(FakeRows, "tokens", lambda self, row: ("row/0", ids, mask))
    made = world(rows=1, draft=replace(DRAFT, **KINDS[kind]), num_anchors=99)
    made.reader.rows.lengths = [length]
    object.__setattr__(made.reader, "recipe", replace(made.reader.recipe, rule=rule))
    seen: list[DraftOutput] = []
    forward = made.objective.drafter.forward

    def keep(*inputs: Any, **options: Any) -> DraftOutput:
        output = forward(*inputs, **options)
        output.hidden_AKD.retain_grad()
        seen.append(output)
        return output

    monkeypatch.setattr(made.objective.drafter, "forward", keep)
    batch = made.reader.micro_batch([0], 0)
    made.objective(batch, made.frozen, 1.0, 1.0)[0].backward()

    gradient_AK = seen[0].hidden_AKD.grad.abs().sum(-1) > 0  # type: ignore[union-attr]
    predicted_AK = batch.anchors.index_A[:, None] + torch.arange(1, K + 1)
    assert torch.equal(gradient_AK, batch.anchors.valid_AK)
    first = PROMPT + 1 if rule == "generated" else PROMPT
    assert set(predicted_AK[gradient_AK].tolist()) == set(range(first, PROMPT + ANSWER))
    answer_AK = (predicted_AK >= first) & (predicted_AK < PROMPT + ANSWER)
    assert torch.equal(gradient_AK, answer_AK), "every slot that predicts an answer token counts, and no other"
    assert torch.equal(batch.labels_S, ids[predicted_AK.flatten()[batch.slots_S]])
