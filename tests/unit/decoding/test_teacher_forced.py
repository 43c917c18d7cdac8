"""Teacher-forced acceptance equals what decoding would propose if it always drew the target's own tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pipeline.config import Draft
from pipeline.decoding.teacher_forced import acceptance_sums
from pipeline.draft.build import build_drafter
from pipeline.draft.derive import derive_config
from pipeline.speculative.losses import SlotStatistics
from pipeline.speculative.verify import Law
from pipeline.target import Target
from pipeline.training.metrics import TOTALS, measure
from tests.unit.decoding.toys import small_model


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sums_match_stepwise_proposals(temperature):
    target = Target(small_model(layers=4), layers=(0, 1))
    settings = Draft(block_size=3, layers=1, markov_rank=4, mask_token_id=96, vocabulary=40)
    config = derive_config(target.config.to_dict(), settings, target_layer_ids=(0, 1))
    rows = torch.arange(40) * 2
    drafter = build_drafter(config, seed=0, token_ids=rows).eval()
    with torch.no_grad():
        drafter.markov_head.markov_w2.weight.normal_(0.0, 1.0)
    prompt, output = [5, 9, 33, 2], [8, 2, 78, 4, 60, 6]  # all in the draft vocabulary
    law, ids = Law(temperature), torch.tensor([prompt + output])
    seen = target.forward(ids)
    target_TV = law.probs(target.frozen.logits(seen.last_hidden_BTD[0]))
    expected = [[0.0, 0] for _ in range(3)]
    for anchor in range(len(prompt), ids.shape[1] - 1):
        laws = []

        def follow(logits_BV, slot, anchor=anchor, laws=laws):
            laws.append(law.probs(logits_BV)[0])
            following = ids[0, min(anchor + slot + 1, ids.shape[1] - 1)]
            return torch.searchsorted(rows, following)[None], None

        state = drafter.start(1, 32, device="cpu", dtype=torch.float32)
        with torch.no_grad():
            drafter.observe(
                state, seen.taps_BTLD[:, :anchor], None, ids[:, :anchor], torch.arange(anchor)[None],
                torch.tensor([anchor]),
            )  # fmt: skip
            drafter.propose(state, ids[:, anchor], torch.tensor([anchor]), follow, target.frozen)
        for slot in range(3):
            if anchor + slot + 1 < ids.shape[1]:
                expected[slot][0] += float(torch.minimum(laws[slot], target_TV[anchor + slot, rows]).sum())
                expected[slot][1] += 1
    got = acceptance_sums(target, drafter, prompt, output, law)
    assert [count for _, count in got] == [count for _, count in expected] == [5, 4, 3]
    assert [total for total, _ in got] == pytest.approx([total for total, _ in expected], abs=1e-4)


@pytest.mark.case("EVA-08")
@pytest.mark.parametrize("layout", ["next_token", "fill_in"])
def test_a_perfect_draft_accepts_every_slot_the_first_one_included(layout):
    """Its states are the target's own at a + k - 1, whatever inputs the layout feeds; tau in training is K + 1."""
    block_size, target = 3, Target(small_model(layers=4), layers=(0, 1))

    class Perfect:
        config, rows, markov_w2 = SimpleNamespace(block_size=block_size, layout=layout), None, None

        def __call__(self, context, anchors, embed_VD):
            last = len(context.ids_T) - 1
            at_AK = (anchors.index_A[:, None] + torch.arange(block_size)).clamp(max=last)
            return SimpleNamespace(hidden_AKD=context.last_hidden_TD[at_AK], markov_AKr=None)

    sums = acceptance_sums(target, Perfect(), [5, 9, 33], [8, 2, 78, 4, 60, 6], Law(1.0))
    assert [total / count for total, count in sums] == pytest.approx([1.0] * block_size, abs=1e-5)
    slots = 4 * block_size
    batch = SimpleNamespace(
        anchors=SimpleNamespace(valid_AK=torch.ones(4, block_size, dtype=torch.bool)), slots_S=torch.arange(slots),
        labels_S=torch.zeros(slots, dtype=torch.long), teacher=None, tokens=0, keys=[],
    )  # fmt: skip
    zeros = torch.zeros(slots)
    totals = measure(batch, SlotStatistics(*[zeros] * 5), torch.ones(slots)).totals_N
    assert float(totals[TOTALS.index("tau")] / totals[TOTALS.index("blocks")]) == block_size + 1
