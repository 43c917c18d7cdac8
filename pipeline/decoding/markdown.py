"""report.json as a page a person reads: one table of results, one of curves, and what the words mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def page(report: dict[str, Any], lab: dict[str, Any]) -> str:
    """Markdown of a whole report."""
    records = report["records"]
    block_size = report["block_size"]
    parts = [
        f"# Evaluation of a {report['drafter']} drafter",
        f"Target `{report['target']}`, block of {block_size}, batch {report['batch_size']}, policy {report['policy']}"
        f"{', SPS ' + report['sps_source'] if report.get('sps_source') else ''}, compute dtype {report['dtype']}.",
        _results(records),
        *(_curve(records, name, title, block_size) for name, title in _CURVES),
        _time(records),
        _endings(records),
        _lossless(records),
        _lab(lab),
        "## Definitions\n\n" + "\n".join(f"- **{name}**: {text}" for name, text in report["definitions"].items()),
        f"## First prompt, as rendered\n\n```\n{report['first_prompt']}\n```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


_CURVES = (
    ("conditional_acceptance", "P(slot k accepted | slots before accepted)"),
    ("prefix_acceptance", "P(accepted >= k)"),
    ("teacher_forced_acceptance", "Mean acceptance, teacher-forced"),
)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None, digits: int = 2) -> str:
    """A figure, or a dash where there is no data."""
    return "–" if value is None else f"{value:.{digits}f}"


def tau_text(record: dict[str, Any]) -> str:
    """tau with its interval."""
    interval = record["tau_interval"]
    return number(record["tau"]) + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")


def _who(record: dict[str, Any]) -> list[str]:
    where = record["prompts"] + (f" / {record['domain']}" if record["domain"] else "")
    return [where, f"{record['temperature']:g}", record["drafter"]]


def _results(records: Sequence[dict[str, Any]]) -> str:
    header = ["prompts", "T", "drafter", "n", "rounds", "tau [95 %]", "drafts only", "per request"]
    header += ["tok/s", "vanilla", "×"]
    rows = [
        [
            *_who(record),
            str(record["num_prompts"]),
            str(record["num_rounds"]),
            tau_text(record),
            number(record["tau_draft_only"]),
            number(record["tau_request_mean"]),
            number(record.get("tokens_per_second"), 1),
            number(record.get("vanilla_tokens_per_second"), 1),
            number(record.get("speedup")),
        ]  # fmt: skip
        for record in records
    ]
    return "## Accepted length and speed\n\n" + table(header, rows)


def _curve(records: Sequence[dict[str, Any]], name: str, title: str, block_size: int) -> str:
    header = ["prompts", "T", "drafter", *(str(slot) for slot in range(1, block_size + 1))]
    rows = [
        [*_who(record), *(f"{number(value)} ({n})" for value, n in zip(record[name], record[f"{name}_n"], strict=True))]
        for record in records
        if any(record.get(f"{name}_n", ()))
    ]
    return f"## {title}\n\nn in brackets; – where a slot has no data.\n\n" + table(header, rows) if rows else ""


def _endings(records: Sequence[dict[str, Any]]) -> str:
    rows = [
        [*_who(record), str(record["num_prompts"]), *(number(record[f"{name}_rate"], 3) for name in _ENDS)]
        for record in records
        if "stop_rate" in record
    ]
    return "## How generations ended\n\n" + table(["prompts", "T", "drafter", "n", "stop", "cut", "error"], rows)


def _time(records: Sequence[dict[str, Any]]) -> str:
    """Where the rounds' wall clock goes, and the latency the parts predict beside the measured one."""
    rows = []
    for record in records:
        seconds = record.get("seconds")
        if seconds is None or record.get("latency_seconds") is None:
            continue
        measured, predicted = record["latency_seconds"], record["latency_from_parts_seconds"]
        rows.append([
            *_who(record), *(number(seconds.get(part), 1) for part in PARTS),
            number(1e3 * measured, 1), number(1e3 * predicted, 1), number(100 * record["overhead_share"], 1),
        ])  # fmt: skip
    header = ["prompts", "T", "drafter", *(f"{part} s" for part in PARTS), "ms per token", "from parts", "overhead %"]
    return "## Where the time goes\n\n" + table(header, rows) if rows else ""


PARTS = ("prefill", "draft", "schedule", "verify", "sample", "bookkeeping")
_ENDS = ("stop", "truncated", "error")


def _lossless(records: Sequence[dict[str, Any]]) -> str:
    lines = []
    for record in records:
        found = record.get("lossless")
        if found is None or record["domain"] is not None:
            continue
        lines.append(
            f"- {record['prompts']}: {found['equal']} of {found['compared']} greedy outputs equal the target's; "
            f"{len(found['near_ties'])} first differ at a near-tie, {len(found['faults'])} elsewhere"
        )
        lines += [
            f"  - `{item['id']}` at {item['position']}: {item['token']} / {item['vanilla_token']}, gap "
            f"{item['gap']:.2g}"
            for item in [*found["near_ties"], *found["faults"]]
        ]
    return "## Losslessness at T = 0\n\n" + "\n".join(lines) if lines else ""


LAB_HEADER = ("users", "drafts per user", "early stop tok/s", "waste", "lagged tok/s", "best static", "its tok/s")


def lab_rows(section: dict[str, Any]) -> list[list[str]]:
    """Throughput of the scheduler against the best static length: a row per concurrency, columns `LAB_HEADER`."""
    rows = []
    for users in dict.fromkeys(row["concurrency"] for row in section["rows"]):
        here = {row["policy"]: row for row in section["rows"] if row["concurrency"] == users}
        best = max((key for key in here if key.startswith("static")), key=lambda key: here[key]["throughput"])
        ours = here["early_stop"]
        rows.append([
            str(users), number(ours["verify_budget"]), number(ours["throughput"], 1), number(ours["waste"]),
            number(here["lagged_global"]["throughput"], 1), best, number(here[best]["throughput"], 1),
        ])  # fmt: skip
    return rows


def _lab(lab: dict[str, Any]) -> str:
    parts = []
    for name, section in lab["temperatures"].items():
        below = "\n".join(f"- {text}" for text in section["shortfalls"])
        rows = table(LAB_HEADER, lab_rows(section))
        parts.append(f"### {name}, {section['rounds']} recorded rounds\n\n{rows}\n\n{below}".rstrip())
    if not parts:
        return ""
    return f"## Scheduler lab\n\nReplayed over the SPS table ({lab['sps_source']}).\n\n" + "\n\n".join(parts)
