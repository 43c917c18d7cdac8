"""The 2-rank fixture itself: results in order, errors with their rank, nothing left hanging."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailure, run_ranks


def summed(value: float) -> tuple[int, float]:
    dist.init_process_group("gloo")
    total = torch.tensor(value * (dist.get_rank() + 1))
    dist.all_reduce(total)
    return dist.get_rank(), float(total)


def one_raises() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("rank one is unhappy")
    time.sleep(600)


def one_is_killed() -> str:
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return os.environ["MARK"]


def hangs() -> None:
    time.sleep(600)


def test_results_come_back_in_rank_order() -> None:
    assert run_ranks(summed, 2, 1.5) == [(0, 4.5), (1, 4.5)]
    assert run_ranks(summed, 3, 1.0) == [(0, 6.0), (1, 6.0), (2, 6.0)]


def test_an_exception_is_raised_as_itself_and_ends_the_others() -> None:
    with pytest.raises(ValueError, match="unhappy") as caught:
        run_ranks(one_raises, grace=0.2)
    assert "on rank 1" in "".join(caught.value.__notes__)


def test_a_killed_rank_is_named_and_others_keep_their_result() -> None:
    first, second = run_ranks(one_is_killed, catch=True, env={"MARK": "here"})
    assert isinstance(first, RankFailure) and "SIGKILL" in str(first)
    assert second == "here"


def test_a_hang_fails() -> None:
    with pytest.raises(RankFailure, match="hung for 1 s"):
        run_ranks(hangs, timeout=1)
