"""The curves of a run as one picture: at most six small panels, raw values faint, a smoothed line over them.

Does not know how the numbers came about. Matplotlib is imported only when something is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from turnwise.observe.metric_names import value
from turnwise.observe.trackers import read_rows

# Okabe and Ito's colours, distinguishable with every kind of colour blindness
BLUE, ORANGE, GREEN, PINK, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#555555"


@dataclass(frozen=True, slots=True)
class Curve:
    figure: str
    label: str
    colour: str


@dataclass(frozen=True, slots=True)
class Pane:
    """One small plot; the second curve, if any, has its own axis on the right."""

    title: str
    left: Curve
    right: Curve | None = None
    share: bool = False  # the left axis runs from 0 to 1


PANES = (
    Pane("Success", Curve("success", "success", BLUE), share=True),
    Pane("Reward", Curve("reward", "reward", GREEN)),
    Pane("Entropy", Curve("entropy", "entropy", PINK)),
    Pane("Turns and tool errors", Curve("turns", "turns", BLUE), Curve("tool_errors", "tool errors", ORANGE)),
    Pane("Clipped share and KL", Curve("clip", "clipped", BLUE), Curve("kl", "KL", ORANGE)),
    Pane("Tokens per second", Curve("tokens_per_second", "tokens/s", GREY)),
)


def curves(source: str | Path | Sequence[Mapping[str, Any]], out: str | Path, title: str = "") -> Path:
    """Draw the metrics file or rows ``source`` into the PNG ``out``. Panels without data are left out."""
    rows = read_rows(source) if isinstance(source, str | Path) else list(source)
    panes = [pane for pane in PANES if _has(rows, pane)] or [PANES[0]]
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # the object interface: no global state of a notebook or another thread is touched
    columns = min(3, len(panes))
    lines = -(-len(panes) // columns)
    figure = Figure(figsize=(4.2 * columns, 2.9 * lines + 0.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    for place, pane in enumerate(panes):
        _draw(figure.add_subplot(lines, columns, place + 1), pane, rows)
    if title:
        figure.suptitle(title, fontsize=13, fontweight="bold")
    figure.savefig(out)
    return Path(out)


def smooth(values: np.ndarray, span: float) -> np.ndarray:
    """Gaussian mean over about ``span`` values on both sides, so that the line does not lag behind its points."""
    reach = int(2 * span) + 1
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / max(span / 2, 1e-3)) ** 2)
    # "full" and cut by hand: numpy's "same" returns the longer of its two arguments
    middle = slice(reach, reach + len(values))
    return np.convolve(values, kernel)[middle] / np.convolve(np.ones(len(values)), kernel)[middle]


def _series(rows: Sequence[Mapping[str, Any]], figure: str) -> tuple[np.ndarray, np.ndarray]:
    points = [(row["step"], seen) for row in rows if (seen := value(row, figure)) is not None]
    array = np.array(sorted(points), dtype=float).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def _has(rows: Sequence[Mapping[str, Any]], pane: Pane) -> bool:
    wanted = [pane.left.figure, *([pane.right.figure] if pane.right else []), *(["evaluation"] if pane.share else [])]
    return any(value(row, figure) is not None for row in rows for figure in wanted)


def _draw(axes: Any, pane: Pane, rows: Sequence[Mapping[str, Any]]) -> None:
    axes.set_title(pane.title, fontsize=10.5, loc="left")
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)
    axes.set_xlabel("step", fontsize=8.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.locator_params(axis="x", integer=True, nbins=6)
    _line(axes, pane.left, rows)
    if pane.share:
        axes.set_ylim(-0.05, 1.2)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
        _evaluations(axes, rows)
    if pane.right is not None and any(value(row, pane.right.figure) is not None for row in rows):
        other = axes.twinx()
        other.tick_params(labelsize=8, colors=pane.right.colour)
        other.spines["top"].set_visible(False)
        _line(other, pane.right, rows, dashed=True)
        other.set_ylabel(pane.right.label, fontsize=8.5, color=pane.right.colour)
        axes.set_ylabel(pane.left.label, fontsize=8.5, color=pane.left.colour)
        axes.tick_params(axis="y", colors=pane.left.colour)


def _line(axes: Any, curve: Curve, rows: Sequence[Mapping[str, Any]], dashed: bool = False) -> None:
    steps, values = _series(rows, curve.figure)
    if len(steps) == 0:
        return
    span = min(20.0, len(steps) / 15)
    if span > 1:
        axes.plot(steps, values, color=curve.colour, alpha=0.22, linewidth=0.8)
    marker = "o" if len(steps) < 3 else ""  # a line of one point is invisible
    style = (0, (4, 1.5)) if dashed else "-"  # dash as well as colour: it must survive a grey printer
    axes.plot(
        steps, smooth(values, span), color=curve.colour, linewidth=1.8, linestyle=style, marker=marker, markersize=4
    )


def _evaluations(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Before and after are named; evaluations between them are small marks."""
    steps, values = _series(rows, "evaluation")
    if len(steps) == 0:
        return
    axes.plot(steps, values, linestyle="none", marker="D", markersize=4.5, color=ORANGE, label="evaluation", zorder=4)
    ends = [(0, "before")] if len(steps) == 1 else [(0, "before"), (-1, "after")]
    for place, name in ends:
        axes.plot(steps[place], values[place], "D", markersize=8, color=ORANGE, markeredgecolor="white", zorder=5)
        first = place == 0
        axes.annotate(
            f"{name} {values[place]:.0%}",
            (steps[place], values[place]),
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
