"""Decoding computes what training taught: the same states, biases and confidences, step by step (S10, S18, S30)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipeline.draft.interface import Anchors, Context, Drafter, Proposal
from tests.unit.draft.drafts import FAMILY, VOCAB, Head, anchors_at, frozen, logits, member, packed

LENGTHS = (9, 6, 11)
PLACES = [4, 11, 22]  # one anchor per document, at local positions 4, 2, 7


class Recorder:
    """A greedy sampler that keeps the logits it was shown."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, logits_BV: Tensor, k: int) -> tuple[Tensor, Tensor | None]:
        assert k == len(self.seen)
        self.seen.append(logits_BV)
        return logits_BV.argmax(-1), logits_BV.softmax(-1)


def rows_of(context: Context) -> list[Context]:
    return [
        Context(*(getattr(context, f)[context.document_T == d] for f in context.__dataclass_fields__))
        for d in context.document_T.unique().tolist()
    ]


def observe(drafter: Drafter, state: object, rows: list[Context], spans: list[tuple[int, int]], head: Head) -> None:
    """Feed row b's tokens from … to − 1, padded to the longest, as an engine does after a verification."""
    width = max(b - a for a, b in spans)

    def padded(field: str) -> Tensor:
        out = [getattr(row, field)[a:b] for row, (a, b) in zip(rows, spans, strict=True)]
        return torch.stack([torch.cat([x, x.new_full((width - len(x), *x.shape[1:]), 9)]) for x in out])

    drafter.observe(
        state,
        padded("taps_TLD"),
        padded("last_hidden_TD"),
        padded("ids_T"),
        padded("positions_T"),
        torch.tensor([b - a for a, b in spans]),
        frozen=head,
    )


def decode(drafter: Drafter, context: Context, head: Head, *, pieces: int = 1) -> tuple[Proposal, Recorder]:
    """Observe each document up to its anchor in `pieces` uneven calls, then propose."""
    rows, local = rows_of(context), [int(context.positions_T[p]) for p in PLACES]
    state = drafter.start(3, 32, device="cpu", dtype=torch.float32)
    for i in range(pieces):
        observe(drafter, state, rows, [(n * i // pieces, n * (i + 1) // pieces) for n in local], head)
    recorder = Recorder()
    return drafter.propose(state, context.ids_T[PLACES], torch.tensor(local), recorder, head), recorder


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("pieces", [1, 3])
def test_S18_teacher_forced_training_equals_step_decoding(name: str, pieces: int) -> None:
    """Train on the tokens the drafter drew: logits, confidences and draws of all slots are those of decoding."""
    context, drafter, head = packed(LENGTHS), member(name), frozen()
    proposal, recorder = decode(drafter, context, head, pieces=pieces)
    drawn = torch.cat([context.ids_T[PLACES][:, None], proposal.tokens_BK[:, :-1]], dim=1)
    anchors = Anchors(torch.tensor(PLACES), drawn, torch.ones(3, 4, dtype=torch.bool))
    taught = logits(drafter, context, anchors, head)
    torch.testing.assert_close(torch.stack(recorder.seen, 1), taught, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(proposal.probs_BKV, taught.softmax(-1), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(
        proposal.confidence_BK, drafter(context, anchors, head.embed_VD).confidence_AK, rtol=1e-4, atol=1e-4
    )
    assert torch.equal(proposal.tokens_BK, drafter.target_ids(taught.argmax(-1)))


@pytest.mark.parametrize("name", FAMILY)
def test_rejected_tokens_leave_no_trace(name: str) -> None:
    """Observe too far, lower each row's length by its own amount, go on: as if it had never happened."""
    context, drafter, head = packed(LENGTHS), member(name), frozen()
    wrong = packed(LENGTHS, seed=77)
    plain, _ = decode(drafter, context, head)
    local = [int(context.positions_T[p]) for p in PLACES]
    kept = [2, 2, 5]
    state = drafter.start(3, 32, device="cpu", dtype=torch.float32)
    observe(drafter, state, rows_of(context), [(0, n) for n in kept], head)
    observe(drafter, state, rows_of(wrong), [(k, k + 3) for k in kept], head)
    state.lengths_B -= 3
    observe(drafter, state, rows_of(context), list(zip(kept, local, strict=True)), head)
    proposal = drafter.propose(state, context.ids_T[PLACES], torch.tensor(local), Recorder(), head)
    torch.testing.assert_close(proposal.probs_BKV, plain.probs_BKV)
    assert torch.equal(proposal.tokens_BK, plain.tokens_BK)


@pytest.mark.parametrize("name", FAMILY)
def test_a_row_decodes_the_same_in_another_slot_and_after_a_move(name: str) -> None:
    context, drafter, head = packed(LENGTHS), member(name), frozen()
    plain, _ = decode(drafter, context, head)
    row, local = rows_of(context)[2], int(context.positions_T[PLACES[2]])
    state = drafter.start(4, 32, device="cpu", dtype=torch.float32)
    slot = torch.tensor([3])
    drafter.observe(
        state,
        row.taps_TLD[None, :local],
        row.last_hidden_TD[None, :local],
        row.ids_T[None, :local],
        row.positions_T[None, :local],
        torch.tensor([local]),
        rows_B=slot,
        frozen=head,
    )
    state.move(3, 1)
    for rows in (slot, torch.tensor([1])):
        alone = drafter.propose(state, context.ids_T[PLACES[2:]], torch.tensor([local]), Recorder(), head, rows_B=rows)
        torch.testing.assert_close(alone.probs_BKV, plain.probs_BKV[2:], rtol=1e-4, atol=1e-6)


def test_a_full_state_is_an_error_not_a_wrap_around() -> None:
    context, drafter = packed((9,)), member("dspark")
    state = drafter.start(1, 8, device="cpu", dtype=torch.float32)
    with pytest.raises(IndexError, match="holds 8 positions, 9 are needed"):
        observe(drafter, state, [context], [(0, 9)], frozen())


def test_S30_draft_tokens_are_target_ids_of_the_draft_vocabulary() -> None:
    context, drafter, head = packed(LENGTHS), member("dspark-reduced"), frozen()
    proposal, recorder = decode(drafter, context, head)
    assert recorder.seen[0].shape == (3, 12) and proposal.probs_BKV.shape == (3, 4, 12)
    allowed = set(range(2, 38, 3))
    assert set(proposal.tokens_BK.flatten().tolist()) <= allowed
    ids = proposal.probs_BKV.argmax(-1)
    assert torch.equal(proposal.tokens_BK, ids * 3 + 2)
    assert drafter.t2d.nonzero().flatten().tolist() == sorted(allowed)
    assert drafter.markov_head.markov_w1.weight.shape == (VOCAB, 6)
    assert drafter.markov_w2.shape == (12, 6)


def test_sampler_may_return_no_distribution() -> None:
    context, drafter, head = packed(LENGTHS), member("dspark"), frozen()
    state = drafter.start(1, 8, device="cpu", dtype=torch.float32)
    observe(drafter, state, [context], [(0, 4)], head)
    proposal = drafter.propose(
        state, context.ids_T[4:5], torch.tensor([4]), lambda logits_BV, k: (logits_BV.argmax(-1), None), head
    )
    assert proposal.probs_BKV is None and proposal.tokens_BK.shape == (1, 4)


def test_bf16_decoding_stays_close_to_fp32() -> None:
    """Same greedy laws within bf16's rounding, with the cache, the heads and the state in bf16."""
    context, drafter, head = packed(LENGTHS), member("dspark", spread=0.1), frozen()
    plain, _ = decode(drafter, context, head)
    narrow = Head(head.embed_VD.bfloat16(), head.head_VD.bfloat16())
    half = packed(LENGTHS, dtype=torch.bfloat16)
    state = drafter.bfloat16().start(3, 32, device="cpu", dtype=torch.bfloat16)
    rows, local = rows_of(half), [int(context.positions_T[p]) for p in PLACES]
    observe(drafter, state, rows, [(0, n) for n in local], narrow)
    proposal = drafter.propose(state, context.ids_T[PLACES], torch.tensor(local), Recorder(), narrow)
    overlap = torch.minimum(proposal.probs_BKV[:, 0], plain.probs_BKV[:, 0]).sum(-1)
    assert (overlap > 0.9).all()


@pytest.mark.parametrize("name", FAMILY)
def test_first_round_with_an_empty_context(name: str) -> None:
    """A one-token prompt: nothing observed yet, the anchor at position 0."""
    drafter, head = member(name), frozen()
    state = drafter.start(2, 8, device="cpu", dtype=torch.float32)
    proposal = drafter.propose(state, torch.tensor([3, 5]), torch.tensor([0, 0]), Recorder(), head)
    assert torch.isfinite(proposal.probs_BKV).all()
    context = packed((6, 6))
    context.ids_T[[0, 6]] = torch.tensor([3, 5])
    drawn = torch.cat([torch.tensor([[3], [5]]), proposal.tokens_BK[:, :-1]], dim=1)
    anchors = anchors_at(context, [0, 6])
    anchors.previous_AK = drawn
    torch.testing.assert_close(proposal.probs_BKV, logits(drafter, context, anchors, head).softmax(-1))
