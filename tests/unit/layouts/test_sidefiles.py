"""STS and SPS files hold exactly what SGLang reads, or the export stops (S24, S28)."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.errors import ArtifactError
from pipeline.layouts import sidefiles

STS = {
    "temperatures": [1.0, 0.8, 1.3],
    "dataset": "calibration",
    "num_samples": 120,
    "ece_before": [0.1, 0.2, 0.3],
    "ece_after": [0.01, 0.02, 0.03],
}
SPS = {"sample_batch_tokens": [1, 2, 4], "sample_steps_per_sec": [9.0, 8.5, 7.0], "max_batch_tokens": 4}


def test_sts_keeps_only_the_engines_keys() -> None:
    made = sidefiles.sts_file({**STS, "checkpoint": "abc", "block_size": 3}, block_size=3, where="sts.json")
    assert made == STS


def test_sps_keeps_only_the_engines_keys() -> None:
    assert sidefiles.sps_file({**SPS, "lookup": "floor", "rows": 4}, where="sps.json") == SPS


def test_curve_with_a_gap_is_left_out() -> None:
    made = sidefiles.sts_file({**STS, "ece_after": [0.01, None, 0.03]}, block_size=3, where="sts.json")
    assert made["ece_after"] == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"temperatures": [1.0, 0.8]}, "3 values expected"),
        ({"temperatures": [1.0, 0.0, 1.0]}, "> 0"),
        ({"temperatures": [1.0, float("nan"), 1.0]}, "finite"),
        ({"form": "power"}, "power"),
        ({"ece_before": [0.1]}, "ece_before"),
    ],
)
def test_bad_sts_is_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ArtifactError, match=told):
        sidefiles.sts_file({**STS, **change}, block_size=3, where="sts.json")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"sample_batch_tokens": [1, 1, 4]}, "increasing"),
        ({"sample_batch_tokens": [4, 2, 1]}, "increasing"),
        ({"sample_steps_per_sec": [9.0, 8.0]}, "same length"),
        ({"sample_steps_per_sec": [9.0, -1.0, 7.0]}, "> 0"),
        ({"max_batch_tokens": 3}, "at least the last sample"),
        ({"max_batch_tokens": None}, "max_batch_tokens"),
    ],
)
def test_bad_sps_is_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ArtifactError, match=told):
        sidefiles.sps_file({**SPS, **change}, where="sps.json")
