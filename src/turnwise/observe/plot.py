"""Plots the metrics of a run as one picture: at most six panels, faint raw values with a smoothed line over them.

Does not know how the numbers were computed. Imports Matplotlib only when it plots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from turnwise.observe.metric_names import metric_value
from turnwise.observe.trackers import read_rows

# Okabe and Ito's colours, distinguishable with every kind of colour blindness
BLUE, ORANGE, GREEN, PINK, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#555555"


@dataclass(frozen=True, slots=True)
class PlotLine:
    """One metric as a line."""

    metric: str
    label: str
    colour: str


@dataclass(frozen=True, slots=True)
class PlotPanel:
    """One small plot; the second line, if any, has its own axis on the right."""

    title: str
    left: PlotLine
    right: PlotLine | None = None
    is_rate: bool = False  # the left axis runs from 0 to 1
    evaluated: str = ""  # the metric of held-out tasks that is marked on the left axis


PANELS = (
    PlotPanel("Success", PlotLine("success", "success", BLUE), is_rate=True, evaluated="evaluated_success"),
    PlotPanel("Reward", PlotLine("reward", "reward", GREEN), evaluated="evaluated_reward"),
    PlotPanel("Entropy", PlotLine("entropy", "entropy", PINK)),
    PlotPanel(
        "Turns and tool errors", PlotLine("turns", "turns", BLUE), PlotLine("tool_errors", "tool errors", ORANGE)
    ),
    PlotPanel("Clipped share and KL", PlotLine("clip", "clipped", BLUE), PlotLine("kl", "KL", ORANGE)),
    PlotPanel("Tokens per second", PlotLine("tokens_per_second", "tokens/s", GREY)),
)


def curves(source: str | Path | Sequence[Mapping[str, Any]], out: str | Path, title: str = "") -> Path:
    """Plot the metrics file or rows ``source`` into the PNG ``out``. Panels without data are left out."""
    rows = read_rows(source) if isinstance(source, str | Path) else list(source)
    panels = [panel for panel in PANELS if _has_data(rows, panel)] or [PANELS[0]]
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # the object interface, not pyplot: it has no global state to share with a notebook or another thread
    columns = min(3, len(panels))
    rows_of_panels = -(-len(panels) // columns)
    figure = Figure(figsize=(4.2 * columns, 2.9 * rows_of_panels + 0.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    for index, panel in enumerate(panels):
        _draw(figure.add_subplot(rows_of_panels, columns, index + 1), panel, rows)
    if title:
        figure.suptitle(title, fontsize=13, fontweight="bold")
    figure.savefig(out)
    return Path(out)


def smooth(values: np.ndarray, span: float) -> np.ndarray:
    """Gaussian mean over about ``span`` values on both sides, so that the line does not lag behind the data."""
    radius = int(2 * span) + 1
    kernel = np.exp(-0.5 * (np.arange(-radius, radius + 1) / max(span / 2, 1e-3)) ** 2)
    # mode "full" and cut here: numpy's "same" has the length of the longer argument
    middle = slice(radius, radius + len(values))
    return np.convolve(values, kernel)[middle] / np.convolve(np.ones(len(values)), kernel)[middle]


def _series(rows: Sequence[Mapping[str, Any]], metric: str) -> tuple[np.ndarray, np.ndarray]:
    points = [(row["step"], value) for row in rows if (value := metric_value(row, metric)) is not None]
    array = np.array(sorted(points), dtype=float).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def _has_data(rows: Sequence[Mapping[str, Any]], panel: PlotPanel) -> bool:
    metrics = [panel.left.metric, *([panel.right.metric] if panel.right else []), *filter(None, [panel.evaluated])]
    return any(metric_value(row, metric) is not None for row in rows for metric in metrics)


def _draw(axes: Any, panel: PlotPanel, rows: Sequence[Mapping[str, Any]]) -> None:
    axes.set_title(panel.title, fontsize=10.5, loc="left")
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)
    axes.set_xlabel("step", fontsize=8.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.locator_params(axis="x", integer=True, nbins=6)
    _line(axes, panel.left, rows)
    if panel.is_rate:
        axes.set_ylim(-0.05, 1.2)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
    if panel.evaluated:
        _evaluations(axes, rows, panel.evaluated, ".0%" if panel.is_rate else ".3g")
    if panel.right is not None and any(metric_value(row, panel.right.metric) is not None for row in rows):
        other = axes.twinx()
        other.tick_params(labelsize=8, colors=panel.right.colour)
        other.spines["top"].set_visible(False)
        _line(other, panel.right, rows, dashed=True)
        other.set_ylabel(panel.right.label, fontsize=8.5, color=panel.right.colour)
        axes.set_ylabel(panel.left.label, fontsize=8.5, color=panel.left.colour)
        axes.tick_params(axis="y", colors=panel.left.colour)


def _line(axes: Any, line: PlotLine, rows: Sequence[Mapping[str, Any]], dashed: bool = False) -> None:
    steps, values = _series(rows, line.metric)
    if len(steps) == 0:
        return
    span = min(20.0, len(steps) / 15)
    if span > 1:
        axes.plot(steps, values, color=line.colour, alpha=0.22, linewidth=0.8)
    marker = "o" if len(steps) < 3 else ""  # a line through one point is invisible
    style = (0, (4, 1.5)) if dashed else "-"  # dashes as well as colour, for greyscale prints
    axes.plot(
        steps, smooth(values, span), color=line.colour, linewidth=1.8, linestyle=style, marker=marker, markersize=4
    )


def _evaluations(axes: Any, rows: Sequence[Mapping[str, Any]], metric: str, spec: str) -> None:
    """Label the evaluations before and after training; those in between are small marks."""
    steps, values = _series(rows, metric)
    if len(steps) == 0:
        return
    axes.plot(steps, values, linestyle="none", marker="D", markersize=4.5, color=ORANGE, label="evaluation", zorder=4)
    ends = [(0, "before")] if len(steps) == 1 else [(0, "before"), (-1, "after")]
    for index, name in ends:
        axes.plot(steps[index], values[index], "D", markersize=8, color=ORANGE, markeredgecolor="white", zorder=5)
        first = index == 0
        axes.annotate(
            f"{name} {format(values[index], spec)}",
            (steps[index], values[index]),
            xytext=(-4 if first else 4, 9),
            textcoords="offset points",
            ha="left" if first else "right",
            fontsize=8.5,
            color=ORANGE,
            fontweight="bold",
            zorder=6,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.8},
        )
    axes.legend(fontsize=7.5, frameon=False, loc="lower right")
