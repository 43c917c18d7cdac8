"""One global batch, any split: the same loss and gradients (S14)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.training.loader import feed
from pipeline.training.metrics import Sums, report
from tests.unit.training.world import DRAFT, world


def one_step(dtype: torch.dtype, *, ranks: int, budget: int, **options: Any) -> tuple[dict[str, float], Tensor]:
    """Reported numbers and the concatenated gradient of step 0; the ranks are played one after the other."""
    made = world(dtype=dtype, **options)
    shares = [
        next(feed(made.schedule, made.reader, rank=rank, world=ranks, budget=budget, start=0, stop=1, workers=0))
        for rank in range(ranks)
    ]
    weight, ce_weight = sum(share.weight_sums for share in shares).tolist()  # type: ignore[union-attr]
    assert len({share.count for share in shares}) == 1
    total: Sums | None = None
    for share in shares:
        for batch in share.batches:
            moved = batch.to(torch.device("cpu"), dtype)
            loss, sums = made.objective(moved, made.frozen, ranks / weight, ranks / max(ce_weight, 1e-9))
            (loss / ranks).backward()
            total = sums if total is None else total.plus(sums)
    assert total is not None
    assert total.total("weight") == pytest.approx(weight, rel=1e-12)
    gradient = torch.cat([parameter.grad.flatten() for parameter in made.objective.parameters()])
    return report(total, made.terms), gradient


# (ranks, tokens a micro-batch may hold) for 8 rows: 1 holds one row, so 8x1, 2x4 and 1x8 are among them.
SPLITS = [(1, 1), (2, 1), (8, 1), (4, 1), (1, 60), (2, 60), (2, 10_000), (5, 100)]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"words": 30, "source": "topk"},
    {"words": 30, "ce_label": "argmax", "bare": (2,)},
    {"divergence": "kl", "words": 30},
    {"draft": replace(DRAFT, markov="rnn")},
    {"draft": replace(DRAFT, kind="eagle3", markov="none", markov_rank=0, mask_token_id=None)},
    {"draft": replace(DRAFT, kind="medusa", markov="none", markov_rank=0, mask_token_id=None)},
]


@pytest.mark.case("NUM-02")
@pytest.mark.parametrize("variant", VARIANTS, ids=range(len(VARIANTS)))
def test_any_split_gives_the_same_step_in_fp64(variant: dict[str, Any]) -> None:
    """Rows packed into one micro-batch, or one row each, on 1 to 8 ranks: 1e-10."""
    numbers, gradient = one_step(torch.float64, ranks=1, budget=10_000, **variant)
    for ranks, budget in SPLITS:
        other, found = one_step(torch.float64, ranks=ranks, budget=budget, **variant)
        assert (found - gradient).norm() / gradient.norm() < 1e-10, (ranks, budget)
        assert other == pytest.approx(numbers, rel=1e-10), (ranks, budget)


def test_any_split_gives_the_same_step_in_fp32() -> None:
    numbers, gradient = one_step(torch.float32, ranks=1, budget=10_000, words=30, source="topk")
    for ranks, budget in SPLITS:
        other, found = one_step(torch.float32, ranks=ranks, budget=budget, words=30, source="topk")
        assert (found - gradient).norm() / gradient.norm() < 1e-5, (ranks, budget)
        assert other == pytest.approx(numbers, rel=1e-5), (ranks, budget)


def test_the_loss_is_the_weighted_mean_of_its_terms() -> None:
    """S14: what is differentiated is what is reported: sum w l / sum w per term, times the term's weight."""
    made = world(words=30)
    share = next(feed(made.schedule, made.reader, rank=0, world=1, budget=10_000, start=0, stop=1, workers=0))
    weight, ce_weight = share.weight_sums.tolist()
    assert ce_weight < weight
    batch = next(share.batches)
    loss, sums = made.objective(batch, made.frozen, 1 / weight, 1 / ce_weight)
    numbers = report(sums, made.terms)
    assert loss.item() == pytest.approx(numbers["loss"], rel=1e-12)
    assert numbers["loss"] == pytest.approx(0.1 * numbers["ce"] + 0.9 * 2 * numbers["tv"] + numbers["confidence_loss"])


@pytest.mark.case("NUM-12")
def test_a_step_without_supervised_slots_is_an_exact_zero() -> None:
    """All rows unsupervised: loss 0, zero gradients everywhere, and nothing that is not finite."""
    made = world(rows=3, bare=(0, 1, 2))
    share = next(feed(made.schedule, made.reader, rank=0, world=1, budget=10_000, start=0, stop=1, workers=0))
    assert share.weight_sums.tolist() == [0, 0] and share.count == 1
    batch = next(share.batches).to(torch.device("cpu"), torch.float64)
    loss, sums = made.objective(batch, made.frozen, 0.0, 0.0)
    loss.backward()
    assert loss.item() == 0 and report(sums, made.terms) == {"loss": 0.0}
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in made.objective.parameters())


@pytest.mark.case("NUM-06")
def test_rows_of_mixed_length_stay_finite_and_independent() -> None:
    """A short row beside a long one: the same sums as each alone."""
    made = world(rows=2)
    made.reader.rows.lengths = [6, 40]

    def sums(rows: list[int]) -> Tensor:
        return made.objective(made.reader.micro_batch(rows, 0), made.frozen, 1.0, 1.0)[1].flat()

    together = sums([0, 1])
    assert together.isfinite().all()
    torch.testing.assert_close(together, sums([0]) + sums([1]), rtol=1e-10, atol=1e-10)


@pytest.mark.case("NUM-07")
@pytest.mark.parametrize("detach", [True, False])
def test_the_confidence_loss_reaches_the_drafter_unless_detached(detach: bool) -> None:
    """S12: not detached by default; detached, its gradient on backbone and Markov head is exactly zero."""
    made = world(ce_weight=0.0, tv_weight=1e-300, detach_confidence=detach)
    share = next(feed(made.schedule, made.reader, rank=0, world=1, budget=10_000, start=0, stop=1, workers=0))
    made.objective(next(share.batches), made.frozen, 1.0, 1.0)[0].backward()
    size = {
        name: float(p.grad.abs().max()) for name, p in made.objective.named_parameters() if "confidence" not in name
    }
    assert all(value < 1e-200 for value in size.values()) if detach else size["drafter.norm.weight"] > 1e-6
    assert made.objective.drafter.confidence_head.proj.weight.grad.abs().max() > 0
