"""What a block sees and where it sits (S1–S3, S5), for every member that drafts a block in one forward."""

from __future__ import annotations

import pytest
import torch

from pipeline.draft.attention import AnchorPlan, trim, visible_ranges
from pipeline.draft.interface import Anchors, Context
from tests.unit.draft.drafts import FAMILY, anchors_at, frozen, member, packed

LENGTHS = (9, 6, 11)
INDEX = [4, 1, 8, 9, 13, 25, 16, 20]


def forward(name: str, context: Context, anchors: Anchors, attention: str = "sdpa") -> torch.Tensor:
    drafter = member(name)
    drafter.configure(attention=attention, device=torch.device("cpu"))
    return drafter(context, anchors, frozen().embed_VD).hidden_AKD


@pytest.mark.parametrize("name", FAMILY)
def test_S2_nothing_at_or_after_the_anchor_reaches_the_block(name: str) -> None:
    """Change every token and hidden state that block must not see: its output stays, bit for bit in its own row."""
    context = packed(LENGTHS)
    for place in (4, 13, 20):
        anchors = anchors_at(context, [place])
        before = forward(name, context, anchors)
        changed = packed(LENGTHS, seed=99)
        seen = (torch.arange(26) < place) & (context.document_T == context.document_T[place])
        for field in ("ids_T", "taps_TLD", "last_hidden_TD"):
            getattr(changed, field)[seen] = getattr(context, field)[seen]
        torch.testing.assert_close(forward(name, changed, anchors), before)


@pytest.mark.parametrize("name", [name for name in FAMILY if "no-taps" not in name])
def test_S2_the_token_just_before_the_anchor_is_seen_by_every_slot(name: str) -> None:
    context = packed(LENGTHS)
    anchors = anchors_at(context, [13])
    before = forward(name, context, anchors)
    context.taps_TLD[12] += 1.0
    context.last_hidden_TD[12] += 1.0
    assert ((forward(name, context, anchors) - before).abs().amax(-1) > 1e-4).all()


@pytest.mark.parametrize("name", FAMILY)
def test_S2_blocks_do_not_see_each_other(name: str) -> None:
    context = packed(LENGTHS)
    together = forward(name, context, anchors_at(context, INDEX))
    for row, place in enumerate(INDEX):
        torch.testing.assert_close(forward(name, context, anchors_at(context, [place]))[0], together[row])


@pytest.mark.parametrize("name", [name for name in FAMILY if name.startswith(("dspark", "dflash"))])
def test_S2_slots_of_a_block_see_each_other_both_ways(name: str) -> None:
    """The last slot's input is changed through the mask row of the embedding: the first slot's state moves."""
    context, drafter, head = packed(LENGTHS), member(name), frozen()
    anchors = anchors_at(context, [5])
    before = drafter(context, anchors, head.embed_VD).hidden_AKD
    head.embed_VD[drafter.config.mask_token_id] += 1.0
    assert (drafter(context, anchors, head.embed_VD).hidden_AKD - before)[0, 0].abs().max() > 1e-3


@pytest.mark.parametrize("name", ["dspark", "dspark-no-taps", "dflash-fill-in"])
def test_no_taps_control_reads_only_its_anchor(name: str) -> None:
    context, other = packed(LENGTHS), packed(LENGTHS, seed=5)
    anchors = anchors_at(context, INDEX)
    same = torch.allclose(forward(name, context, anchors), forward(name, other, anchors))
    assert same == (name == "dspark-no-taps")


@pytest.mark.case("NUM-05")
def test_S2_mask_equals_its_definition_entry_by_entry() -> None:
    """Two rows, three anchors, block 4: the dense mask against loops that spell the ruling out."""
    context = packed((7, 9))
    anchors = anchors_at(context, [3, 10, 14])
    mask = AnchorPlan.build(*visible_ranges(context.document_T, anchors.index_A), backend="eager").dense_mask(4, 16, 4)
    for q in range(12):
        anchor = int(anchors.index_A[q // 4])
        for kv in range(16 + 12):
            if kv < 16:
                right = kv < anchor and context.document_T[kv] == context.document_T[anchor]
            else:
                right = (kv - 16) // 4 == q // 4
            assert bool(mask[q, kv]) == bool(right), (q, kv)


@pytest.mark.parametrize("index", [INDEX, [0], [0, 9, 15], [25], list(range(26)), [7, 7, 3]])
def test_shared_prefix_attention_equals_the_dense_twin(index: list[int]) -> None:
    """Forward and every gradient, in fp64: anchors out of order, at a document's first token, repeated, alone."""
    context = packed(LENGTHS, dtype=torch.float64)
    anchors = anchors_at(context, index)
    results = []
    for attention in ("sdpa", "eager"):
        drafter = member("dspark").double()
        drafter.configure(attention=attention, device=torch.device("cpu"))
        out = drafter(context, anchors, frozen(dtype=torch.float64).embed_VD)
        (out.hidden_AKD.sin().sum() + out.confidence_AK.sum()).backward()
        results.append([out.hidden_AKD, *(p.grad for p in drafter.parameters() if p.grad is not None)])
    for fast, plain in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-9, atol=1e-10)


def test_trim_keeps_exactly_the_positions_some_anchor_sees() -> None:
    kept, start, stop = trim(torch.tensor([0, 0, 9, 15]), torch.tensor([2, 4, 9, 18]), 26)
    assert kept.tolist() == [0, 1, 2, 3, 15, 16, 17]
    assert (start.tolist(), stop.tolist()) == ([0, 0, 4, 4], [2, 4, 4, 7])


@pytest.mark.case("NUM-06")
@pytest.mark.parametrize("name", FAMILY)
def test_rows_of_mixed_length_stay_finite_and_equal_the_row_alone(name: str) -> None:
    long_and_short, short = packed((40, 6)), packed((6,))
    for field in ("ids_T", "taps_TLD", "last_hidden_TD"):
        getattr(short, field)[:] = getattr(long_and_short, field)[40:]
    drafter, head = member(name), frozen()
    both = drafter(long_and_short, anchors_at(long_and_short, [5, 9, 22, 38, 41, 43, 44, 45]), head.embed_VD)
    both.hidden_AKD.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in drafter.parameters() if p.grad is not None)
    alone = drafter(short, anchors_at(short, [1, 3, 4, 5]), head.embed_VD)
    torch.testing.assert_close(both.hidden_AKD[4:], alone.hidden_AKD)


@pytest.mark.case("NUM-11")
@pytest.mark.parametrize("name", FAMILY)
def test_an_anchor_on_the_first_token_has_an_empty_context_not_the_last_token(name: str) -> None:
    context = packed(LENGTHS)
    anchors = anchors_at(context, [0, 9])
    before = forward(name, context, anchors)
    assert torch.isfinite(before).all()
    other = packed(LENGTHS, seed=42)
    torch.testing.assert_close(forward(name, other, anchors), before)


@pytest.mark.parametrize("name", FAMILY)
def test_no_anchors_still_reach_every_parameter_with_zero_gradient(name: str) -> None:
    """A micro-batch that only fills up a rank must reduce the same gradients as the others."""
    context, drafter = packed(LENGTHS), member(name)
    out = drafter(context, anchors_at(context, []), frozen().embed_VD)
    total = out.hidden_AKD.sum() + out.confidence_AK.sum()
    if out.markov_AKr is not None:
        total = total + out.markov_AKr.sum() + (drafter.markov_w2.sum() * 0.0)
    total.backward()
    for parameter_name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert not parameter.grad.any(), parameter_name


def test_S1_layouts_feed_the_anchor_then_masks_and_predict_K_slots() -> None:
    for name, inputs in (("dflash", 4), ("dflash-fill-in", 5)):
        drafter = member(name)
        ids = drafter.block_ids(torch.tensor([7, 8]))
        assert ids.tolist() == [[7] + [49] * (inputs - 1), [8] + [49] * (inputs - 1)]
        context = packed(LENGTHS)
        assert drafter(context, anchors_at(context, [4]), frozen().embed_VD).hidden_AKD.shape == (1, 4, 32)


def test_S5_a_block_follows_its_own_document_positions() -> None:
    """The same document at another place of the packed stream gives the same block."""
    first, second = packed((8, 12)), packed((12,))
    for field in ("ids_T", "taps_TLD"):
        getattr(second, field)[:] = getattr(first, field)[8:]
    one = forward("dspark", first, anchors_at(first, [15]))
    torch.testing.assert_close(one, forward("dspark", second, anchors_at(second, [7])))
    second.positions_T[7:] += 3  # a gap between context and anchor is another relative distance
    assert not torch.allclose(one, forward("dspark", second, anchors_at(second, [7])), atol=1e-3)


@pytest.mark.parametrize("block", [1, 7])
def test_one_slot_blocks_work(block: int) -> None:
    context = packed(LENGTHS)
    drafter = member("dspark-rnn", block_size=block)
    out = drafter(context, anchors_at(context, INDEX, block=block), frozen().embed_VD)
    assert out.hidden_AKD.shape == (8, block, 32) and out.markov_AKr.shape == (8, block, 6)
