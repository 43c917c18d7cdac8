"""The evaluation report: one record per (drafter, prompt set, domain, temperature), as data first, then as Markdown.

Everything but the timings follows from the recorded lines, so fixed seeds give the same report whatever the split of
the work. Numerators and denominators are summed over all lines; nothing is a mean of means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.speculative.acceptance import Rounds, curves, ratio, summarise

# Fields that differ between two runs of the same evaluation.
TIMINGS = (
    "tokens_per_second", "vanilla_tokens_per_second", "speedup", "seconds", "vanilla_seconds", "latency_seconds",
    "latency_from_parts_seconds", "overhead_share",
)  # fmt: skip

DEFINITIONS = {
    "tau": "tokens per verify step (accepted drafts + 1 bonus), pooled over requests; the prefill token is left out; "
    "the last round counts before the length cut, after the stop cut, and without a bonus after a stop",
    "tau_draft_only": "accepted drafts per verify step: tau without the bonus token",
    "tau_request_mean": "mean over requests of their own tokens per verify step",
    "tau_interval": "95 % bootstrap interval of tau, resampling requests",
    "prefix_acceptance": "P(accepted >= k)",
    "conditional_acceptance": "P(accepted >= k | accepted >= k - 1)",
    "teacher_forced_acceptance": "mean of 1 - TV(draft, target) at slot k after the target's own tokens",
    "speedup": "tokens per second against plain decoding by the same engine, same batch, same prompts",
    "latency_seconds": "wall-clock seconds per token of a running row, prefill excluded",
    "latency_from_parts_seconds": "(T_draft + T_verify) / tau",
    "overhead_share": "share of the rounds' wall clock outside drafting and the target's forward",
}


@dataclass(frozen=True)
class Group:
    """All units of one prompt set at one temperature: their lines and their facts."""

    prompts: str
    temperature: float
    lines: Sequence[dict[str, Any]]
    facts: Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Setting:
    """What every record of a run shares."""

    drafter: str
    block_size: int
    batch_size: int
    resamples: int
    seed: int
    policy: str = "full"


def build(groups: Sequence[Group], setting: Setting) -> list[dict[str, Any]]:
    """Records of all groups, and of all prompt sets together where there are several."""
    records = []
    for group in [*groups, *_together(groups)]:
        domains = sorted({str(line["domain"]) for line in group.lines})
        for domain in [None, *(domains if len(domains) > 1 else [])]:
            chosen = [line for line in group.lines if domain in (None, line["domain"])]
            records.append(_record(group, domain, chosen, setting))
            if any("lookup" in line for line in chosen):
                records.append(_lookup_record(group, domain, chosen, setting))
    return records


def _together(groups: Sequence[Group]) -> list[Group]:
    if len({group.prompts for group in groups}) < 2:
        return []
    return [
        Group(
            "all",
            temperature,
            [line for group in groups if group.temperature == temperature for line in group.lines],
            [fact for group in groups if group.temperature == temperature for fact in group.facts],
        )
        for temperature in sorted({group.temperature for group in groups})
    ]


def _base(group: Group, domain: str | None, drafter: str, setting: Setting) -> dict[str, Any]:
    return {
        "drafter": drafter, "prompts": group.prompts, "domain": domain, "temperature": group.temperature,
        "batch_size": setting.batch_size, "policy": setting.policy,
    }  # fmt: skip


def _record(group: Group, domain: str | None, lines: Sequence[dict[str, Any]], setting: Setting) -> dict[str, Any]:
    record = _base(group, domain, setting.drafter, setting)
    record.update(_endings(lines))
    record.update(_acceptance(lines, lambda line: [step for turn in line["turns"] for step in turn["rounds"]], setting))
    record.update(_teacher_forced(lines, setting.block_size))
    if group.temperature == 0.0 and any("difference" in line for line in lines):
        record["lossless"] = _lossless(lines)
    if domain is None:
        record.update(_speed(group.facts))
    return record


def _lookup_record(
    group: Group, domain: str | None, lines: Sequence[dict[str, Any]], setting: Setting
) -> dict[str, Any]:
    record = _base(group, domain, "prompt-lookup", setting)
    record["policy"] = "full"
    record["num_prompts"] = len(lines)

    def steps(line: dict[str, Any]) -> list[Any]:
        return [step for turn in line["lookup"] for step in turn]

    record.update(_acceptance(lines, steps, setting))
    # No scheduler cut these blocks: a slot without a proposal is a miss, not a slot that was never looked at.
    whole = Rounds.of([[(setting.block_size, *step[1:]) for step in steps(line)] for line in lines])
    record.update(curves(whole, setting.block_size))
    return record


def _acceptance(
    lines: Sequence[dict[str, Any]], steps: Callable[[dict[str, Any]], list[Any]], setting: Setting
) -> dict[str, Any]:
    rounds = Rounds.of([steps(line) for line in lines])
    return summarise(rounds, block_size=setting.block_size, resamples=setting.resamples, seed=setting.seed)


def _endings(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How generations ended (EVA-09): shares of answers that stopped or were cut, of prompts that failed."""
    reasons = [turn["finish_reason"] for line in lines for turn in line["turns"]]
    errors = [line for line in lines if line["error"] is not None]
    return {
        "num_prompts": len(lines),
        "num_answers": len(reasons),
        "num_tokens": sum(len(turn["ids"]) for line in lines for turn in line["turns"]),
        "stop_rate": ratio(reasons.count("stop"), len(reasons)),
        "truncated_rate": ratio(reasons.count("length"), len(reasons)),
        "error_rate": ratio(len(errors), len(lines)),
        "errors": [{"id": line["id"], "error": line["error"]} for line in errors],
    }


def _teacher_forced(lines: Iterable[dict[str, Any]], block_size: int) -> dict[str, Any]:
    sums, counts = [0.0] * block_size, [0] * block_size
    for line in lines:
        for slot, (total, count) in enumerate(line.get("teacher_forced") or ()):
            sums[slot] += total
            counts[slot] += count
    return {
        "teacher_forced_acceptance": [ratio(total, count) for total, count in zip(sums, counts, strict=True)],
        "teacher_forced_acceptance_n": counts,
    }


def _lossless(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Greedy outputs against plain decoding (S22): equal, near-ties (listed), and faults (listed)."""
    compared = [line for line in lines if "difference" in line and line["error"] is None]
    different = [{"id": line["id"], **line["difference"]} for line in compared if line["difference"] is not None]
    return {
        "compared": len(compared),
        "equal": len(compared) - len(different),
        "near_ties": [item for item in different if item["near_tie"]],
        "faults": [item for item in different if not item["near_tie"]],
    }


def _speed(facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Speed and time split, summed over all units."""
    draft = _total([fact["draft"] for fact in facts])
    out: dict[str, Any] = {"tokens_per_second": ratio(draft["tokens"], draft["wall_seconds"])}
    seconds = draft["seconds"]
    out["seconds"] = {name: round(value, 4) for name, value in sorted(seconds.items())}
    in_rounds = sum(value for name, value in seconds.items() if name != "prefill")
    working = seconds.get("draft", 0.0) + seconds.get("verify", 0.0)
    tau = ratio(draft["round_tokens"], draft["row_rounds"])
    if tau and draft["batch_rounds"]:
        out["latency_seconds"] = in_rounds / draft["batch_rounds"] / tau
        out["latency_from_parts_seconds"] = working / draft["batch_rounds"] / tau
    out["overhead_share"] = ratio(in_rounds - working, in_rounds)
    if all("vanilla" in fact for fact in facts):
        vanilla = _total([fact["vanilla"] for fact in facts])
        out["vanilla_tokens_per_second"] = ratio(vanilla["tokens"], vanilla["wall_seconds"])
        out["vanilla_seconds"] = {name: round(value, 4) for name, value in sorted(vanilla["seconds"].items())}
        if out["tokens_per_second"] and out["vanilla_tokens_per_second"]:
            out["speedup"] = out["tokens_per_second"] / out["vanilla_tokens_per_second"]
    return out


def _total(timings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    seconds: dict[str, float] = {}
    for timing in timings:
        for name, value in timing["seconds"].items():
            seconds[name] = seconds.get(name, 0.0) + value
    keys = ("batch_rounds", "row_rounds", "round_tokens", "tokens", "wall_seconds")
    return {"seconds": seconds, **{key: sum(timing[key] for timing in timings) for key in keys}}


def without_timings(report: dict[str, Any]) -> dict[str, Any]:
    """The part of a report that fixed seeds determine."""
    records = [{key: value for key, value in record.items() if key not in TIMINGS} for record in report["records"]]
    return {**report, "records": records}
