"""Figures of calibration and evaluation (matplotlib, no display)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.artifact import atomic_path


def _figure(columns: int, rows: int = 1, *, width: float = 3.2, height: float = 2.8) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False).reshape(-1)


def _save(figure: Any, path: Path) -> Path:
    """PNG without the date and version that would make equal figures differ."""
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png", metadata={"Software": None})
    return path


def reliability_plot(calibration: dict[str, Any], path: Path) -> Path | None:
    """Reliability diagram per slot before and after STS, on report prompts (paper Fig. 6)."""
    judged = calibration["report"]["all"]
    slots = [slot for slot, n in enumerate(judged["n"]) if n]
    if not slots:
        return None
    figure, axes = _figure(min(len(slots), 4), -(-len(slots) // 4))
    for axis in axes[len(slots) :]:
        axis.axis("off")
    for axis, slot in zip(axes, slots, strict=False):
        axis.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        for when, style in (("before", "o--"), ("after", "o-")):
            bins = [entry for entry in judged[f"reliability_{when}"][slot] if entry["n"]]
            error = judged[f"ece_{when}"][slot]
            axis.plot(
                [entry["value"] for entry in bins], [entry["outcome"] for entry in bins], style, markersize=3,
                label=f"{when}: ECE {error:.3f}",
            )  # fmt: skip
        axis.set(title=f"slot {slot + 1} (n = {judged['n'][slot]})", xlim=(0, 1), ylim=(0, 1))
        axis.set(xlabel="predicted survival", ylabel="accepted")
        axis.legend(fontsize=7)
    return _save(figure, path)


def acceptance_plot(records: Sequence[dict[str, Any]], path: Path) -> Path | None:
    """Conditional acceptance by slot, pooled prompts, one panel per temperature (paper Fig. 2)."""
    pooled = [record for record in records if record["domain"] is None and record["num_rounds"]]
    temperatures = sorted({record["temperature"] for record in pooled})
    if not pooled:
        return None
    figure, axes = _figure(len(temperatures), width=4.0)
    for axis, temperature in zip(axes, temperatures, strict=True):
        for record in pooled:
            if record["temperature"] != temperature:
                continue
            points = [
                (slot, value) for slot, value in enumerate(record["conditional_acceptance"], 1) if value is not None
            ]  # fmt: skip
            label = f"{record['drafter']}, {Path(record['prompts']).stem} (tau {record['tau']:.2f})"
            axis.plot(*zip(*points, strict=True), "o-", markersize=3, label=label)
        axis.set(title=f"T = {temperature:g}", xlabel="slot k", ylabel="P(k accepted | k - 1 accepted)", ylim=(0, 1))
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend(fontsize=7)
    return _save(figure, path)


def tau_plot(records: Sequence[dict[str, Any]], path: Path) -> Path | None:
    """Accepted length with its 95 % interval, pooled prompts: a panel per prompt set, a colour per drafter."""
    pooled = [record for record in records if record["domain"] is None and record["tau"] is not None]
    if not pooled:
        return None
    drafters = list(dict.fromkeys(record["drafter"] for record in pooled))
    temperatures = sorted({record["temperature"] for record in pooled})
    sets = list(dict.fromkeys(record["prompts"] for record in pooled))
    figure, axes = _figure(min(len(sets), 3), -(-len(sets) // 3), width=4.4, height=3.2)
    for axis in axes[len(sets) :]:
        axis.axis("off")
    for axis, name in zip(axes, sets, strict=False):
        for place, drafter in enumerate(drafters):
            mine = [record for record in pooled if (record["drafter"], record["prompts"]) == (drafter, name)]
            at = [temperatures.index(record["temperature"]) + (place + 0.5) / len(drafters) * 0.7 for record in mine]
            taus = [record["tau"] for record in mine]
            spread = [record["tau_interval"] or (record["tau"], record["tau"]) for record in mine]
            below = [max(tau - low, 0.0) for tau, (low, _) in zip(taus, spread, strict=True)]
            above = [max(high - tau, 0.0) for tau, (_, high) in zip(taus, spread, strict=True)]
            axis.errorbar(at, taus, yerr=[below, above], fmt="o", markersize=4, capsize=3, label=drafter)
        axis.set(title=Path(name).stem, ylabel="tokens per verify step (tau)", ylim=(0.95, None))
        axis.set_xticks([index + 0.35 for index in range(len(temperatures))], [f"T = {t:g}" for t in temperatures])
        axis.grid(axis="y", alpha=0.3)
    axes[0].legend(fontsize=7)
    return _save(figure, path)


def sps_plot(sps: dict[str, Any], path: Path) -> Path:
    """The SPS table: target forwards per second by batch tokens (paper Fig. 3)."""
    figure, axes = _figure(1, width=4.4)
    axes[0].plot(sps["sample_batch_tokens"], sps["sample_steps_per_sec"], "o-", markersize=3)
    axes[0].set(xlabel="tokens in the forward", ylabel="steps per second", xscale="log", ylim=(0, None))
    axes[0].set_title(sps["source"], fontsize=8)
    axes[0].grid(alpha=0.3)
    return _save(figure, path)


def codec_error_plot(errors: dict[int, float], codec: str, path: Path) -> Path:
    """What the cache's tap codec loses, by tapped layer."""
    figure, axes = _figure(1, width=4.4)
    axes[0].bar([str(layer) for layer in errors], list(errors.values()), width=0.6)
    axes[0].set(xlabel="tapped layer", ylabel="mean of |x' - x| / |x|")
    axes[0].set_title(f"codec {codec}", fontsize=8)
    return _save(figure, path)


def codec_plot(codecs: dict[str, Any], layers: Sequence[int], path: Path) -> Path:
    """What tap codecs cost: relative error by tapped layer, and change of acceptance against bf16 with its interval."""
    figure, axes = _figure(2, width=4.6, height=3.2)
    for name, facts in codecs.items():
        if errors := facts.get("relative_error_per_layer"):
            axes[0].plot([str(layer) for layer in layers], errors, "o-", markersize=3, label=name)
    changes = [facts["acceptance_change"] for facts in codecs.values()]
    for place, facts in enumerate(changes):
        axes[1].plot([place, place], facts["interval"] or [facts["change"]] * 2, color="0.6")
    axes[1].plot(range(len(changes)), [facts["change"] for facts in changes], "o", markersize=4)
    axes[1].axhline(0.0, color="0.7", linewidth=1)
    axes[0].set(xlabel="tapped layer", ylabel="|x' - x| / |x|")
    axes[0].set_yscale("symlog", linthresh=1e-3)
    axes[0].legend(fontsize=6, ncols=2)
    axes[1].set_xticks(range(len(codecs)), list(codecs), rotation=60, fontsize=7)
    axes[1].set(ylabel="change of acceptance")
    return _save(figure, path)


def sweep_plot(sweeps: dict[str, Sequence[dict[str, float]]], path: Path) -> Path:
    """Threshold sweep (paper Fig. 5): share of scheduled drafts accepted, and tokens per round for the drafts spent."""
    figure, axes = _figure(2, width=4.0)
    for name, rows in sweeps.items():
        thresholds = [row["threshold"] for row in rows]
        axes[0].plot(thresholds, [row["accepted_share"] for row in rows], label=name)
        axes[1].plot([row["scheduled_per_round"] for row in rows], [row["tau"] for row in rows], "o-", markersize=3)
    axes[0].set(xlabel="survival threshold", ylabel="accepted / scheduled", ylim=(0, 1))
    axes[1].set(xlabel="drafts scheduled per round", ylabel="tokens per round")
    axes[0].legend(fontsize=7)
    return _save(figure, path)


def lab_plot(rows: Sequence[dict[str, Any]], title: str, path: Path) -> Path:
    """The scheduler lab (paper Fig. 8): verify budget and throughput by concurrency, one line per policy."""
    figure, axes = _figure(2, width=4.4, height=3.4)
    for policy in dict.fromkeys(row["policy"] for row in rows):
        line = [row for row in rows if row["policy"] == policy]
        users = [row["concurrency"] for row in line]
        style: dict[str, Any] = {"linewidth": 1, "color": "0.75"} if policy.startswith("static") else {"linewidth": 2}
        axes[0].plot(users, [row["verify_budget"] for row in line], label=policy, **style)
        axes[1].plot(users, [row["throughput"] for row in line], label=policy, **style)
    for axis, label in zip(axes, ("drafts verified per user and step", "tokens per second"), strict=True):
        axis.set(xlabel="concurrent users", ylabel=label, xscale="log")
    axes[1].set_yscale("log")
    axes[0].legend(fontsize=6)
    figure.suptitle(title, fontsize=9)
    return _save(figure, path)
