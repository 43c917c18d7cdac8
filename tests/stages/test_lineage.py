"""A finished chain knows where it comes from, and what a changed setting would renew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.__main__ import main
from pipeline.chain import STAGES
from tests.stages import whole_chain

TRAINED = {"train", "calibrate", "evaluate", "export"}


def words(finished: Path, *overrides: str) -> list[str]:
    return ["-c", str(whole_chain.DEBUG), f"work_dir={finished}", *whole_chain.SMALLER, *overrides]


def test_an_evaluation_leads_back_to_the_corpus(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lineage", "evaluate", *words(finished)]) == 0
    lines = capsys.readouterr().out.splitlines()
    folders = {path.parent.parent.name: path.parent.name for path in finished.glob("*/*/manifest.json")}
    assert lines[0].startswith(f"evaluate {folders['evaluate']}")
    path = [lines.index("made from:")]
    for depth, stage in enumerate(("calibrate", "train", "targets", "tokens", "answers", "data"), 1):
        starts = f"{'  ' * depth}{stage} {folders[stage]}"
        path.append(next(number for number, line in enumerate(lines) if number > path[-1] and line.startswith(starts)))
    assert "reasoning-gym" in lines[path[-1]] and "(unfinished)" not in "".join(lines)
    assert sum(line.strip().startswith(f"targets {folders['targets']}") for line in lines) == 1, "told once"
    assert f"  export {folders['export']}" in lines[lines.index("made into:") :]


@pytest.mark.case("CAB-05")
@pytest.mark.parametrize(
    ("override", "renewed"),
    [
        ("answers.temperature=0.9", {"answers", "tokens", "targets", *TRAINED}),
        ("draft.layers=2", TRAINED),
        ("export.dtype=float32", {"export"}),
    ],
)
def test_one_changed_key_renews_exactly_what_lies_downstream(
    finished: Path, override: str, renewed: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", *words(finished, override), "--json"]) == 0
    rows = {row["stage"]: row for row in json.loads(capsys.readouterr().out)}
    assert {name for name, row in rows.items() if row["state"] == "absent"} == renewed
    assert {name for name, row in rows.items() if row["state"] == "done"} == set(STAGES) - renewed
    first = next(name for name in STAGES if name in renewed)
    assert f"differs in {override.partition('=')[0]} " in rows[first]["note"]
