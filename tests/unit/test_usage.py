"""A stage run's cost is recorded per attempt: CPU-seconds, and its own peak of what it needed."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline import usage

MEGABYTES = 1 << 20


def spin(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_cpu_seconds_count_threads_and_children_but_not_waiting(tmp_path: Path) -> None:
    told: dict[str, float] = {}
    with usage.recorded(tmp_path, told.update):
        spin(0.2)
        time.sleep(0.3)
        code = "import time\nuntil = time.process_time() + 0.3\nwhile time.process_time() < until: pass"
        subprocess.run([sys.executable, "-c", code], check=True)
    (line,) = usage.read(tmp_path)
    assert told["usage/cpu_seconds"] == line["cpu_seconds"] >= 0.5
    assert line["wall_seconds"] >= 0.8
    assert line["whole"]


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot be reset here")
def test_the_peak_is_of_this_stage(tmp_path: Path) -> None:
    def hold(megabytes: int) -> None:
        block = bytearray(megabytes * MEGABYTES)
        block[:: 1 << 12] = b"x" * len(block[:: 1 << 12])  # touch every page

    before = usage.anonymous_bytes()
    for megabytes in (300, 50):
        with usage.recorded(tmp_path, lambda numbers: None):
            hold(megabytes)
    first, second = (line["peak_memory_bytes"] - before for line in usage.read(tmp_path))
    assert 290 * MEGABYTES < first < 350 * MEGABYTES
    assert 40 * MEGABYTES < second < 100 * MEGABYTES


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the kinds of memory are not told here")
def test_mapped_files_are_no_part_of_the_peak(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(b"x" * 200 * MEGABYTES)
    before = usage.anonymous_bytes()
    with (
        usage.recorded(tmp_path, lambda numbers: None),
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as view,
    ):
        assert view[:: 1 << 12].count(b"x") == 200 * MEGABYTES >> 12
        time.sleep(0.5)  # mapped longer than two samples are apart
    (line,) = usage.read(tmp_path)
    assert line["peak_of"] == usage.OWN
    assert line["peak_memory_bytes"] - before < 50 * MEGABYTES


def test_a_failed_attempt_is_recorded_as_such(tmp_path: Path) -> None:
    with pytest.raises(ValueError), usage.recorded(tmp_path, lambda numbers: None):
        raise ValueError
    (tmp_path / usage.FILE).open("a").write('{"rank": 0, "wall')  # a kill cut this one
    assert [line["whole"] for line in usage.read(tmp_path)] == [False]
