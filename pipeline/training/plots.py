"""Curves of a run, from its journal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.training.journal import read

PLOTS: dict[str, Sequence[str]] = {
    "loss": ("loss", "ce", "tv", "kl", "confidence_loss", "confidence_excess"),
    "acceptance": ("acceptance", "greedy", "in_vocabulary"),
    "tau": ("expected_tau",),
    "acceptance_by_slot": tuple(f"acceptance_{slot}" for slot in range(1, 33)),
    "learning_rate": ("learning_rate", "grad_norm"),
}


def draw(journal: Path, folder: Path) -> list[Path]:
    """One PNG per entry of `PLOTS` that has data: training as lines (smoothed where long), validation as marks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = list(read(journal))
    written = []
    for title, names in PLOTS.items():
        figure, axes = pyplot.subplots(figsize=(7, 4))
        for index, name in enumerate(names):
            _curve(axes, lines, name, f"C{index % 10}")
        if axes.has_data():
            axes.set(xlabel="step", title=title.replace("_", " "))
            axes.legend(fontsize=7)
            axes.grid(alpha=0.3)
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{title}.png"
            figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Software": None})
            written.append(path)
        pyplot.close(figure)
    return written


def _curve(axes: Any, lines: list[dict[str, Any]], name: str, colour: str) -> None:
    for split in ("train", "validation"):
        points = [(line["step"], line[name]) for line in lines if line.get("split") == split and name in line]
        if not points:
            continue
        steps, values = zip(*points, strict=True)
        if split == "train":
            axes.plot(steps, _smooth(values), color=colour, linewidth=1, label=name)
        else:
            axes.plot(steps, values, color=colour, marker="o", markersize=4, linestyle="--", label=f"{name} (held out)")


def _smooth(values: Sequence[float]) -> list[float]:
    """Mean over a window of 1 % of the run, ending at each step."""
    window = max(1, len(values) // 100)
    total, out = 0.0, []
    for index, value in enumerate(values):
        total += value - (values[index - window] if index >= window else 0.0)
        out.append(total / min(index + 1, window))
    return out
