"""The batched decoder against plain full forwards: ragged cache, slots, stops, seeds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pipeline.decoding.cache import RaggedCache, attention_rule
from pipeline.decoding.engine import decode
from pipeline.decoding.rounds import Engine
from pipeline.errors import ConfigError
from pipeline.speculative.verify import Law
from pipeline.target import Target
from tests.unit.decoding.toys import TableDrafter, TableTarget, small_model


def plain_greedy(model, prompt, limit, stops=()):
    ids = list(prompt)
    for _ in range(limit):
        with torch.no_grad():
            token = int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
        ids.append(token)
        if token in stops:
            break
    return ids[len(prompt) :]


def prompts_of(count, vocabulary=97, seed=1):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 19, (count,), generator=generator).tolist()
    return [torch.randint(0, vocabulary, (length,), generator=generator).tolist() for length in lengths]


class Perturbed:
    """Drafts what the target would say, but wrong at some slots: rows accept different lengths."""

    def __init__(self, answers, block_size):
        self.answers, self.config, self.rows = answers, SimpleNamespace(block_size=block_size), None

    def start(self, batch, max_length, **kwargs):
        return SimpleNamespace(lengths_B=torch.zeros(batch, dtype=torch.long), move=lambda source, target: None)

    def observe(self, *args, **kwargs): ...

    def propose(self, state, anchors_B, positions_B, sampler, frozen):
        from pipeline.draft.interface import Proposal

        rows = []
        for anchor, position in zip(anchors_B.tolist(), positions_B.tolist(), strict=True):
            guess = next(
                (after for (place, token), after in self.answers.items() if (place, token) == (position, anchor)), []
            )
            guess = (guess + [0] * self.config.block_size)[: self.config.block_size]
            wrong = position % (self.config.block_size + 1)
            rows.append([(token + 1) % 97 if slot == wrong else token for slot, token in enumerate(guess)])
        return Proposal(torch.tensor(rows), None, None)


def test_a_batch_can_stand_midway_without_its_past():
    model = small_model()
    engine = Engine(Target(model), RaggedCache(model.config), Law(0.0, 1.0, 0), drafter=Perturbed({}, 3))
    engine.start(2, 40)
    engine.cache.reserve(2, 40)
    rows = engine.midway(torch.tensor([7, 8]), torch.tensor([5, 20]))
    assert engine.state.lengths_B.tolist() == [5, 20]
    outcome = engine.play(rows)
    assert engine.cache.get_seq_length() == 20 + 1 + 3  # the farther anchor and its drafts
    assert outcome.lengths_B.tolist() == [3, 3]


@pytest.mark.parametrize("sliding", [False, True])
def test_vanilla_greedy_equals_full_forwards_whatever_the_batch(sliding):
    model = small_model(layers=4, sliding=sliding)
    prompts = prompts_of(7)
    limits = [3, 9, 14, 2, 11, 1, 8]
    expected = [plain_greedy(model, prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)]
    for batch_size in (1, 3, 16):
        got = decode(
            Target(model), prompts, temperature=0.0, max_new_tokens=limits, stop_ids=(), batch_size=batch_size,
            seeds=range(7),
        )  # fmt: skip
        assert [generation.ids for generation in got] == expected
        assert {generation.finish_reason for generation in got} == {"length"}


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_rejection_in_one_row_leaves_the_others_alone(batch_size):
    model, limit = small_model(layers=4, sliding=True), 14
    prompts = prompts_of(6, seed=3)
    expected = [plain_greedy(model, prompt, limit) for prompt in prompts]
    answers = {
        (len(prompt) + place, token): answer[place + 1 :]
        for prompt, answer in zip(prompts, expected, strict=True)
        for place, token in enumerate(answer)
    }
    got = decode(
        Target(model), prompts, drafter=Perturbed(answers, 4), temperature=0.0, max_new_tokens=limit, stop_ids=(),
        batch_size=batch_size, seeds=range(6),
    )  # fmt: skip
    assert [generation.ids for generation in got] == expected
    accepted = {step.accepted for generation in got for step in generation.rounds}
    assert len(accepted) >= 4, "rows must accept different lengths, or this test proves nothing"


@pytest.mark.case("EVA-04")
def test_s22_stop_inside_an_accepted_block_cuts_there_and_only_there():
    model, limit = small_model(), 12
    prompts = prompts_of(5, seed=5)
    free = [plain_greedy(model, prompt, limit) for prompt in prompts]
    stop = free[0][2]
    expected = [plain_greedy(model, prompt, limit, {stop}) for prompt in prompts]
    answers = {
        (len(prompt) + place, token): answer[place + 1 :]
        for prompt, answer in zip(prompts, free, strict=True)
        for place, token in enumerate(answer)
    }
    got = decode(
        Target(model), prompts, drafter=Perturbed(answers, 4), temperature=0.0, max_new_tokens=limit,
        stop_ids={stop}, batch_size=5, seeds=range(5),
    )  # fmt: skip
    assert [generation.ids for generation in got] == expected
    assert got[0].finish_reason == "stop" and got[0].ids[-1] == stop


def test_outputs_depend_on_the_row_seed_not_on_the_neighbours():
    model = small_model()
    prompts = prompts_of(6)

    def run(order, batch_size):
        got = decode(
            Target(model), [prompts[i] for i in order], temperature=1.0, max_new_tokens=10, stop_ids=(),
            batch_size=batch_size, seeds=[100 + i for i in order],
        )  # fmt: skip
        return {i: generation.ids for i, generation in zip(order, got, strict=True)}

    alone = run(range(6), 1)
    assert run([3, 1, 5, 0, 2, 4], 4) == alone
    assert len({tuple(ids) for ids in alone.values()}) == 6


@pytest.mark.case("EVA-05")
def test_s23_a_perfect_draft_gives_k_plus_one_tokens_per_round():
    logits = torch.randn(11, 11, generator=torch.Generator().manual_seed(0))
    for temperature in (0.0, 1.0):
        got = decode(
            TableTarget(logits), [[1, 2], [3]], drafter=TableDrafter(logits, 5), temperature=temperature,
            max_new_tokens=61, stop_ids=(), batch_size=2, seeds=(0, 1),
        )  # fmt: skip
        for generation in got:
            assert [(step.accepted, step.bonus) for step in generation.rounds] == [(5, 1)] * 10
            assert len(generation.ids) == 61


def test_a_stop_as_first_token_needs_no_round():
    logits = torch.full((4, 4), -1e9)
    logits[:, 2] = 0.0
    got = decode(
        TableTarget(logits), [[0], [1]], temperature=1.0, max_new_tokens=5, stop_ids={2}, batch_size=1, seeds=(0, 1)
    )
    assert [(generation.ids, generation.finish_reason, generation.rounds) for generation in got] == [
        ([2], "stop", [])
    ] * 2


def test_linear_attention_is_refused():
    with pytest.raises(ConfigError, match="linear_attention"):
        attention_rule(SimpleNamespace(layer_types=["full_attention", "linear_attention"]))


def test_cache_refuses_to_write_past_its_room():
    cache = RaggedCache(small_model().config)
    cache.reserve(2, 8)
    with pytest.raises(IndexError):
        cache.place(torch.tensor([[4000]]))


@pytest.mark.case("EVA-07")
def test_the_draft_is_really_run_three_drafters_three_counts():
    """The target itself accepts everything, a random chain about 1/V of the rest, and another one something else."""
    vocabulary = 50
    logits = torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(0)) * 4

    def tau(drafter_logits):
        got = decode(
            TableTarget(logits), [[n, n + 1] for n in range(5)], drafter=TableDrafter(drafter_logits, 4),
            temperature=0.0, max_new_tokens=101, stop_ids=(), batch_size=5, seeds=range(5),
        )  # fmt: skip
        steps = [step for generation in got for step in generation.rounds]
        return sum(step.accepted + step.bonus for step in steps) / len(steps)

    half = logits.clone()
    half[::2] = half[::2].flip(1)
    flat = torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(1))
    assert tau(logits) == 5.0
    assert tau(flat) < 1.3
    assert tau(flat) < tau(half) < 5.0
