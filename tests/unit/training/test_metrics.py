"""Reported numbers against their definitions, written out with the whole distributions (S12, S13, S30)."""

from __future__ import annotations

import pytest
import torch

from pipeline.config import load
from pipeline.training.metrics import report
from pipeline.training.setup import recipe_of
from tests.unit.training.world import K, world


def test_every_number_is_its_definition() -> None:
    made = world(rows=4, words=30)
    batch, frozen, drafter = made.reader.micro_batch([0, 1, 2, 3], 0), made.frozen, made.objective.drafter
    with torch.no_grad():
        numbers = report(made.objective(batch, frozen, 1.0, 1.0)[1], made.terms)
        out = drafter(batch.context, batch.anchors, frozen.embed_VD)
        logits = out.hidden_AKD @ frozen.draft_head.weight_VD.T + out.markov_AKr @ drafter.markov_w2.T
        valid_AK, words = batch.anchors.valid_AK, frozen.words
        at_AK = (batch.anchors.index_A[:, None] + torch.arange(K)).clamp(max=batch.tokens - 1)
        # A distribution was kept at every position, so teacher rows are places in the packed stream.
        p_t = (batch.teacher.hidden_PD[at_AK] @ frozen.head.weight_VD.T).softmax(-1)
    p_d = logits.softmax(-1)
    chance_AK = torch.minimum(p_d, p_t[..., words.ids_C]).sum(-1)
    whole_A = valid_AK.all(1)
    labels_AK = words.labels(batch.context.ids_T[(at_AK + 1).clamp(max=batch.tokens - 1)])
    expected = {
        "acceptance": chance_AK[valid_AK].mean(),
        "tv": _weighted(1 - chance_AK, valid_AK, made.reader.recipe.weights_K),
        "confidence_error": (out.confidence_AK.sigmoid() - chance_AK).abs()[valid_AK].mean(),
        "confidence_gap": _weighted(out.confidence_AK.sigmoid() - chance_AK, valid_AK, made.reader.recipe.weights_K),
        "confidence_spread": _weighted(
            out.confidence_AK.sigmoid() * (-out.confidence_AK).sigmoid(), valid_AK, made.reader.recipe.weights_K
        ),
        "expected_tau": (1 + chance_AK.cumprod(1).sum(1))[whole_A].mean(),
        "greedy": (words.ids_C[p_d.argmax(-1)] == p_t.argmax(-1))[valid_AK].double().mean(),
        "in_vocabulary": (labels_AK >= 0)[valid_AK].double().mean(),
        "covered_mass": p_t[..., words.ids_C].sum(-1)[valid_AK].mean(),
        **{f"acceptance_{k + 1}": chance_AK[:, k][valid_AK[:, k]].mean() for k in range(K)},
    }
    assert 0 < int(whole_A.sum()) < len(whole_A) and 0 < expected["in_vocabulary"] < 1
    for name, value in expected.items():
        assert numbers[name] == pytest.approx(float(value), rel=1e-9), name


def _weighted(values_AK: torch.Tensor, valid_AK: torch.Tensor, weights_K: torch.Tensor) -> torch.Tensor:
    weights_AK = weights_K * valid_AK
    return (weights_AK * values_AK).sum() / weights_AK.sum()


@pytest.mark.case("NUM-09")
@pytest.mark.parametrize(("decay", "last"), [("null", 1.0), ("2", 0.22313016), ("block_size", 0.47236655)])
def test_the_configured_decay_reaches_the_slots(decay: str, last: float) -> None:
    """S13, for blocks of 4."""
    config = load("configs/debug.yaml", [f"train.position_decay={decay}", "draft.block_size=4"])
    weights_K = recipe_of(config, 320, None, last_hidden=False).weights_K
    assert weights_K[0] == 1 and float(weights_K[3]) == pytest.approx(last, rel=1e-6)
    made = world(rows=4)
    batch = made.reader.micro_batch([0, 1, 2, 3], 0)
    assert torch.equal(batch.weights_S, made.reader.recipe.weights_K[batch.slots_S % K])
