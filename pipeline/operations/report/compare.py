"""Finished evaluations of one work directory side by side, and why others cannot stand beside them.

Two evaluations are compared where they measured the same thing: target, chat template, prompts and decoding settings
are equal, and they share a prompt set and a temperature. What differs otherwise is named, never mixed in.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.artifact import Artifact, read_json
from pipeline.decoding.markdown import number, tau_text
from pipeline.decoding.plots import acceptance_plot, tau_plot
from pipeline.differences import differences
from pipeline.operations.report.page import Figure, Note, Table
from pipeline.operations.report.story import Parts, Story

# Settings of `evaluate` that change what accepted length means, beside prompt sets and temperatures.
_DECODING = ("num_prompts", "max_new_tokens", "top_p", "top_k", "policy", "policy_length", "policy_threshold", "dtype")
HEADER = ("prompts", "T", "drafter", "n", "tau [95 %]", "drafts only", "times faster")

Record = dict[str, Any]


@dataclass(frozen=True)
class Evaluation:
    fingerprint: str
    label: str
    request: dict[str, Any]
    drafter: dict[str, Any]
    report: dict[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.request["config"]["evaluate"])

    def pooled(self) -> list[Record]:
        """Records over whole prompt sets, under this evaluation's label."""
        found = [record for record in self.report["records"] if record["domain"] is None]
        return [{**r, "drafter": self.label} for r in found if r["drafter"] != "prompt-lookup"]


@dataclass(frozen=True)
class Comparison:
    """`ours` first. `others` are comparable; `apart` are not, with what differs."""

    ours: Evaluation
    others: list[Evaluation] = field(default_factory=list)
    apart: list[tuple[Evaluation, list[str]]] = field(default_factory=list)

    @property
    def all(self) -> list[Evaluation]:
        return [self.ours, *self.others]


def find(work_dir: Path, artifact: Artifact) -> Comparison:
    """The comparison of a finished evaluation with every other one below its work directory."""
    names = _experiments(work_dir)
    found = {
        path.parent.name: _read(work_dir, path.parent, names)
        for path in sorted((work_dir / "evaluate").glob("*/manifest.json"))
    }
    comparison = Comparison(found.pop(artifact.fingerprint))
    for other in found.values():
        if obstacles := differing(comparison.ours, other):
            comparison.apart.append((other, obstacles))
        else:
            comparison.others.append(other)
    return comparison


def _experiments(work_dir: Path) -> dict[str, list[str]]:
    """Evaluation's fingerprint -> experiments that link to it."""
    found: dict[str, list[str]] = {}
    for link in sorted((work_dir / "runs").glob("*/evaluate")):
        found.setdefault(link.resolve().name, []).append(link.parent.name)
    return found


def _read(work_dir: Path, folder: Path, names: dict[str, list[str]]) -> Evaluation:
    request, report = read_json(folder / "request.json"), read_json(folder / "report.json")
    drafter = read_json(work_dir / "train" / request["inputs"]["train"] / "request.json")["config"]
    label = f"{report['drafter']} ({', '.join(names.get(folder.name, [folder.name[:6]]))})"
    return Evaluation(folder.name, label, request, drafter, report)


def differing(ours: Evaluation, other: Evaluation) -> list[str]:
    """What keeps two evaluations from being compared; empty when nothing does."""
    sets = _common(ours, other, "prompt_sets")
    problems = differences(_measured(other, sets), _measured(ours, sets))
    for name in ("prompt_sets", "temperatures"):
        if not _common(ours, other, name):
            problems += differences({name: other.settings[name]}, {name: ours.settings[name]})
    return problems


def _common(ours: Evaluation, other: Evaluation, name: str) -> list[Any]:
    return [item for item in ours.settings[name] if item in other.settings[name]]


def _measured(evaluation: Evaluation, sets: Sequence[str]) -> dict[str, Any]:
    """Everything but prompt sets and temperatures that tau depends on, apart from the drafter."""
    request = evaluation.request
    files = request.get("prompt_files", {})
    prompts = {name: request["inputs"]["data"] if name == "heldout" else files.get(Path(name).name) for name in sets}
    return {
        "target": request["target"],
        "template": {**request["config"]["template"], "file": request.get("chat_template")},
        "evaluate": {name: evaluation.settings[name] for name in _DECODING},
        "prompts": prompts,
    }


def facts(comparison: Comparison) -> Record:
    """The comparison as plain data: a row per prompt set, temperature and drafter, ours first, and what stands apart.

    Speed-ups only at the same batch size.
    """
    batch_size = comparison.ours.settings["batch_size"]
    found = [
        {
            "prompts": name, "temperature": temperature, "drafter": evaluation.label,
            "evaluate": evaluation.fingerprint, "num_prompts": record["num_prompts"], "tau": record["tau"],
            "tau_interval": record.get("tau_interval"), "tau_draft_only": record["tau_draft_only"],
            "speedup": record.get("speedup") if record["batch_size"] == batch_size else None,
        }
        for name, temperature in _keys(comparison)
        for evaluation in comparison.all
        for record in evaluation.pooled()
        if (record["prompts"], record["temperature"]) == (name, temperature)
    ]  # fmt: skip
    apart = [{"drafter": e.label, "evaluate": e.fingerprint, "differences": why} for e, why in comparison.apart]
    return {"evaluate": comparison.ours.fingerprint, "rows": found, "notes": notes(comparison), "apart": apart}


def rows(comparison: Comparison) -> list[list[str]]:
    """Those of `facts` as text, columns `HEADER`."""
    return [
        [
            row["prompts"], f"{row['temperature']:g}", row["drafter"], str(row["num_prompts"]), tau_text(row),
            number(row["tau_draft_only"]), number(row["speedup"]),
        ]
        for row in facts(comparison)["rows"]
    ]  # fmt: skip


def _keys(comparison: Comparison) -> list[tuple[str, float]]:
    """(prompt set, temperature) of our records that another evaluation has too. The pool of all sets is one only where
    the sets are the same."""
    ours, others = comparison.ours, comparison.others
    keys = [(record["prompts"], record["temperature"]) for record in ours.pooled()]
    theirs = {(record["prompts"], record["temperature"]) for other in others for record in other.pooled()}
    same = all(other.settings["prompt_sets"] == ours.settings["prompt_sets"] for other in others)
    return [key for key in keys if key in theirs and (key[0] != "all" or same)]


def notes(comparison: Comparison) -> list[str]:
    """How the drafters differ, what was measured by one of two only, and what stands apart."""
    ours, found = comparison.ours, []
    for other in comparison.others:
        settings = differences(other.drafter, ours.drafter) or ["the same settings on other inputs"]
        found.append(f"{other.label} {other.fingerprint}: {'; '.join(settings)}.")
        for name in ("prompt_sets", "temperatures", "batch_size"):
            if other.settings[name] != ours.settings[name]:
                (what,) = differences({name: other.settings[name]}, {name: ours.settings[name]})
                found.append(f"{other.label}: {what}; only what both measured is compared.")
    return found


def section(story: Story) -> Parts:
    """The comparison as a section of the report."""
    if story.manifest("evaluate") is None:
        yield story.missing("evaluate")
        return
    comparison = find(story.config.work_dir, story.chain["evaluate"])
    if not comparison.others:
        yield Note("No other finished evaluation in this work directory measured the same thing.", "missing")
    else:
        yield Table(HEADER, rows(comparison), "Accepted length side by side")
        yield from _figures(comparison)
        yield Table(
            ["prompts", "T", "drafter", *_slots(comparison)], _by_slot(comparison), "Conditional acceptance by slot"
        )
        for text in notes(comparison):
            yield Note(text)
    for other, problems in comparison.apart:
        yield Note(f"Not compared with {other.label} {other.fingerprint}: {'; '.join(problems)}.", "warning")


def _figures(comparison: Comparison) -> list[Figure]:
    keys = _keys(comparison)
    records = [r for e in comparison.all for r in e.pooled() if (r["prompts"], r["temperature"]) in keys]
    with tempfile.TemporaryDirectory() as temporary:
        drawn = [
            (tau_plot(records, Path(temporary) / "tau.png"), "Accepted length with 95 % intervals, by drafter"),
            (
                acceptance_plot(records, Path(temporary) / "acceptance.png"),
                "Conditional acceptance by slot, by drafter",
            ),
        ]
        return [Figure.of(path, caption) for path, caption in drawn if path is not None]


def _slots(comparison: Comparison) -> list[str]:
    return [str(slot) for slot in range(1, max(e.report["block_size"] for e in comparison.all) + 1)]


def _by_slot(comparison: Comparison) -> list[list[str]]:
    found = []
    for key in _keys(comparison):
        for evaluation in comparison.all:
            for record in evaluation.pooled():
                if (record["prompts"], record["temperature"]) == key:
                    values = [number(value) for value in record["conditional_acceptance"]]
                    values += ["–"] * (len(_slots(comparison)) - len(values))
                    found.append([key[0], f"{key[1]:g}", evaluation.label, *values])
    return found
