"""The codec study on a tiny target: bf16 changes nothing, coarser codecs cost more, zeroed taps cost something."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from pipeline import chain
from pipeline.decoding import codec_study as study
from pipeline.errors import ArtifactError
from pipeline.operations.codecs import codecs
from tests.stages.prepared import prepare


def test_the_study_runs_and_its_changes_are_paired(work_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = prepare(work_dir, "evaluate.dtype=bfloat16")
    codecs(config, argparse.Namespace(prompts=4, temperature=1.0))
    train = chain.resolve(config)["train"]
    report = json.loads((work_dir / "studies" / f"codecs-{train.fingerprint}.json").read_text())
    table = report["codecs"]
    assert set(table) == {*study.CODECS, study.ZEROED}
    assert table["bf16"]["acceptance_change"] == {"change": 0.0, "interval": [0.0, 0.0]}
    assert table["bf16"]["relative_error_per_layer"] == [0.0, 0.0]
    errors = [sum(table[codec]["relative_error_per_layer"]) for codec in ("int8", "int4", "int3", "int2")]
    assert errors == sorted(errors)
    assert table[study.ZEROED]["acceptance_change"]["change"] != 0.0
    assert all(1.0 <= facts["tau"] <= 5.0 for facts in table.values())
    bounds = report["c_star_error_by_topk"]
    assert all(facts["mean"] <= facts["mean_tail"] + 1e-3 for facts in bounds.values())
    assert bounds["128"]["mean_tail"] < bounds["16"]["mean_tail"]
    assert "top-64" in capsys.readouterr().out


def test_it_needs_a_trained_drafter(work_dir: Path) -> None:
    config = prepare(work_dir)
    chain.resolve(config)["train"].manifest_path.unlink()
    with pytest.raises(ArtifactError, match="train stage is not finished"):
        codecs(config, argparse.Namespace(prompts=None, temperature=None))


def test_pairing_removes_what_prompts_have_in_common() -> None:
    """Prompts differ widely; the codec costs each of them the same: the interval of the change must be tight."""
    slots = torch.full((40,), 100.0, dtype=torch.float64)
    base = torch.linspace(5, 95, 40, dtype=torch.float64)
    found = {
        "bf16": study.Columns(base, slots, base + 100, slots),
        "int2": study.Columns(base - 1.0, slots, base + 98, slots),
    }
    table = study.compare(found, reference="bf16", resamples=500, seed=0)
    change = table["int2"]["acceptance_change"]
    assert change["change"] == pytest.approx(-0.01)
    assert change["interval"] == pytest.approx([-0.01, -0.01], abs=1e-9)
    assert table["int2"]["tau_change"]["change"] == pytest.approx(-0.02)
