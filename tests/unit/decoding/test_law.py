"""The output law is the target's, through the engine's own round, for every policy that claims it (S20-S22, S26, S27).

Vocabulary 8, K = 4, a Markov-chain target and another chain as drafter, confidences that look at the drafted prefix.
10^5 rounds here, 10^6 under `make prove`.
"""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chi2

from pipeline.decoding.policies import Calibrated
from pipeline.decoding.rounds import Engine, FullBlock, Rows
from pipeline.speculative.scheduler import DIAGNOSTIC, Scheduler, SpsTable
from pipeline.speculative.verify import Law
from tests.unit.decoding.toys import NoCache, TableDrafter, TableTarget

V, K = 8, 4
STAIRS = SpsTable.of([1, 2, 3, 8, 16, 24, 40, 56], [10.0, 6.0, 6.0, 5.0, 3.0, 2.8, 2.0, 1.9])


class Grouped:
    """One scheduler per `size` rows: many small batches in one vectorised round."""

    def __init__(self, size, rows, **options):
        self.size = size
        self.schedulers = [Calibrated(Scheduler(**options)) for _ in range(rows // size)]

    def lengths(self, confidence_BK, rows, block_size, device):
        parts = confidence_BK.split(self.size)
        return torch.cat([
            scheduler.lengths(part, len(part), block_size, device)
            for scheduler, part in zip(self.schedulers, parts, strict=True)
        ])  # fmt: skip


def chain(seed, spread=1.0):
    return torch.randn(V, V, generator=torch.Generator().manual_seed(seed)) * spread


def confidence_of(anchors_B, tokens_BK):
    """Slot k's confidence depends on the token before it, as a real head's does: even ones promise much."""
    before_BK = torch.cat([anchors_B[:, None], tokens_BK[:, :-1]], dim=1)
    return torch.where(before_BK % 2 == 0, 2.5, -2.0)


def two_tokens(engine, rows, warm_up):
    """Play `warm_up` rounds, then return the anchor each row stands at and the next two tokens it puts out."""
    state = Rows(torch.zeros(rows, dtype=torch.long), torch.zeros(rows, dtype=torch.long), torch.arange(rows))
    everyone, start = torch.arange(rows), state.anchors_B
    pairs, filled = torch.zeros(rows, 2, dtype=torch.long), torch.zeros(rows, dtype=torch.long)
    for step in range(warm_up + 2):
        start = state.anchors_B if step == warm_up else start
        outcome = engine.play(state)
        tokens = torch.cat([outcome.tokens_BK, torch.zeros(rows, 1, dtype=torch.long)], 1)
        tokens[everyone, outcome.accepted_B] = outcome.token_B
        for place in range(2 if step >= warm_up else 0):
            new = (filled < 2) & (outcome.accepted_B >= place)
            pairs[everyone[new], filled[new]] = tokens[new, place]
            filled += new
        state = Rows(outcome.token_B, state.positions_B + outcome.accepted_B + 1, state.seeds_B)
    assert int(filled.min()) == 2
    return start, pairs


def p_values(anchors, pairs, probs_VV):
    """Chi-square p of the first token, and of both, given the anchor each row started from."""
    first = torch.bincount(anchors * V + pairs[:, 0], minlength=V * V).view(V, V).double()
    both = torch.bincount((anchors * V + pairs[:, 0]) * V + pairs[:, 1], minlength=V**3).view(V, V, V).double()
    of_anchor = torch.bincount(anchors, minlength=V).double()
    expected = of_anchor[:, None] * probs_VV
    return [
        chi_square(first, expected),
        chi_square(both, expected[:, :, None] * probs_VV),
    ]


def chi_square(seen, expected):
    assert not seen[expected == 0].any(), "a token of probability zero came out"
    live = expected > 4
    rest_seen, rest = seen[~live].sum(), expected[~live].sum()
    statistic = ((seen - expected)[live].square() / expected[live]).sum()
    cells = int(live.sum())
    if rest > 4:
        statistic, cells = statistic + (rest_seen - rest).square() / rest, cells + 1
    groups = int((expected.reshape(V, -1).sum(1) > 0).sum())
    return float(chi2.sf(float(statistic), cells - groups))


PLAIN = Law(1.0)


def law_of(policy, rows, *, law=PLAIN, warm_up=0, draft=None, vocabulary=None):
    target = chain(1)
    drafter = TableDrafter(chain(2) if draft is None else draft, K, vocabulary)
    drafter.confidence_of = confidence_of
    state = drafter.start(rows, 0, device=None, dtype=None)
    engine = Engine(TableTarget(target), NoCache(), law, drafter=drafter, state=state, policy=policy)
    anchors, pairs = two_tokens(engine, rows, warm_up)
    return p_values(anchors, pairs, law.probs(target).double())


@pytest.mark.prove
@pytest.mark.parametrize(
    ("name", "options", "warm_up"),
    [
        ("full", {}, 0),
        ("early_stop", {"sps": STAIRS}, 0),
        ("lagged_global", {"sps": STAIRS}, 3),
        ("static_length", {"length": 2}, 0),
        ("static_threshold", {"threshold": 0.6}, 0),
        ("static_threshold", {"threshold": 0.5, "slot": True}, 0),
    ],
)
def test_s21_s27_every_lossless_policy_keeps_the_targets_law(proof, name, options, warm_up):
    rows = proof.size(100_000, 1_000_000)
    found = law_of(Grouped(50, rows, policy=name, **options), rows, warm_up=warm_up)
    proof.note(
        f"{name} {options.get('slot', '')}: p of one and two tokens, {rows} rounds", [round(p, 3) for p in found]
    )
    assert min(found) > 1e-3


@pytest.mark.prove
@pytest.mark.parametrize("law", [Law(0.7), Law(1.0, top_p=0.8), Law(1.0, top_k=3), Law(1.3, top_p=0.9, top_k=5)])
def test_s20_temperature_top_p_and_top_k_keep_their_own_law(proof, law):
    assert min(law_of(FullBlock(), proof.size(50_000, 1_000_000), law=law)) > 1e-3


@pytest.mark.prove
def test_s30_a_draft_vocabulary_keeps_the_targets_law(proof):
    vocabulary = torch.tensor([0, 2, 3, 6])
    found = law_of(FullBlock(), proof.size(50_000, 1_000_000), draft=chain(3)[:, :4], vocabulary=vocabulary)
    assert min(found) > 1e-3


def leaking(policy, rows):
    """Paper App. A: whether slot 1 is worth verifying is decided by slot 2's confidence, which has seen slot 1's token.

    Alone, one draft never pays (10 -> 6 steps a second); two do if the second is nearly sure.
    """
    target = torch.zeros(V, V)
    drafter = TableDrafter(target, 2)
    drafter.confidence_of = lambda anchors_B, tokens_BK: torch.stack(
        [torch.zeros(len(anchors_B)), torch.where(tokens_BK[:, 0] < 4, 5.0, -5.0)], 1
    )
    state = drafter.start(rows, 0, device=None, dtype=None)
    engine = Engine(TableTarget(target), NoCache(), Law(1.0), drafter=drafter, state=state, policy=policy)
    anchors, pairs = two_tokens(engine, rows, 0)
    return min(p_values(anchors, pairs, torch.softmax(target, -1).double()))


def test_s27_the_unlagged_global_argmax_fails_this_very_test():
    rows = 1_000
    assert leaking(Grouped(1, rows, policy=DIAGNOSTIC, sps=STAIRS), rows) < 1e-12
    assert leaking(Grouped(1, rows, policy="early_stop", sps=STAIRS), rows) > 1e-3


@pytest.mark.case("EVA-01")
def test_a_draft_law_from_rounded_logits_is_caught():
    """Draws from a bf16 softmax but claims the fp32 one: the bias this file must be able to see."""

    class Rounded(TableDrafter):
        def propose(self, state, anchors_B, positions_B, sampler, frozen):
            kept = super().propose(state, anchors_B, positions_B, sampler, frozen)
            honest = torch.stack([torch.softmax(self.true_VD[row], -1) for row in
                                  torch.cat([anchors_B[:, None], kept.tokens_BK[:, :-1]], 1).unbind(1)], 1)  # fmt: skip
            return type(kept)(kept.tokens_BK, honest, kept.confidence_BK)

    rows, target = 20_000, chain(1)
    true = target + 60  # bf16 steps of 0.25 there; the claimed law is the target's own, so every draft is accepted
    drafter = Rounded(true.bfloat16().float(), K)
    drafter.true_VD = true
    state = drafter.start(rows, 0, device=None, dtype=None)
    engine = Engine(TableTarget(target), NoCache(), Law(1.0), drafter=drafter, state=state)
    anchors, pairs = two_tokens(engine, rows, 0)
    assert min(p_values(anchors, pairs, torch.softmax(target, -1).double())) < 1e-3
