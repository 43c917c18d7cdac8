"""report.html and `dspark compare`: partial chains, escaping, sameness, and evaluations that must not be mixed."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pipeline.__main__ import main
from pipeline.artifact import write_json
from pipeline.chain import resolve
from pipeline.config import Config, load
from pipeline.operations.report.command import SECTIONS
from pipeline.operations.report.command import page as page_of
from pipeline.operations.report.page import Fold, Link, Note, Section, Table, render
from pipeline.operations.report.story import Story

ROOT = Path(__file__).resolve().parents[3]
DEBUG = str(ROOT / "configs/debug.yaml")
EAGLE = (
    "experiment=eagle",
    "draft.kind=eagle3",
    "draft.markov=none",
    "draft.confidence=false",
    "draft.mask_token_id=null",
)


def words(work_dir: Path, *overrides: str) -> list[str]:
    return ["-c", DEBUG, f"work_dir={work_dir}", "tracking.enabled=false", *overrides]


def config(work_dir: Path, *overrides: str) -> Config:
    return load(DEBUG, [f"work_dir={work_dir}", "tracking.enabled=false", *overrides])


def page(work_dir: Path, *overrides: str) -> str:
    wanted = config(work_dir, *overrides)
    return page_of(Story(wanted, resolve(wanted)))


class Outside(HTMLParser):
    """Every address a browser would load or a reader could click."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name == "src" or (tag == "link" and name == "href"):
                self.loaded.append(value or "")
            elif name == "href":
                self.links.append(value or "")


def record(drafter: str, temperature: float, tau: float, **more: Any) -> dict[str, Any]:
    return {
        "drafter": drafter, "prompts": "heldout", "domain": None, "temperature": temperature, "batch_size": 8,
        "num_prompts": 16, "num_rounds": 40, "tau": tau, "tau_interval": [tau - 0.1, tau + 0.2],
        "tau_draft_only": tau - 1, "conditional_acceptance": [0.6, 0.5, 0.25, None],
        "conditional_acceptance_n": [40, 24, 12, 0], "speedup": 1.25, **more,
    }  # fmt: skip


def evaluated(work_dir: Path, tau: float, *overrides: str) -> str:
    """A finished evaluation of which only what comparisons read was made; returns its fingerprint."""
    wanted = config(work_dir, *overrides)
    chain = resolve(wanted)
    chain["train"].create()
    artifact, kind = chain["evaluate"], wanted.draft.kind
    artifact.create()
    records = [record(kind, t, tau + t / 2) for t in wanted.evaluate.temperatures]
    records.append(record("prompt-lookup", 0.0, 1.1))
    report = {"drafter": kind, "block_size": 4, "records": records, "definitions": {}, "first_prompt": "<|user|>"}
    write_json(artifact.path / "report.json", report)
    write_json(artifact.path / "lab.json", {"sps_source": "made up", "temperatures": {}})
    artifact.finish(files=["report.json", "lab.json"])
    link = work_dir / "runs" / wanted.experiment / "evaluate"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(artifact.path.absolute())
    return artifact.fingerprint


# ------------------------------------------------------------------------------------------------ the page


def test_text_is_escaped_wherever_it_stands() -> None:
    bad = '<script>alert("x")</script>'
    parts = [Table([bad], [[bad], [Link(bad, '"><img src=//x>')]], bad), Note(bad), Fold(bad, bad)]
    text = render(bad, [bad], [Section(bad, parts)])
    found = Outside(text)
    assert found.tags & {"script", "img"} == set() and found.loaded == ["data:,"]
    assert text.count("&lt;script&gt;") == 12, "title, lead, contents, headings, cells, notes, folds"


def test_figures_are_set_to_the_right_and_words_are_not() -> None:
    rows = [["a", "1,234.5", "1.70 [1.67, 1.75]", "–", "7 shards"], ["b", "–", "–", "–", "–"]]
    assert Table(["w", "x", "y", "z", "v"], rows).numeric == [False, True, True, True, False]


def test_a_chain_that_was_never_started_has_a_report_that_says_so(work_dir: Path) -> None:
    text = page(work_dir)
    assert [section for section in SECTIONS if f">{section}</h2>" not in text] == []
    for stage in ("targets", "train", "calibrate", "profile", "evaluate"):
        assert f"Nothing to show yet: stage {stage} is absent" in text
    made_from = dict(re.findall(r"<tr><td>(\w+)</td><td>\w+</td><td>absent</td><td>(sources|target)</td>", text))
    assert made_from == {"data": "sources", "profile": "target"}
    assert "train.learning_rate</td><td>0.004" in re.sub(r"\s*class=\"number\"", "", text), "the recipe needs no run"
    assert Outside(text).loaded == ["data:,"]


def test_a_partial_chain_shows_what_exists(work_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", *words(work_dir)]) == 0
    train = resolve(config(work_dir))["train"]
    train.create()
    lines = [{"step": step, "split": "train", "loss": 2 / step, "acceptance_1": 0.5} for step in (1, 2, 3)]
    (train.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_json(train.path / "failed.json", {"error": "DataError: a <loss> is not finite"})
    capsys.readouterr()
    assert main(["report", *words(work_dir)]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == work_dir / "runs" / "debug" / "report.html"
    text = path.read_text()
    assert "Not finished: answers, tokens, targets, train, calibrate, profile, evaluate, export." in text
    assert re.search(r"stage train is failed \(.*DataError: a &lt;loss&gt; is not finite\)", text)
    found = Outside(text)
    assert [source.partition(",")[0] for source in found.loaded] == ["data:", *["data:image/png;base64"] * 2]
    assert "in 192, train" in text, "the data stage's counts"
    inside = [link for link in found.links if not link.startswith("#")]
    assert inside and all((path.parent / link).parent.resolve().is_relative_to(work_dir.resolve()) for link in inside)


def test_unchanged_artifacts_give_the_same_bytes(work_dir: Path) -> None:
    evaluated(work_dir, 1.7)
    evaluated(work_dir, 1.4, *EAGLE)
    first = page(work_dir)
    assert first == page(work_dir) and first.count("data:image/png") >= 2
    (path,) = [work_dir / "runs" / "debug" / "report.html"]
    assert main(["report", *words(work_dir)]) == 0
    before = path.stat().st_mtime_ns
    assert main(["report", *words(work_dir)]) == 0
    assert path.stat().st_mtime_ns == before, "a report that says the same stays"


def test_secrets_of_the_configuration_stay_out(work_dir: Path) -> None:
    assert "s3cr3t-password" not in page(work_dir, "tracking.uri=http://me:s3cr3t-password@127.0.0.1:5000")


# ------------------------------------------------------------------------------------------------ comparison


def compared(work_dir: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    capsys.readouterr()
    assert main(["compare", *words(work_dir, *overrides)]) == 0
    return capsys.readouterr().out


def test_drafters_stand_side_by_side_with_intervals(work_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluated(work_dir, 1.7)
    evaluated(work_dir, 1.4, *EAGLE)
    lines = [re.split(r"\s{2,}", line) for line in compared(work_dir, capsys).splitlines()]
    assert lines[1] == ["heldout", "0", "dspark (debug)", "16", "1.70 [1.60, 1.90]", "0.70", "1.25"]
    assert [line[4] for line in lines[2:5]] == ["1.40 [1.30, 1.60]", "2.20 [2.10, 2.40]", "1.90 [1.80, 2.10]"]
    assert 'draft.kind ("eagle3" there, "dspark" here)' in lines[5][0]
    text = page(work_dir)
    assert "eagle3 (eagle)" in text and "Accepted length with 95 % intervals, by drafter" in text


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("target.tiny.layers=7", "target.tiny.layers (7 there, 6 here)"),
        ("template.system_prompt=Hi", 'template.system_prompt ("Hi" there, null here)'),
        ("evaluate.max_new_tokens=5", "evaluate.max_new_tokens (5 there, 32 here)"),
        ("evaluate.temperatures=[0.5]", "temperatures ([0.5] there, [0.0, 1.0] here)"),
        ("data.shard_rows=7", "prompts.heldout ("),
    ],
)
def test_what_measured_something_else_is_named_and_left_out(
    work_dir: Path, capsys: pytest.CaptureFixture[str], override: str, why: str
) -> None:
    evaluated(work_dir, 1.7)
    fingerprint = evaluated(work_dir, 9.9, *EAGLE, override)
    text = compared(work_dir, capsys)
    assert f"not compared with eagle3 (eagle) {fingerprint}: " in text and why in text and "9.9" not in text
    assert "9.90" not in page(work_dir) and f"Not compared with eagle3 (eagle) {fingerprint}" in page(work_dir)


def test_only_what_both_measured_is_compared_and_the_rest_is_stated(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluated(work_dir, 1.7)
    evaluated(work_dir, 1.4, *EAGLE, "evaluate.temperatures=[1.0]", "evaluate.batch_size=2")
    lines = compared(work_dir, capsys).splitlines()
    assert [re.split(r"\s{2,}", line)[1] for line in lines[1:3]] == ["1", "1"], "nothing at T = 0"
    assert any("temperatures ([1.0] there, [0.0, 1.0] here)" in line for line in lines)
    assert any("batch_size (2 there, 8 here)" in line for line in lines)


def test_a_script_reads_the_comparison_as_numbers(work_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = evaluated(work_dir, 1.7), evaluated(work_dir, 1.4, *EAGLE)
    other = evaluated(work_dir, 9.9, *EAGLE, "experiment=longer", "evaluate.max_new_tokens=5")
    found = json.loads(compared(work_dir, capsys, "--json"))
    assert found["evaluate"] == ours
    shown = [(row["evaluate"], row["temperature"], row["tau"]) for row in found["rows"]]
    assert shown[:2] == [(ours, 0.0, 1.7), (theirs, 0.0, 1.4)] and len(shown) == 4
    assert found["rows"][0]["tau_interval"] == pytest.approx([1.6, 1.9])
    assert found["rows"][0]["speedup"] == 1.25 and any("draft.kind" in note for note in found["notes"])
    (apart,) = found["apart"]
    assert apart["evaluate"] == other and "evaluate.max_new_tokens (5 there, 32 here)" in apart["differences"]


def test_compare_needs_an_evaluation_of_its_own(work_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *words(work_dir)]) == 4
    evaluated(work_dir, 1.7)
    assert "no other finished evaluation" in compared(work_dir, capsys)
