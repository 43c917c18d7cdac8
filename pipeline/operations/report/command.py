"""`dspark report`: everything about one experiment in one HTML file. `dspark compare`: its drafter beside the others.

dspark report -c FILE      # <work_dir>/runs/<experiment>/report.html, also written when a chain is finished
dspark compare -c FILE     # the table of accepted lengths; charts are in the report
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from pipeline.artifact import Artifact, atomic_path
from pipeline.chain import resolve
from pipeline.config import Config
from pipeline.errors import ArtifactError
from pipeline.operations.report import compare as comparing
from pipeline.operations.report import lineage, sections
from pipeline.operations.report.page import Section, render
from pipeline.operations.report.shown import PAGE, head_of, name_of, place_of
from pipeline.operations.report.story import Parts, Story
from pipeline.progress import say
from pipeline.tracking import attach

SECTIONS: dict[str, Callable[[Story], Parts]] = {
    "Result": sections.results,
    "What was trained": sections.trained,
    "Acceptance by slot": sections.acceptance,
    "Calibration": sections.calibration,
    "Scheduling": sections.scheduling,
    "Speed": sections.speed,
    "Target cache": sections.cache,
    "Training curves": sections.curves,
    "Other drafters": comparing.section,
    "Lineage": lineage.lineage,
    "Environment": lineage.environment,
    "Configuration": lineage.settings,
    "Definitions": sections.definitions,
}


def report(config: Config, arguments: argparse.Namespace) -> None:
    """Write the report of whatever exists, attach it to the experiment's parent run, and print its path."""
    say(str(write(config, resolve(config))), result=True)


def write(config: Config, chain: Mapping[str, Artifact]) -> Path:
    """Make report.html. One that says the same already stays, and is not sent again; so does that of a finished chain,
    where this one is not finished: its page gets a name of its own.
    """
    story = Story(config, chain)
    path = place_of(story.folder, chain)
    if path.name != PAGE:
        say(f"report: {story.folder / PAGE} stays, it shows a finished chain; this one is not finished")
    text = page(story)
    changed = not path.exists() or path.read_text(encoding="utf-8") != text
    if changed:
        with atomic_path(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    if path.name == PAGE:
        path.with_name(f"report-{name_of(chain)}.html").unlink(missing_ok=True)
    attach(config, [path] if changed else [])
    return path


def page(story: Story) -> str:
    """The whole HTML file."""
    unfinished = [name for name, artifact in story.chain.items() if not artifact.complete]
    draft, target = story.config.draft, story.config.target.model or "a tiny target"
    lead = [
        f"A {draft.kind} drafter with a block of {draft.block_size} for {target}.",
        f"Not finished: {', '.join(unfinished)}." if unfinished else "Every stage is finished.",
    ]
    made = [Section(title, list(make(story))) for title, make in SECTIONS.items()]
    return render(f"Experiment {story.config.experiment}", lead, made, head_of(story.chain))


def compare(config: Config, arguments: argparse.Namespace) -> None:
    """Print this configuration's drafter beside every other finished evaluation of the work directory.

    Raises ArtifactError when its own evaluation is not finished.
    """
    artifact = resolve(config)["evaluate"]
    if not artifact.complete:
        raise ArtifactError(f"compare: {artifact.path} is not finished; `dspark run` first")
    found = comparing.find(config.work_dir, artifact)
    if arguments.json:
        say(json.dumps(comparing.facts(found), indent=1), result=True)
        return
    if found.others:
        table = [comparing.HEADER, *comparing.rows(found)]
        widths = [max(len(row[column]) for row in table) for column in range(len(comparing.HEADER))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
        say("\n".join([*lines, *comparing.notes(found)]), result=True)
    else:
        say("compare: no other finished evaluation in this work directory measured the same thing", result=True)
    for other, problems in found.apart:
        say(f"not compared with {other.label} {other.fingerprint}: {'; '.join(problems)}", result=True)
