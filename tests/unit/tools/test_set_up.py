"""Set-up stops before it costs gigabytes, and says what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import set_up

ROOT = Path(__file__).resolve().parents[3]
CUDA = {"version": "2.13.0", "requires_dist": ["filelock", "nvidia-cublas==13.0; platform_system == 'Linux'"]}
CPU = {"version": "2.13.0+cpu", "requires_dist": ["filelock"]}
FIND_LINKS = {"global.find-links": "/wheels"}


def problem(**changes: Any) -> str:
    given: dict[str, Any] = {"has_gpu": False, "allowed": False, "sources": FIND_LINKS, "offered": lambda: CUDA}
    return set_up.torch_problem(**{**given, **changes})


def test_a_cuda_build_on_a_machine_without_gpu_is_refused_with_size_and_setting() -> None:
    text = problem()
    assert "GB" in text and "PIP_FIND_LINKS" in text and "ALLOW_CUDA_WHEEL=1" in text and "/wheels" in text
    assert "none set" in problem(sources={}, offered=lambda: CPU)
    assert problem(offered=lambda: None) != ""


def test_goes_on_with_a_cpu_wheel_a_gpu_or_permission() -> None:
    assert problem(offered=lambda: CPU) == ""
    assert problem(offered=lambda: {"version": "2.13.0", "requires_dist": ["filelock"]}) == ""
    assert problem(has_gpu=True) == "" and problem(allowed=True) == ""


def test_an_old_python_is_named() -> None:
    assert set_up.python_problem((3, 11), "/usr/bin/python3") == ""
    text = set_up.python_problem((3, 9), "/usr/bin/python3")
    assert "3.11" in text and "/usr/bin/python3 is 3.9" in text and "PYTHON=" in text


def test_reads_pips_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/a/folder")
    assert set_up.pip_sources(Path(sys.executable))[":env:.find-links"] == "/a/folder"


def test_a_second_setup_does_nothing_and_clean_spares_the_work_directory(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    kept = tmp_path / "work" / "__pycache__" / "kept.pyc"
    gone = tmp_path / "pipeline" / "__pycache__" / "gone.pyc"
    for path in (kept, gone, tmp_path / ".venv" / "ready"):
        path.parent.mkdir(parents=True)
        path.touch()
    again = subprocess.run(["make", "setup"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "Nothing to be done" in again.stdout
    subprocess.run(["make", "clean"], cwd=tmp_path, capture_output=True, check=True)
    assert kept.exists() and not gone.exists()
