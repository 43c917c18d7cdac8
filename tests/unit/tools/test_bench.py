"""The benchmark of the training step: both sides compute the same, and what cannot be measured is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tools import bench
from tools.bench_cases import Shape, make

SMALL = Shape(hidden=128, vocabulary=300, anchors=12, tokens=60, supervised=0.5)


@pytest.mark.parametrize("supervised", [0.5, 0.15])
def test_our_step_and_the_references_have_one_loss_and_one_gradient(supervised: float) -> None:
    """Padding blocks and slots that do not count cost the reference time and change nothing."""
    case = make(Shape(**{**vars(SMALL), "supervised": supervised}), torch.device("cpu"))
    for run in case.losses():
        run()
    for name, parameter in case.reference.named_parameters():
        ours = case.ours.drafter.get_parameter(name).grad
        assert (ours is None) == (parameter.grad is None), name
        if ours is not None:
            assert (ours - parameter.grad).norm() < 1e-4 * parameter.grad.norm(), name
    assert case.ours.drafter.confidence_head.proj.weight.grad is not None, "the heads are part of the loss"
    assert float(case.our_step()) == pytest.approx(float(case.reference_step()), rel=1e-5)


def test_a_measurement_is_printed_and_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(bench, "quick", lambda made: [made.step(SMALL), made.loss(SMALL)])
    assert bench.main(["--quick", "--repeats", "1", "--device", "cpu", "--json", str(tmp_path / "a" / "b.json")]) == 0
    report = json.loads((tmp_path / "a" / "b.json").read_text())
    assert [record["what"] for record in report["records"]] == ["step", "loss"]
    assert all(record["speed_ratio"] > 0 and record["memory_ratio"] >= 0 for record in report["records"])
    assert SMALL.label() in capsys.readouterr().out


@pytest.mark.parametrize("flags", [["--repeats", "0"], ["--device", "tpu"], ["--repeat"], ["--json"]])
def test_wrong_flags_end_in_one_line(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(["--quick", *flags])
    assert ended.value.code == 2 and "error: " in capsys.readouterr().err
