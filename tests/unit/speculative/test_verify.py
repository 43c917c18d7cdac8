"""S20-S21: acceptance, residual, and the law of what comes out."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare

from pipeline.decoding.randoms import uniforms
from pipeline.speculative.verify import Drafted, Law, correction, draw, nucleus, verify

T = torch.tensor


def counts_fit(tokens, probs, size):
    seen = torch.bincount(tokens, minlength=size).double()
    live = probs > 0
    assert not seen[~live].any(), "a token of probability zero was emitted"
    return chisquare(seen[live].numpy(), (probs[live].double() / probs.double().sum() * len(tokens)).numpy()).pvalue


@pytest.mark.case("EVA-01")
@pytest.mark.case("EVA-03")
def test_one_slot_output_law_is_the_targets():
    """V = 5, a zero in p_t and one in p_d; bf16 logits upstream do not matter: both sides use one fp32 tensor."""
    n = 200_000
    p_t, p_d = T([0.5, 0.2, 0.0, 0.25, 0.05]), T([0.1, 0.3, 0.3, 0.0, 0.3])
    u = uniforms(torch.arange(n), torch.zeros(n, dtype=torch.long), 3)
    tokens_B1 = draw(p_d.expand(n, 5), u[:, 0])[:, None]
    verdict = verify(
        Drafted(tokens_B1, p_d.expand(n, 1, 5)), p_t.log().expand(n, 2, 5).reshape(-1, 5),
        lengths_B=torch.ones(n, dtype=torch.long), law=Law(1.0), accept_BK=u[:, 1:2], final_B=u[:, 2],
    )  # fmt: skip
    first = torch.where(verdict.accepted_B == 1, tokens_B1[:, 0], verdict.token_B)
    freq = torch.bincount(first, minlength=5) / n
    sigma = (p_t * (1 - p_t) / n).sqrt()
    assert ((freq - p_t).abs() <= 3 * sigma + 1e-12).all()
    expected = torch.minimum(p_t, p_d).sum()
    assert abs(verdict.accepted_B.float().mean() - expected) < 0.005


def test_equal_laws_always_accept_and_never_divide_by_zero():
    n = 10_000
    p = T([0.3, 0.0, 0.7])
    u = uniforms(torch.arange(n), torch.zeros(n, dtype=torch.long), 3)
    tokens = draw(p.expand(n, 3), u[:, 0])[:, None]
    verdict = verify(
        Drafted(tokens, p.expand(n, 1, 3)), p.log().expand(n, 2, 3).reshape(-1, 3),
        lengths_B=torch.ones(n, dtype=torch.long), law=Law(1.0), accept_BK=u[:, 1:2], final_B=u[:, 2],
    )  # fmt: skip
    assert verdict.accepted_B.min() == 1
    assert counts_fit(verdict.token_B, p, 3) > 1e-3
    residual = correction(
        Drafted(tokens, p.expand(n, 1, 3)), p.expand(n, 3), T([0]).expand(n), rejected_B=T([True]).expand(n)
    )
    assert torch.equal(residual, p.expand(n, 3)), "zero mass falls back to p_t"


def test_a_cut_block_ends_in_the_targets_own_law_not_in_the_residual():
    """Scheduled length 1 of 2, accepted: the bonus comes from p_t although the draft holds another slot."""
    n = 50_000
    p_t = T([0.6, 0.4])
    drafted = Drafted(torch.zeros(n, 2, dtype=torch.long), T([[0.5, 0.5], [1.0, 0.0]]).expand(n, 2, 2))
    u = uniforms(torch.arange(n), torch.zeros(n, dtype=torch.long), 3)
    verdict = verify(
        drafted, p_t.log().expand(n, 2, 2).reshape(-1, 2), lengths_B=torch.ones(n, dtype=torch.long), law=Law(1.0),
        accept_BK=u[:, :2], final_B=u[:, 2],
    )  # fmt: skip
    assert verdict.accepted_B.min() == 1
    assert counts_fit(verdict.token_B, p_t, 2) > 1e-3


def test_draft_vocabulary_residual_keeps_the_mass_outside():
    """S30: p_d is zero outside D = {1, 3}; the residual holds all of p_t there."""
    drafted = Drafted(T([[3]]), T([[[0.9, 0.1]]]), T([1, 3]))
    weights = correction(drafted, T([[0.4, 0.3, 0.2, 0.1]]), T([0]), rejected_B=T([True]))
    assert torch.allclose(weights, T([[0.4, 0.0, 0.2, 0.0]]))
    assert torch.allclose(drafted.chance_BK(), T([[0.1]]))


def test_rows_are_judged_at_their_own_scheduled_lengths():
    logits = torch.full((1 + 3 + 4, 6), -9.0)
    best = [5, 1, 2, 4, 0, 1, 2, 3]
    logits[torch.arange(8), T(best)] = 9.0
    verdict = verify(
        Drafted(T([[0, 0, 0], [1, 2, 0], [0, 1, 2]])), logits, lengths_B=T([0, 2, 3]), law=Law(0.0),
        accept_BK=torch.zeros(3, 3), final_B=torch.zeros(3),
    )  # fmt: skip
    assert verdict.accepted_B.tolist() == [0, 2, 3]
    assert verdict.token_B.tolist() == [5, 4, 3]


def test_greedy_shortcut_equals_one_hot_verification():
    generator = torch.Generator().manual_seed(0)
    logits_NV = torch.randn(40 * 4, 5, generator=generator)
    tokens = torch.randint(0, 5, (40, 3), generator=generator)
    lengths, zeros = torch.full((40,), 3), torch.rand(40, 3, generator=generator)
    got = verify(Drafted(tokens), logits_NV, lengths_B=lengths, law=Law(0.0), accept_BK=zeros, final_B=zeros[:, 0])
    hot = (Law(0.0).probs(logits_NV) + 1e-38).log()
    twin = verify(Drafted(tokens), hot, lengths_B=lengths, law=Law(1.0), accept_BK=zeros, final_B=zeros[:, 0])
    assert torch.equal(got.accepted_B, twin.accepted_B) and torch.equal(got.token_B, twin.token_B)


@pytest.mark.case("EVA-02")
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_drawn_tokens_follow_the_tempered_law(temperature):
    logits = T([1.0, 0.2, -0.5, 0.9])
    n = 40_000
    law = Law(temperature)
    drawn = draw(law.probs(logits.expand(n, 4)), uniforms(torch.arange(n), torch.full((n,), 7), 1)[:, 0])
    if temperature == 0.0:
        assert (drawn == 0).all()
        return
    assert counts_fit(drawn, torch.softmax(logits / temperature, 0), 4) > 1e-3


def test_draw_never_returns_a_token_without_weight_even_at_the_ends():
    weights = T([[0.0, 0.3, 0.0, 0.7, 0.0]]).expand(3, 5)
    assert draw(weights, T([0.0, 0.5, 1.0 - 2**-24])).tolist() == [1, 3, 3]


def test_top_k_and_top_p_keep_what_they_name():
    probs = T([[0.1, 0.5, 0.15, 0.25]])
    assert torch.allclose(Law(1.0, top_k=2).probs(probs.log()), T([[0.0, 2 / 3, 0.0, 1 / 3]]))
    assert torch.allclose(nucleus(probs, 0.5), T([[0.0, 1.0, 0.0, 0.0]]))
    assert torch.allclose(nucleus(probs, 0.51), T([[0.0, 2 / 3, 0.0, 1 / 3]]))
    assert torch.allclose(nucleus(probs, 0.0), T([[0.0, 1.0, 0.0, 0.0]])), "the most likely token always stays"
