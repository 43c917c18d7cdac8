"""Reading: what a step holds on each rank, exactly, from any starting point."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.errors import ArtifactError
from pipeline.shards.record import Teacher
from pipeline.training.loader import feed, read_ahead
from tests.unit.training.world import D, K, L, V, World, world


def keys(made: World, start: int, stop: int, *, rank: int = 0, ranks: int = 1, workers: int = 1) -> list[list[str]]:
    """Names of the rows of each step."""
    options: dict[str, Any] = {"rank": rank, "world": ranks, "budget": 70, "workers": workers}
    return [
        sorted(key for batch in step.batches for key in batch.keys)
        for step in feed(made.schedule, made.reader, start=start, stop=stop, **options)
    ]


@pytest.mark.case("LDR-07")
@pytest.mark.case("LDR-08")
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_resumed_run_sees_the_same_rows_in_the_same_steps(workers: int) -> None:
    made = world(rows=11, batch=3)
    whole = keys(made, 0, 10, workers=0)
    assert keys(world(rows=11, batch=3), 0, 4, workers=workers) + keys(made, 4, 10, workers=workers) == whole
    assert whole[0] != whole[4] and sorted(sum(whole[:4], [])) == sorted(f"row-{row}/0" for row in range(11))


@pytest.mark.case("LDR-08")
@pytest.mark.parametrize(("rows", "batch", "step"), [(11, 3, 4), (1_400_000, 8, 125_000)])
def test_skipping_reads_nothing(rows: int, batch: int, step: int) -> None:
    """Going on at step 4, or at sample 1,000,000, neither decodes nor looks at the rows of the steps before."""
    made = world(rows=rows, batch=batch)
    source = made.reader.rows
    seen: list[int] = []
    looked: list[int] = []
    read, tokens = source.read, source.tokens
    source.read = lambda numbers: seen.extend(numbers) or read(numbers)  # type: ignore[method-assign]
    source.tokens = lambda row: looked.append(row) or tokens(row)  # type: ignore[method-assign]
    keys(made, step, step + 1, workers=0)
    wanted = sorted(made.schedule.batch(step))
    assert len(wanted) == batch and sorted(seen) == wanted and sorted(set(looked)) == wanted


@pytest.mark.case("LDR-04")
@pytest.mark.case("LDR-05")
def test_ranks_share_every_step_and_nothing_twice() -> None:
    """11 rows on 2 ranks: the union of each step is the one-rank step, with as many micro-batches on both."""
    made = world(rows=11, batch=3)
    alone = keys(made, 0, 8)
    shares = [keys(made, 0, 8, rank=rank, ranks=2) for rank in range(2)]
    assert [sorted(a + b) for a, b in zip(*shares, strict=True)] == alone
    counts = [[step.count for step in _drained(made, rank)] for rank in range(2)]
    assert counts[0] == counts[1]


def _drained(made: World, rank: int) -> Iterator[Any]:
    for step in feed(made.schedule, made.reader, rank=rank, world=2, budget=70, start=0, stop=8):
        list(step.batches)
        yield step


@pytest.mark.case("LDR-14")
def test_a_placeholder_has_the_layers_and_dtype_of_a_real_batch() -> None:
    made = world(rows=2, bare=(0,))
    empty = made.reader.micro_batch([0], 0).to(torch.device("cpu"), torch.bfloat16)
    real = made.reader.micro_batch([1], 0).to(torch.device("cpu"), torch.bfloat16)
    assert empty.context.taps_TLD.dtype == real.context.taps_TLD.dtype == torch.bfloat16
    assert empty.context.taps_TLD.shape[1:] == real.context.taps_TLD.shape[1:] == (L, D)
    assert empty.slots_S.numel() == 0 and empty.anchors.previous_AK.shape == (1, K) and empty.keys == ()


def test_a_missing_distribution_names_sample_and_position() -> None:
    """S11: a supervised slot without a cached distribution is an error, not a zero."""
    made = world(rows=1, num_anchors=99)
    sample = made.reader.rows.read([0])[0]
    cut = Teacher("last_hidden", sample.teacher.positions_P[:-9], hidden_PD=sample.teacher.hidden_PD[:-9])
    made.reader.rows.read = lambda numbers: [_with(sample, cut)]  # type: ignore[method-assign]
    with pytest.raises(ArtifactError, match=r"row-0/0.*position \d+"):
        made.reader.micro_batch([0], 0)


def _with(sample: Any, teacher: Teacher) -> Any:
    import dataclasses

    return dataclasses.replace(sample, teacher=teacher)


def test_labels_may_be_the_targets_own_choice() -> None:
    """S10: `ce_label: argmax` takes the target's most likely token at a + k - 1."""
    made = world(rows=2, ce_label="argmax")
    batch = made.reader.micro_batch([0, 1], 0)
    logits = batch.teacher.hidden_PD @ made.frozen.head.weight_VD.T
    assert torch.equal(batch.labels_S, logits.argmax(-1)[batch.rows_S])
    data = world(rows=2).reader.micro_batch([0, 1], 0)
    tokens = data.context.ids_T[data.anchors.index_A[data.slots_S // K] + data.slots_S % K + 1]
    assert torch.equal(data.labels_S, tokens) and not torch.equal(data.labels_S, batch.labels_S)


def test_reading_ahead_keeps_order_and_passes_errors_on() -> None:
    def tasks(bad: int) -> Iterator[Any]:
        for number in range(9):
            yield lambda number=number: 1 // (number - bad) if number == bad else number

    assert list(read_ahead(tasks(99), 3)) == list(range(9))
    stream = read_ahead(tasks(4), 3)
    assert [next(stream) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ZeroDivisionError):
        next(stream)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reader") and thread.is_alive()]


def test_packed_rows_keep_their_own_positions_and_teacher_rows() -> None:
    """S2, S11: positions restart with each document; every slot reads the distribution at a + k - 1 of its own row."""
    made = world(rows=3, source="last_hidden")
    together = made.reader.micro_batch([2, 0, 1], 0)
    assert (together.rows_S.diff() >= 0).all()
    at = 0
    for row in (2, 0, 1):
        alone = made.reader.micro_batch([row], 0)
        length = alone.tokens
        here = slice(at, at + length)
        assert torch.equal(together.context.positions_T[here], torch.arange(length))
        mine = together.context.document_T[together.anchors.index_A[together.slots_S // K]]
        picked = mine == together.context.document_T[at]
        hidden = together.teacher.hidden_PD[together.rows_S[picked]]
        assert torch.equal(hidden, alone.teacher.hidden_PD[alone.rows_S])
        at += length
    assert int(together.labels_S.max()) < V and np.isclose(float(together.weights_S.max()), 1.0)
