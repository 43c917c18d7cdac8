"""What is kept of the target's distribution (S11): exact where it says so, bounded where it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pipeline.frozen import Frozen
from pipeline.shards.teacher import encode_logits, surrogate, top
from tests.unit.shards.cache import spec_of


def head(vocabulary: int = 1003, width: int = 32, *, dtype: torch.dtype = torch.float32, **options: float) -> Frozen:
    weight = torch.randn(vocabulary, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    return Frozen(weight, weight, torch.ones(width), None, **options)


def hidden(rows: int, width: int = 32, scale: float = 0.7) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(2)) * scale


def encoded_law(states: Tensor, frozen: Frozen, kept: int) -> tuple[Tensor, dict[str, Tensor]]:
    spec = spec_of(logits="topk", topk=kept, vocab_size=frozen.vocab_size)
    encoded, finite = encode_logits(states, frozen, spec)
    assert finite.all()
    law = surrogate(encoded["logits.ids"], encoded["logits.logprobs"], encoded["logits.tail"], frozen.vocab_size)
    return law, encoded


@pytest.mark.parametrize("width", [1003, 2048, 4096, 40])
@pytest.mark.parametrize("count", [1, 16, 31])
def test_top_equals_torch_topk(width: int, count: int) -> None:
    values = torch.randn(50, width, generator=torch.Generator().manual_seed(0))
    values[0] = 1.0  # all ties
    values[1, -1] = 9.0  # in the columns left over by the groups
    ours, columns = top(values, count)
    assert torch.equal(ours, values.topk(count, -1).values)
    assert torch.equal(values.gather(1, columns), ours)
    assert all(len(set(row)) == count for row in columns.tolist())


@pytest.mark.parametrize("kept", [4, 16, 64, 1003])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_surrogate_error_is_bounded_by_the_tail_s11(kept: int, softcap: float | None) -> None:
    frozen = head(logit_softcap=softcap)
    states = hidden(60)
    exact = frozen.logits(states).softmax(-1)
    law, encoded = encoded_law(states, frozen, kept)
    tail = encoded["logits.tail"].exp()
    true_tail = 1 - exact.double().gather(1, encoded["logits.ids"].long()).sum(-1)
    assert torch.allclose(tail.double(), true_tail, atol=1e-6)
    entropy = -(exact * exact.log()).sum(-1)
    rounding = 2.0**-12 * entropy * 1.1 + 1e-6
    assert ((law.sum(-1) - 1).abs() <= 2 * rounding).all()
    distance = (law - exact).abs().sum(-1) / 2
    inner = (exact - law).abs()
    inner.scatter_(1, encoded["logits.ids"].long(), 0.0)
    assert (distance <= inner.sum(-1) / 2 + rounding).all()
    assert (distance <= tail + rounding).all()


def test_surrogate_bound_carries_over_to_any_draft_law_s11() -> None:
    """|TV(p, q) - TV(p', q)| <= m for every q, and so for c*."""
    frozen, states = head(), hidden(40)
    exact = frozen.logits(states).softmax(-1)
    law, encoded = encoded_law(states, frozen, 16)
    for seed in range(3):
        noise = torch.randn(exact.shape, generator=torch.Generator().manual_seed(seed))
        draft = (exact.log() + noise).softmax(-1)
        difference = ((exact - draft).abs().sum(-1) - (law - draft).abs().sum(-1)).abs() / 2
        assert (difference <= encoded["logits.tail"].exp() + 1e-3).all()


def test_tiny_tails_are_not_lost_in_one_minus_sum() -> None:
    states = hidden(8, scale=8.0)
    _, encoded = encoded_law(states, head(), 64)
    exact = head().logits(states).double().log_softmax(-1)
    exact.scatter_(1, encoded["logits.ids"].long(), -torch.inf)
    reference = exact.logsumexp(-1)
    assert reference.min() < -20
    assert torch.allclose(encoded["logits.tail"].double(), reference, rtol=1e-4)


def test_bf16_heads_give_logits_finer_than_bf16() -> None:
    """A bf16 logit of 20 is off by up to 0.06; the kept ones are recomputed from fp32 products."""
    frozen = head(dtype=torch.bfloat16)
    states = hidden(64, scale=2.0).to(torch.bfloat16)
    exact = frozen.to(dtype=torch.float32).logits(states.float()).log_softmax(-1)
    assert (frozen.logits(states).log_softmax(-1) - exact).abs().max() < 2e-3
    assert (frozen.rough_logits(states).log_softmax(-1) - exact).abs().max() > 1e-2
    _, encoded = encoded_law(states, frozen, 16)
    kept = exact.gather(1, encoded["logits.ids"].long())
    assert (encoded["logits.logprobs"].float() - kept).abs().max() < 1e-2  # fp16 of numbers up to 30


@pytest.mark.parametrize("logits", ["topk", "last_hidden", "full"])
def test_parts_do_not_depend_on_how_rows_are_chunked(logits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen, states = head(), hidden(50)
    spec = spec_of(logits=logits, vocab_size=1003, topk=8)
    whole, _ = encode_logits(states, frozen, spec)
    pieces = [encode_logits(part, frozen, spec)[0] for part in states.split(7)]
    for name, tensor in whole.items():
        assert torch.allclose(torch.cat([piece[name] for piece in pieces]).float(), tensor.float(), atol=1e-5), name


def test_last_hidden_is_exact_in_the_targets_dtype() -> None:
    states = hidden(9)
    encoded, _ = encode_logits(states, head(), spec_of(logits="last_hidden", dtype="float32"))
    assert torch.equal(encoded["logits.hidden"], states)


def test_rows_without_positions_and_bad_rows() -> None:
    spec = spec_of(logits="topk", vocab_size=1003, topk=8)
    encoded, finite = encode_logits(hidden(0), head(), spec)
    assert encoded["logits.ids"].shape == (0, 8) and finite.shape == (0,)
    states = hidden(3)
    states[1, 0] = torch.inf
    for logits in ("topk", "last_hidden", "full"):
        assert encode_logits(states, head(), replace(spec, logits=logits))[1].tolist() == [True, False, True]


def test_wide_vocabularies_use_32_bit_ids() -> None:
    frozen = head(70_000, 8)
    encoded, _ = encode_logits(hidden(2, 8), frozen, spec_of(logits="topk", vocab_size=70_000, topk=4))
    assert encoded["logits.ids"].dtype == torch.int32
    small, _ = encode_logits(hidden(2), head(), spec_of(logits="topk", vocab_size=1003, topk=4))
    assert small["logits.ids"].dtype == torch.uint16
