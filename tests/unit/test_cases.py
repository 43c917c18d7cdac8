"""Every field case a test cites is described in CASES.md, and every one described there is held by a test."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def test_cited_cases_are_described_and_described_ones_are_cited() -> None:
    cited = {
        name for path in TESTS.rglob("*.py") for name in re.findall(r'mark\.case\("([A-Z]+-\d+)"\)', path.read_text())
    }
    described = set(re.findall(r"^\| ([A-Z]+-\d+) \|", (TESTS / "CASES.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert cited == described
