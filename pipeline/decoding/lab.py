"""The scheduler lab: recorded rounds replayed over an SPS table at any concurrency, policy by policy (S26-S28).

    results = run_lab(trace, sps, concurrencies=[1, 8, 64], temperatures=sts)

R users decode at once; each step every user stands at one of its recorded rounds, the policy schedules lengths from the
confidences, and the step takes 1 / SPS(sum of 1 + length). What a user gains is known: a round recorded at full block
accepts min(length, recorded). After a cut round the replay goes on with the next recorded one, as if the drafter did
equally well from there. Throughput claims come from here, where cost is the table's, not from an engine that pads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.speculative.scheduler import DIAGNOSTIC, Scheduler, SpsTable, static_threshold, survival
from pipeline.speculative.sts import Records, scaled

STEPS = 200
THRESHOLDS = [step / 20 for step in range(20)]
_TOLERANCE = 0.005


@dataclass(frozen=True)
class Trace:
    """Recorded rounds with calibrated confidences, in order within each prompt (`prompt_N`)."""

    confidence_NK: Tensor
    accepted_N: Tensor
    stopped_N: Tensor
    prompt_N: Tensor

    @classmethod
    def of(cls, records: Records, prompt_N: Tensor, temperatures: Sequence[float] | None) -> Trace:
        """A trace of recorded rounds; `temperatures` are the STS ones [K], None for raw confidences."""
        scale = 1.0 if temperatures is None else torch.tensor(list(temperatures))
        confidence = scaled(records.logits_NK.float(), scale)
        return cls(confidence, records.accepted_N.long(), records.stopped_N, prompt_N)

    def gains(self, index: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """(accepted drafts, tokens) of rounds `index` at scheduled lengths; no bonus after an accepted stop."""
        recorded = self.accepted_N[index]
        accepted = torch.minimum(recorded, lengths)
        ended = self.stopped_N[index] & (lengths >= recorded)
        return accepted, accepted + (~ended).long()

    def play(self, users: int, steps: int, seed: int) -> Tensor:
        """Rounds [steps, users]: every user goes through prompts drawn at random, each from its first round on."""
        generator = torch.Generator().manual_seed(seed)
        _, counts = self.prompt_N.unique_consecutive(return_counts=True)
        starts = counts.cumsum(0) - counts
        drawn = torch.randint(0, len(counts), (users, steps), generator=generator)
        columns = []
        for row in drawn:
            rounds = torch.cat([
                torch.arange(int(starts[p]), int(starts[p] + counts[p]))
                for p in row[: _enough(counts[row], steps)].tolist()
            ])  # fmt: skip
            columns.append(rounds[:steps])
        return torch.stack(columns, 1)


def _enough(counts: Tensor, steps: int) -> int:
    """How many prompts, in order, give at least `steps` rounds."""
    return int((counts.cumsum(0) < steps).sum()) + 1


def replay(trace: Trace, rounds_SR: Tensor, scheduler: Scheduler, sps: SpsTable) -> dict[str, float]:
    """Throughput (tokens/s), per-user speed, verify budget (drafts per user and step) and waste of one policy."""
    lengths_SR = torch.stack([scheduler.lengths(trace.confidence_NK[index]) for index in rounds_SR])
    accepted_SR, tokens_SR = trace.gains(rounds_SR, lengths_SR)
    steps, users = rounds_SR.shape
    seconds = float((1.0 / sps(users + lengths_SR.sum(1))).sum())
    tokens, scheduled = int(tokens_SR.sum()), int(lengths_SR.sum())
    return {
        "throughput": tokens / seconds,
        "user_tokens_per_second": tokens / seconds / users,
        "verify_budget": scheduled / (steps * users),
        "tau": tokens / (steps * users),
        "waste": 1.0 - int(accepted_SR.sum()) / scheduled if scheduled else 0.0,
    }


def run_lab(
    trace: Trace, sps: SpsTable, *, concurrencies: Sequence[int], steps: int = STEPS, seed: int = 0
) -> list[dict[str, Any]]:
    """One row per (concurrency, policy); all policies of a concurrency see the same rounds."""
    block_size = trace.confidence_NK.shape[1]
    rows = []
    for users in concurrencies:
        rounds_SR = trace.play(users, steps, seed)
        policies: dict[str, Scheduler] = {
            **{f"static_{length}": Scheduler("static_length", length=length) for length in range(block_size + 1)},
            "early_stop": Scheduler("early_stop", sps=sps),
            "lagged_global": Scheduler("lagged_global", sps=sps),
        }
        for name, scheduler in policies.items():
            rows.append({"concurrency": users, "policy": name, **replay(trace, rounds_SR, scheduler, sps)})
    return rows


def shortfalls(
    rows: Sequence[dict[str, Any]], trace: Trace, sps: SpsTable, *, steps: int = STEPS, seed: int = 0
) -> list[str]:
    """Where a static length beats the scheduler by more than half a percent, and what is known of why.

    `trace`, `sps`, `steps` and `seed` as in the `run_lab` that gave `rows`.
    """
    found = []
    for users in dict.fromkeys(row["concurrency"] for row in rows):
        here = {row["policy"]: row for row in rows if row["concurrency"] == users}
        name, best = max(
            ((name, row["throughput"]) for name, row in here.items() if name.startswith("static")),
            key=lambda item: item[1],
        )
        enough = best * (1 - _TOLERANCE)
        short = [policy for policy in _HANDICAPS if here[policy]["throughput"] < enough]
        if not short:
            continue
        rounds_SR = trace.play(users, steps, seed)
        free = replay(trace, rounds_SR, Scheduler(DIAGNOSTIC, sps=sps), sps)["throughput"]
        for policy in short:
            why = _HANDICAPS[policy] if free >= enough else _promise(trace, rounds_SR)
            found.append(
                f"{policy} at {users} users: {here[policy]['throughput']:.1f} tokens/s, {name} {best:.1f}; "
                f"the best budget of every step on these confidences gives {free:.1f}: {why}"
            )
    return found


# What keeps a policy from the best budget of every step.
_HANDICAPS = {
    "early_stop": "early stop does not look past the first draft that gains nothing",
    "lagged_global": "the budget is that of two steps before",
}


def _promise(trace: Trace, rounds_SR: Tensor) -> str:
    index = rounds_SR.flatten()
    promised = float(survival(trace.confidence_NK[index]).sum(1).mean())
    kept = float(trace.accepted_N[index].float().mean())
    return f"they promise {promised:.2f} accepted drafts a round, {kept:.2f} were accepted"


def threshold_sweep(trace: Trace) -> list[dict[str, float]]:
    """Drafts scheduled, tokens per round and share of scheduled drafts accepted, by survival threshold."""
    everything = torch.arange(len(trace.accepted_N))
    rows = []
    for threshold in THRESHOLDS:
        lengths = static_threshold(trace.confidence_NK, threshold)
        accepted, tokens = trace.gains(everything, lengths)
        scheduled = int(lengths.sum())
        rows.append({
            "threshold": threshold,
            "scheduled_per_round": scheduled / len(everything),
            "tau": int(tokens.sum()) / len(everything),
            "accepted_share": int(accepted.sum()) / scheduled if scheduled else 0.0,
        })  # fmt: skip
    return rows
