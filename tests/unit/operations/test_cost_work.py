"""Work of every stage: counts on cases small enough to count by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pipeline.config import Config, load
from pipeline.operations.costs import work
from pipeline.operations.costs.corpus import Corpus, assumed
from pipeline.operations.costs.hardware import Device, devices, engine_of
from pipeline.operations.costs.sizes import DraftSize
from pipeline.shards.plan import Shape
from pipeline.speculative.anchors import sample_anchors, supervised_slots
from tests.unit.operations.test_cost_sizes import TARGET, draft_of

SHAPE = Shape.of(TARGET)


def config(*overrides: str) -> Config:
    return load("configs/debug.yaml", ["work_dir=/tmp/nowhere", *overrides])


def corpus(rows: int = 100, length: float = 60, share: float = 0.5) -> Corpus:
    return assumed(config("data.shard_rows=40"), rows, length, share, "given")


@pytest.mark.parametrize(("answer", "anchors", "block"), [(30, 16, 4), (30, 1000, 4), (5, 16, 7), (2, 3, 7)])
def test_slots_are_those_the_trainer_makes(answer: int, anchors: int, block: int) -> None:
    """The mean over epochs of S7's anchors and S9's supervised slots, on one row."""
    length, epochs = 50, 300
    mask = (torch.arange(length) >= length - answer).bool()
    made = []
    for epoch in range(epochs):
        found = sample_anchors(mask, num_anchors=anchors, seed=0, epoch=epoch, sample_id="row")
        made.append((len(found), int(supervised_slots(mask, found, block).sum())))
    settings = config(f"train.num_anchors={anchors}", "train.global_batch_size=1", "train.validation_fraction=0")
    text = replace(corpus(), lengths=((length, answer),))
    step = work.training(settings, text, replace(draft_of("dspark"), block_size=block))
    assert step.anchors == made[0][0]
    assert step.slots == pytest.approx(sum(slots for _, slots in made) / epochs, rel=0.03)


def test_steps_and_validation() -> None:
    settings = config(
        "train.steps=null", "train.epochs=3", "train.global_batch_size=8", "train.validation_fraction=0.1",
        "train.validate_every=20",
    )  # fmt: skip
    step = work.training(settings, corpus(), draft_of("dspark"))
    assert step.steps == 3 * 12  # 90 rows, the last step of an epoch smaller
    assert step.validated_rows == 2 * 10  # after step 20 and the last


def test_a_training_step_costs_six_per_weight_and_four_per_frozen_one() -> None:
    draft = draft_of("dspark")
    size = DraftSize.of(draft)
    step = work.Training(1, rows=1, context=0, anchors=0, slots=10, positions=0, validated_rows=0)
    assert work.training_flops(SHAPE, draft, step, "topk") == 10 * (6 * size.markov_out + 4 * 48 * 300)
    more = replace(step, positions=5)
    hidden = work.training_flops(SHAPE, draft, more, "last_hidden") - work.training_flops(SHAPE, draft, more, "topk")
    assert hidden == 5 * 2 * 48 * 300


def test_rounds_of_answers_that_are_all_cut_are_whole_batches() -> None:
    settings = config("answers.batch_size=10", "answers.max_new_tokens=30")
    (answers,) = work.decodings(settings, corpus(rows=40), 4, 2.0)["answers"]
    assert answers.rounds == pytest.approx(40 * 29 / 10)


def test_decoding_counts_rounds_by_batches_and_their_tails() -> None:
    found = work.decodings(config("answers.batch_size=10", "answers.max_new_tokens=40"), corpus(), 4, 2.0)
    (answers,) = found["answers"]  # shards of 40, 40 and 20 rows, answers of 30 tokens, the slowest 40
    assert answers.row_rounds == 100 * 29
    assert answers.rounds == pytest.approx((40 * 29 / 10 + 10) * 2 + (20 * 29 / 10 + 10))
    calibrate = found["calibrate"][0]  # 24 prompts of at most 32 tokens, two tokens a round
    assert (calibrate.step_tokens, calibrate.rows, calibrate.row_rounds) == (5, 16, 24 * 29 / 2)
    assert len(found["calibrate"]) == 2
    assert [run.drafted for run in found["evaluate"]] == [True, True, False, False]
    assert found["evaluate"][2].row_rounds == pytest.approx(2 * found["evaluate"][0].row_rounds)


def test_later_turns_are_rounds_of_their_own_and_prompts_are_padded_to_the_longest_beside_them() -> None:
    text = replace(
        corpus(), lengths=((50, 10), (40, 10), (30, 10), (20, 10)), asked={"evaluate": [[4, 1], [2]]}
    )  # prompts of 40, 30, 20, 10 tokens
    settings = config("evaluate.batch_size=2", "evaluate.max_new_tokens=40", "evaluate.lookup=false")
    plain = work.decodings(settings, text, 4, 2.0)["evaluate"][-1]
    assert (plain.prompts, plain.units) == (7, 2)
    # Answers of 30 tokens, the slowest 40: four rows in two slots, then one alone, then two side by side.
    assert plain.rounds == (4 * 29 / 2 + 10) + 40 + 40
    # Both slots at first (40 twice), then whoever comes next (20, 10); one prompt of middling length; two (30, 10).
    assert plain.prefill_tokens == (40 * 2 + 20 + 10) + 20 + 30 * 2


def test_few_rows_are_bound_by_bandwidth_and_many_by_arithmetic() -> None:
    device = Device(flops=1e11, bandwidth=1e10, utilisation=0.5)
    run = work.Decoding(
        "bfloat16", temperature=0.0, drafted=False, prompts=1, prompt_tokens=10.0, prefill_tokens=10, rounds=100.0,
        row_rounds=100.0, step_tokens=1, rows=1, context=20.0, longest=40, units=1,
    )  # fmt: skip
    many = replace(run, rows=5120, row_rounds=512_000.0)
    for one, bound in ((run, "bytes"), (many, "flops")):
        flops, moved = (count(SHAPE, draft_of("dspark"), one) for count in (work.decoding_flops, work.decoding_bytes))
        assert (moved / 1e10 > flops / 1e11) == (bound == "bytes")
        assert device.seconds(flops, moved) == max(flops / 1e11, moved / 1e10) / 0.5


def test_devices_follow_the_launch_section() -> None:
    settings = config("launch.nodes=4", "launch.processes_per_node=8", "launch.array_tasks=4", "train.engine=fsdp2")
    found = {stage: devices(settings, stage) for stage in ("data", "targets", "train", "profile", "export")}
    assert found == {"data": 4, "targets": 32, "train": 32, "profile": 1, "export": 1}
    assert engine_of(settings) == "fsdp2"
    assert engine_of(config()) == "single"
