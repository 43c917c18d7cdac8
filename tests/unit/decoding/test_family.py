"""Real drafters of the family in the batched engine: rows do not touch each other, whatever the batch (S20-S23)."""

from __future__ import annotations

import pytest
import torch

from pipeline.config import Draft
from pipeline.decoding.engine import decode
from pipeline.draft.build import build_drafter
from pipeline.draft.derive import derive_config
from pipeline.draft.interface import Anchors, Context
from pipeline.speculative.acceptance import Rounds, accepted_length
from pipeline.target import Target
from tests.unit.decoding.toys import small_model

V = 24
KINDS = {
    "dspark": {"markov_rank": 4},
    "gated": {"markov": "gated", "markov_rank": 4},
    "rnn": {"markov": "rnn", "markov_rank": 4},
    "dflash": {"kind": "dflash", "markov": "none", "layout": "fill_in", "confidence": False},
    "eagle3": {"kind": "eagle3", "markov": "none", "mask_token_id": None, "confidence": False},
    "mtp": {"kind": "mtp", "markov": "none", "mask_token_id": None, "confidence": False},
    "medusa": {"kind": "medusa", "markov": "none", "mask_token_id": None, "confidence": False},
    "draft vocabulary": {"markov_rank": 4, "vocabulary": 15},
    "no taps": {"markov_rank": 4, "taps": False},
    "one slot": {"markov_rank": 4, "block_size": 1},
}


def made(options):
    target = Target(small_model(layers=4, vocabulary=V), layers=(0, 1, 2))
    settings = Draft(**{"block_size": 3, "layers": 1, "mask_token_id": V - 1, **options})
    config = derive_config(target.config.to_dict(), settings, target_layer_ids=(0, 1, 2))
    rows = None if settings.vocabulary is None else torch.arange(0, V, 1)[: settings.vocabulary]
    drafter = build_drafter(config, seed=0, token_ids=rows).eval()
    with torch.no_grad():  # strong random weights: proposals that vary with what the drafter has seen
        for parameter in drafter.parameters():
            parameter.mul_(6.0) if parameter.ndim > 1 else None
    return target, drafter


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_outputs_rounds_and_tau_do_not_depend_on_the_batch(kind):
    target, drafter = made(KINDS[kind])
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, V, (length,), generator=generator).tolist() for length in (3, 9, 5, 12, 4, 7, 10)]
    limits = [9, 30, 12, 18, 25, 14, 21]

    def run(batch_size, with_drafter=True):
        return decode(
            target, prompts, drafter=drafter if with_drafter else None, temperature=0.0, max_new_tokens=limits,
            stop_ids={2}, batch_size=batch_size, seeds=range(7),
        )  # fmt: skip

    own = [generation.ids for generation in run(7, with_drafter=False)]
    alone = run(1)
    assert [generation.ids for generation in alone] == own
    steps = [[(step.scheduled, step.accepted, step.bonus) for step in generation.rounds] for generation in alone]
    assert sum(accepted for row in steps for _, accepted, _ in row) > 0, "nothing accepted: this test would be blind"
    for batch_size in (4, 16):
        together = run(batch_size)
        assert [generation.ids for generation in together] == own
        assert accepted_length(rounds_of(together)) == accepted_length(rounds_of(alone))
        for one, other in zip(alone, together, strict=True):
            assert len(one.rounds) == len(other.rounds)
            for a, b in zip(one.rounds, other.rounds, strict=True):
                assert a.confidence is None or a.confidence == pytest.approx(b.confidence, abs=1e-3)


def rounds_of(generations):
    return Rounds.of([[(s.scheduled, s.accepted, s.bonus) for s in generation.rounds] for generation in generations])


def test_sampled_outputs_do_not_depend_on_the_batch():
    target, drafter = made(KINDS["dspark"])
    prompts = [[1, 5, 7], [3, 3, 9, 11, 0], [8, 4]]

    def run(batch_size):
        got = decode(
            target, prompts, drafter=drafter, temperature=1.0, max_new_tokens=25, stop_ids=(), batch_size=batch_size,
            seeds=[5, 6, 7],
        )  # fmt: skip
        return [generation.ids for generation in got]

    assert run(1) == run(3) == run(2)


@pytest.mark.parametrize("kind", [kind for kind, options in KINDS.items() if options.get("confidence", True)])
def test_S19_recorded_confidences_are_those_of_a_training_forward_over_the_text_that_came_out(kind):
    """What STS is fitted on is what training taught: same anchors, positions and previous tokens."""
    target, drafter = made(KINDS[kind])
    prompts = [[1, 5, 7], [3, 3, 9, 11, 0], [8, 4]]
    generations = decode(
        target, prompts, drafter=drafter, temperature=1.0, max_new_tokens=25, stop_ids=(), batch_size=2, seeds=range(3)
    )
    compared = 0
    for prompt, generation in zip(prompts, generations, strict=True):
        ids_T = torch.tensor([*prompt, *generation.ids])
        seen, places = target.forward(ids_T[None]), torch.arange(len(ids_T))
        context = Context(ids_T, places, torch.zeros_like(ids_T), seen.taps_BTLD[0], seen.last_hidden_BTD[0])
        anchor = len(prompt)
        for step in generation.rounds:
            index_A = torch.tensor([anchor])
            at_AK = (index_A[:, None] + torch.arange(step.scheduled)).clamp(max=len(ids_T) - 1)
            with torch.no_grad():
                taught = drafter(
                    context, Anchors(index_A, ids_T[at_AK], torch.ones_like(at_AK, dtype=torch.bool)),
                    target.frozen.embed_VD,
                ).confidence_AK  # fmt: skip
            # Slot k reads the token before it, which is in the text only if it was accepted (and not cut off).
            known = min(step.accepted + 1, step.scheduled, len(ids_T) - anchor)
            assert step.confidence[:known] == pytest.approx(taught[0, :known].tolist(), rel=1e-3, abs=1e-3)
            compared += known
            anchor += step.accepted + step.bonus
    assert compared > len([step for generation in generations for step in generation.rounds]) or kind == "one slot"
