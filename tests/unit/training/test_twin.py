"""A whole training step against the plain formulas: every member of the family, parameter by parameter (S11-S19)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.speculative.eager import slot_loss_eager
from pipeline.training import objective
from tests.unit.training.world import DRAFT, world

PLAIN: dict[str, Any] = {"markov": "none", "markov_rank": 0}
FAMILY: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"markov": "gated"},
    "rnn": {"markov": "rnn"},
    "dflash": {"kind": "dflash", **PLAIN},
    "fill-in": {"kind": "dflash", **PLAIN, "layout": "fill_in"},
    "eagle3": {"kind": "eagle3", **PLAIN, "mask_token_id": None},
    "mtp": {"kind": "mtp", **PLAIN, "mask_token_id": None},
    "medusa": {"kind": "medusa", **PLAIN, "mask_token_id": None},
}
EVERYTHING = 10_000


def step(kind: str, dtype: torch.dtype, *, twin: bool, chunk: int = EVERYTHING, **options: Any) -> dict[str, Tensor]:
    """Loss and gradients by parameter of one packed micro-batch with ragged masks; `twin` by the plain formulas."""
    made = world(draft=replace(DRAFT, **FAMILY[kind]), dtype=dtype, rows=4, loss_chunk=chunk, **options)
    made.objective.drafter.configure(attention="eager" if twin else "sdpa", device=torch.device("cpu"))
    batch = made.reader.micro_batch([0, 1, 2, 3], 0).to(torch.device("cpu"), dtype)
    assert 0 < batch.slots_S.numel() < batch.anchors.valid_AK.numel(), "some slots must not count"
    with pytest.MonkeyPatch.context() as patch:
        if twin:
            patch.setattr(objective, "slot_loss", slot_loss_eager)
        loss, sums = made.objective(batch, made.frozen, 0.1, 0.1)
    loss.backward()
    assert all(parameter.grad is not None for parameter in made.objective.parameters())
    found = {name: parameter.grad for name, parameter in made.objective.named_parameters()}
    return {"loss": loss.detach(), "c*": sums.slots_KM[:, 1], **found}


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


@pytest.mark.parametrize("options", [{"source": "topk"}, {"source": "last_hidden", "words": 30}], ids=str)
@pytest.mark.parametrize("kind", FAMILY)
def test_loss_and_every_gradient_equal_the_twin(kind: str, options: dict[str, Any]) -> None:
    """fp64 to 1e-9 per parameter at any chunk size; fp32 to 1e-5 in all and 5e-4 per parameter."""
    if FAMILY[kind].get("kind") in ("mtp", "medusa"):
        options = {**options, "source": "last_hidden"}  # they read the states themselves
    expected = step(kind, torch.float64, twin=True, **options)
    for chunk in (1, 7, EVERYTHING):
        found = step(kind, torch.float64, twin=False, chunk=chunk, **options)
        for name, value in expected.items():
            assert distance(found[name], value) < 1e-9, (name, chunk)
    narrow = step(kind, torch.float32, twin=False, chunk=7, **options)
    assert all(distance(narrow[name], value) < 5e-4 for name, value in expected.items())
    joined = [torch.cat([value.double().flatten() for value in made.values()]) for made in (narrow, expected)]
    assert distance(*joined) < 1e-5
