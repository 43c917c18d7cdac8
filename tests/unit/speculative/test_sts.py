"""S24-S25: left-to-right temperature scaling on data whose truth is known."""

from __future__ import annotations

import time

import pytest
import torch

from pipeline.speculative.sts import Records, auc, ece, ece_change, fit, grid, judge, scaled, survival

TRUE_T = torch.tensor([2.0, 0.5, 1.5, 3.0, 1.0, 0.8, 2.5])


def synthetic(n, temperatures=TRUE_T, seed=0):
    """Slot k is accepted with chance sigmoid(z / T_k), independently given that the slots before were."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(n, len(temperatures), generator=generator) * 2 + 2
    accepted = (torch.rand(z.shape, generator=generator) < torch.sigmoid(z / temperatures)).long().cumprod(1).sum(1)
    return Records(z, accepted, torch.zeros(n, dtype=torch.bool))


def steps_off(fitted, truth):
    return [abs(float(torch.log10(t / true))) / 0.02 for t, true in zip(torch.tensor(fitted), truth, strict=True)]


def test_s24_grid_is_logarithmic_and_contains_one():
    points = grid()
    assert len(points) == 101 and points[50] == 1.0
    assert float(points[0]) == pytest.approx(0.1) and float(points[-1]) == pytest.approx(10.0)


@pytest.mark.case("CAL-01")
def test_s24_slot_one_is_recovered_from_five_thousand_records():
    fitted = fit(synthetic(5_000, torch.full((4,), 2.0), seed=1), bins=15)
    assert steps_off(fitted.temperatures[:1], [2.0])[0] <= 2.001


@pytest.mark.prove
@pytest.mark.case("CAL-01")
def test_s24_every_slot_is_recovered_and_fitting_is_fast(proof):
    """10^6 blocks x 7 slots under `make prove` (under 10 s); a fifth of them here, where slots are noisier."""
    records = synthetic(proof.size(200_000, 1_000_000))
    started = time.process_time()
    fitted = fit(records, bins=15)
    proof.note("STS fit, CPU seconds", round(time.process_time() - started, 2))
    off = steps_off(fitted.temperatures, TRUE_T)
    proof.note("grid steps off, per slot", [round(step, 2) for step in off])
    assert max(off) <= proof.size(2.001, 1.001)
    for error, at_one in zip(fitted.ece_fitted, fitted.ece_at_one, strict=True):
        assert error <= at_one


def test_s24_fitted_is_never_above_its_value_at_one_even_on_noise():
    generator = torch.Generator().manual_seed(3)
    records = Records(
        torch.randn(400, 3, generator=generator), torch.randint(0, 4, (400,), generator=generator),
        torch.zeros(400, dtype=torch.bool),
    )  # fmt: skip
    fitted = fit(records, bins=15)
    assert all(a <= b for a, b in zip(fitted.ece_fitted, fitted.ece_at_one, strict=True))


def test_s24_ties_go_to_the_temperature_nearest_one():
    """Every logit is 0, so the confidence is 1/2 at any temperature: all are equal, and 1 is kept."""
    records = Records(torch.zeros(50, 2), torch.ones(50, dtype=torch.long), torch.zeros(50, dtype=torch.bool))
    assert fit(records, bins=15).temperatures == [1.0, 1.0]


def test_s24_power_form_is_another_map():
    logits = torch.tensor([2.0, -1.0])
    assert torch.allclose(scaled(logits, 2.0), torch.sigmoid(logits / 2))
    assert torch.allclose(scaled(logits, 2.0, "power"), torch.sigmoid(logits).sqrt())
    confident = torch.sigmoid(torch.tensor(2.0))
    assert scaled(torch.tensor(2.0), 2.0) < confident < scaled(torch.tensor(2.0), 2.0, "power")


def test_s25_slots_after_an_accepted_stop_are_left_out():
    records = Records(torch.zeros(4, 3), torch.tensor([1, 1, 3, 0]), torch.tensor([True, False, False, False]))
    assert [int(records.counts(slot).sum()) for slot in (1, 2, 3)] == [4, 3, 3]
    judged = judge(records, fit(records, bins=10), bins=10)
    assert judged["n"] == [4, 3, 3]


@pytest.mark.case("CAL-04")
def test_a_slot_without_data_is_null_with_n_zero():
    records = Records(torch.zeros(3, 2), torch.ones(3, dtype=torch.long), torch.ones(3, dtype=torch.bool))
    fitted = fit(records, bins=15)
    judged = judge(records, fitted, bins=15)
    assert (fitted.n[1], fitted.ece_fitted[1], fitted.temperatures[1]) == (0, None, 1.0)
    assert (judged["n"][1], judged["ece_after"][1], judged["auc_after"][1], judged["brier_after"][1]) == (0,) + (
        None,
    ) * 3


def test_ece_by_hand():
    value, outcome = torch.tensor([0.1, 0.15, 0.9, 0.8]), torch.tensor([0.0, 1.0, 1.0, 1.0])
    assert ece(value, outcome, 2) == pytest.approx((abs(0.25 - 1) + abs(1.7 - 2)) / 4)
    assert ece(torch.ones(3), torch.ones(3), 15) == 0.0, "a confidence of one belongs to the last bin"


def test_auc_agrees_with_scikit_learn_ties_included():
    from sklearn.metrics import roc_auc_score

    generator = torch.Generator().manual_seed(0)
    value = torch.randint(0, 12, (500,), generator=generator) / 12
    outcome = (torch.rand(500, generator=generator) < value).float()
    assert auc(value, outcome) == pytest.approx(roc_auc_score(outcome.numpy(), value.numpy()))


def test_survival_is_the_running_product():
    records = synthetic(10)
    raw = torch.sigmoid(records.logits_NK)
    assert torch.allclose(survival(records)[:, 2], raw[:, 0] * raw[:, 1] * raw[:, 2])


def test_s25_the_interval_of_the_change_is_that_of_prompts_drawn_again():
    records, bins = synthetic(300), 15
    stopped = records.accepted_N == 7  # some slots say nothing
    records = Records(records.logits_NK, records.accepted_N, stopped)
    prompt_N = torch.arange(300) % 13 * 10  # names, not places
    fitted = fit(synthetic(5_000, seed=1), bins=bins)
    found = ece_change(records, prompt_N, fitted, bins=bins, resamples=40, seed=5)
    draws = torch.randint(13, (40, 13), generator=torch.Generator().manual_seed(5))
    changes = []
    for draw in draws.tolist():
        again = records.take(torch.cat([(prompt_N == prompt * 10).nonzero()[:, 0] for prompt in draw]))
        judged = judge(again, fitted, bins=bins)
        pairs = zip(judged["ece_before"], judged["ece_after"], strict=True)
        changes.append(sum(after - before for before, after in pairs) / 7)
    expected = torch.tensor(changes).double().quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    assert found == pytest.approx(expected, abs=1e-6) and found[0] < found[1]


def test_s25_few_prompts_cannot_tell_a_change():
    fitted = fit(synthetic(5_000, torch.full((7,), 1.05), seed=2), bins=15)
    low, high = ece_change(synthetic(200, torch.ones(7), seed=3), torch.arange(200) % 5, fitted, bins=15)
    assert low < 0 < high
    assert ece_change(synthetic(0), torch.arange(0), fitted, bins=15) is None
