"""The books of the data stage: what came in, what went out, what was left behind and why."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.artifact import atomic_path
from pipeline.corpus.assemble import REMOVALS, Assembly
from pipeline.corpus.rows import SPLITS
from pipeline.errors import DataError

_REASONS_SHOWN = 12


def check_skips(assembly: Assembly, listing: Path) -> None:
    """Refuse a corpus with too many unusable rows. Removals (duplicates, leaks, weights) are no fault of the input."""
    rows_in = sum(found["rows_in"] for found in assembly.found)
    skipped = assembly.skipped()
    check_share(
        {reason: count for reason, count in skipped.items() if reason not in REMOVALS},
        total=rows_in, limit=assembly.data.max_skip_fraction, setting="data.max_skip_fraction", listing=listing,
    )  # fmt: skip
    if rows_in == 0:
        raise DataError("data: the sources hold no row at all")
    if sum(len(assembly.plan(split)) for split in SPLITS) == 0:
        raise DataError(f"data: none of {rows_in} rows is left ({_reasons(skipped)}); {listing} names them")


def check_share(skipped: dict[str, int], *, total: int, limit: float, setting: str, listing: Path) -> None:
    """Raise DataError when the skipped share of `total` rows is above `limit`, naming the reasons, largest first."""
    count = sum(skipped.values())
    if total and count / total > limit:
        raise DataError(
            f"{count} of {total} rows were skipped ({count / total:.1%}), {setting} allows {limit:.1%}: "
            f"{_reasons(skipped)}. {listing} names every row; mend the data or raise the limit"
        )


def _reasons(skipped: dict[str, int]) -> str:
    ordered = sorted(skipped.items(), key=lambda item: (-item[1], item))
    named = [f"{reason} {count}" for reason, count in ordered[:_REASONS_SHOWN]]
    if rest := ordered[_REASONS_SHOWN:]:
        named.append(f"{len(rest)} other reasons {sum(count for _, count in rest)}")
    return ", ".join(named)


def write_listing(path: Path, rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Gather the skips of published shards (`skipped_rows` of their rows) in one file; returns counts by reason."""
    total: Counter[str] = Counter()
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for row in rows:
            total.update(row.get("skipped", {}))
            for entry in row.get("skipped_rows", []):
                file.write(json.dumps({"shard": row["file"], **entry}, sort_keys=True) + "\n")
    return dict(sorted(total.items()))


def report_of(assembly: Assembly, listing: Path, *, too_short: dict[str, int] | None = None) -> dict[str, Any]:
    """Rows in and out, and what was left out by reason, source and prompt set: in = out + skipped.

    `listing` is the file that names every such row; `too_short` counts prompts too short to be looked for, by set.
    """
    read: Counter[str] = Counter()
    for found in assembly.found:
        read.update(found["read"])
    by_source: dict[str, Counter[str]] = defaultdict(Counter)
    leaks: dict[str, Counter[str]] = defaultdict(Counter)
    leaked: dict[str, set[str]] = defaultdict(set)
    with listing.open(encoding="utf-8") as file:
        for entry in map(json.loads, file):
            if entry["reason"] in REMOVALS:
                by_source[entry["source"]][entry["reason"]] += 1
            if entry["reason"] == "contaminated":
                leaks[entry["prompt_set"]][entry["source"]] += 1
                leaked[entry["prompt_set"]].add(entry["prompt"])
    splits = {split: len(assembly.plan(split)) for split in SPLITS}
    return {
        "rows": {"in": sum(found["rows_in"] for found in assembly.found), "out": sum(splits.values()), **splits},
        "skipped": dict(sorted(assembly.skipped().items())),
        "usable_rows_by_source": dict(read),
        "removed_by_source": {source: dict(counts) for source, counts in by_source.items()},
        "leaks_by_prompt_set": {
            name: {"rows": counts.total(), "prompts": len(leaked[name]), "rows_by_source": dict(counts)}
            for name, counts in leaks.items()
        },
        "prompts_too_short_to_find": dict(too_short or {}),
    }


def describe(report: dict[str, Any]) -> str:
    """The report in a few lines for the console."""
    rows = report["rows"]
    lines = [f"data: {rows['in']} rows read, {rows['out']} kept: " + ", ".join(f"{s} {rows[s]}" for s in SPLITS)]
    if report["skipped"]:
        lines.append(f"      left out: {_reasons(report['skipped'])}")
    for name, leak in sorted(report["leaks_by_prompt_set"].items()):
        lines.append(f"      {leak['rows']} rows held {leak['prompts']} prompts of {name}")
    return "\n".join(lines)
