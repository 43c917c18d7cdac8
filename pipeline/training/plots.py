"""Curves of a run, from its journals: one picture per question, one panel per term.

    draw(artifact.path, artifact.path / "plots")

Training is a line (the mean over 1 % of the run, ending at each step), validation is marks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.artifact import atomic_path
from pipeline.training.journal import METRICS, TIMINGS, read

Lines = Sequence[dict[str, Any]]

# Picture -> its panels; a panel is the names drawn on one pair of axes.
PLOTS: dict[str, Sequence[Sequence[str]]] = {
    "loss": [["loss"], ["ce"], ["tv"], ["kl"], ["confidence_loss"], ["confidence_excess"]],
    "acceptance": [["acceptance", "greedy", "in_vocabulary"]],
    "acceptance_by_slot": [[f"acceptance_{slot}" for slot in range(1, 33)]],
    "tau": [["expected_tau"]],
    "learning_rate": [["learning_rate"], ["grad_norm"]],
    "throughput": [["tokens_per_second"], ["seconds"]],
}
_COLUMNS = 3


def draw(run: Path, folder: Path) -> list[Path]:
    """One PNG per entry of `PLOTS` that has data in the journals below `run`, which may still be growing."""
    lines = [*read(run / METRICS), *({"split": "train", **line} for line in read(run / TIMINGS))]
    written = []
    for title, panels in PLOTS.items():
        filled = [known for panel in panels if (known := [name for name in panel if _has(lines, name)])]
        if filled:
            written.append(_picture(lines, title, filled, folder / f"{title}.png"))
    return written


def _has(lines: Lines, name: str) -> bool:
    return any(name in line for line in lines)


def _picture(lines: Lines, title: str, panels: Sequence[Sequence[str]], path: Path) -> Path:
    from matplotlib.figure import Figure

    columns = min(len(panels), _COLUMNS)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(max(3.4 * columns, 5.2), 2.8 * rows + 0.6), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).reshape(-1)
    for axes in grid[len(panels) :]:
        axes.axis("off")
    for axes, names in zip(grid, panels, strict=False):
        for colour, name in zip(_colours(len(names)), names, strict=True):
            _curve(axes, lines, name, colour)
        axes.set(xlabel="step")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(fontsize=7, ncols=1 + len(names) // 4)
        axes.grid(alpha=0.3)
    figure.suptitle(title.replace("_", " "))
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110, metadata={"Software": None})
    return path


def _colours(count: int) -> Sequence[Any]:
    """Distinct ones for a few lines; along a scale for many, where neighbours are neighbouring slots."""
    from matplotlib import colormaps

    if count < 4:
        return [f"C{index}" for index in range(count)]
    return [colormaps["viridis"](index / count) for index in range(count)]


def _curve(axes: Any, lines: Lines, name: str, colour: Any) -> None:
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
