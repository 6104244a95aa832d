"""Charts: one module for both of their forms.

In the page of ``turnwise view`` a chart is SVG text: only numbers and escaped labels enter it, and colours are CSS classes that
follow the page's light or dark theme; the page's script reads the points of a line chart from an attribute to show the one under
the pointer. A plotting library would fix the colours or add a script of its own. ``curves.png`` of a run directory is a picture,
because notebooks and model cards show one where they drop SVG: there Matplotlib draws, and it is imported only then. Does not
know how a number was computed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
from markupsafe import Markup, escape

from turnwise.core.text import printable_line
from turnwise.observe.numbers import finite_number
from turnwise.observe.trackers import read_rows

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 460, 180, 52, 22, 10, 12
POINTS = 600  # drawn of a long series: more than a screen resolves
# Okabe and Ito's colours, distinguishable with every kind of colour blindness
BLUE, ORANGE, GREEN, PINK, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#555555"
NOISE = 1e-6  # a share or a divergence below this is 0 but for rounding
PlotLine = tuple[str, str, str]  # metric, label, colour


# ------------------------------------------------------------------ what is drawn


@dataclass(frozen=True)
class Link:
    """A text that leads to another view: ``Link("3", "step", {"step": 3})``."""

    text: str
    view: str
    query: Mapping[str, Any] = field(default_factory=dict)

    @property
    def href(self) -> str:
        return f"{self.view}?{urlencode(self.query)}" if self.query else self.view


Cell = str | float | int | None | Link


@dataclass(frozen=True)
class Series:
    """One line of a chart; ``low`` and ``high`` bound an interval around it."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class LineChart:
    """Curves over steps."""

    title: str
    series: Sequence[Series]
    about: str = ""


@dataclass(frozen=True)
class HeatMap:
    """A number for each row and column, None where there is none; 0 to 1 is one colour scale, −1 to 1 another."""

    title: str
    rows: Sequence[Cell]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    about: str = ""


@dataclass(frozen=True)
class Timeline:
    """Rows of segments ``(start, length, kind)`` in seconds."""

    title: str
    rows: Sequence[tuple[Cell, Sequence[tuple[float, float, str]]]]
    about: str = ""


@dataclass(frozen=True)
class TreeNode:
    """A trajectory in a tree of forks: where it leaves its parent, and what became of it."""

    id: str
    parent: str
    turn: int
    turns: int
    label: str
    value: float
    link: Link


@dataclass(frozen=True)
class ForkDiagram:
    """Trajectories that branch off one another, drawn as a tree."""

    title: str
    nodes: Sequence[TreeNode]


# ------------------------------------------------------------------- SVG of a page


def number(value: object) -> str:
    """A number as people read it: four significant digits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if math.isnan(value):
        return "–"
    return f"{value:.4g}"


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers that divide a range."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low]
    raw = (high - low) / count
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * m for m in (1, 2, 5, 10) if size * m >= raw)
    first = math.ceil(low / step) * step
    digits = max(0, -math.floor(math.log10(step)) + 1)  # a sum of steps misses 0 and round numbers by rounding
    return [round(first + i * step, digits) for i in range(int((high - first) / step + 1e-9) + 1)]


def line_chart(chart: LineChart, live: bool = True) -> Markup:
    """Lines over steps, each with its interval as a band. ``live``: with the points that the page's script shows."""
    thinned = []
    for s in chart.series:
        if len(s.x):
            every = max(1, -(-len(s.x) // POINTS))
            thinned.append(Series(s.name, *(list(values)[::every] for values in (s.x, s.y, s.low, s.high))))
    values = [v for s in thinned for v in (*s.y, *s.low, *s.high) if math.isfinite(v)]
    if not values:
        return Markup("")
    x0, x1 = min(min(s.x) for s in thinned), max(max(s.x) for s in thinned)
    y0, y1 = min(values), max(values)
    # a constant line gets a range, too
    flat = y1 - y0 <= NOISE * abs(y1)  # constant but for rounding
    pad = abs(y1) * 0.1 or 1.0 if flat else (y1 - y0) * 0.05
    y0, y1 = (0.0 if 0 <= y0 < 0.3 * y1 or y0 == y1 == 0 else y0 - pad), y1 + pad
    px = lambda x: LEFT + (x - x0) / max(x1 - x0, 1e-9) * (WIDTH - LEFT - RIGHT)  # noqa: E731
    py = lambda y: HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - BOTTOM - TOP)  # noqa: E731
    parts, marks = [], ticks(y0, y1, 3)
    for digits in range(4, 12):  # as many as it takes to tell the marks apart
        labels = [f"{mark:,.{digits}g}" for mark in marks]
        if len(set(labels)) == len(labels):
            break
    for y, text in zip(marks, labels, strict=True):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(y):.1f}" y2="{py(y):.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{py(y) + 3:.1f}" text-anchor="end">{escape(text)}</text>')
    for x in ticks(x0, x1, 5):
        if x == int(x):  # there is no half of a step
            at = f'x="{px(x):.1f}" y="{HEIGHT - 6}" text-anchor="middle"'
            parts.append(f'<text class="tick" {at}>{escape(number(int(x)))}</text>')
    for i, s in enumerate(thinned):
        if s.low:
            upper = [f"{px(x):.1f},{py(y):.1f}" for x, y in zip(s.x, s.high)]
            lower = [f"{px(x):.1f},{py(y):.1f}" for x, y in zip(s.x, s.low)]
            parts.append(f'<polygon class="band c{i % 6}" points="{" ".join([*upper, *reversed(lower)])}"/>')
        finite = [f"{px(x):.1f},{py(y):.1f}" for x, y in zip(s.x, s.y) if math.isfinite(y)]
        parts.append(f'<polyline class="line c{i % 6}" points="{" ".join(finite)}"/>')
        if finite:
            a, b = finite[-1].split(",")
            parts.append(f'<circle class="dot c{i % 6}" cx="{a}" cy="{b}" r="2.5"/>')
    shown = [
        {
            "name": s.name,
            "points": [[x, number(y), round(px(x), 1), round(py(y), 1)] for x, y in zip(s.x, s.y) if math.isfinite(y)],
        }
        for s in thinned
    ]
    return _svg(WIDTH, HEIGHT, parts, chart.title, points=json.dumps(shown) if live else "")


def heat_map(chart: HeatMap) -> Markup:
    """A row of cells for each label; from 0 (pale) to 1 (strong)."""
    cell, left, top = 14, 210, 18
    width = left + cell * max(1, len(chart.columns)) + 10
    parts = []
    for i, label in enumerate(chart.columns):
        if i % 5 == 0:
            parts.append(f'<text class="tick" x="{left + i * cell}" y="12">{escape(label)}</text>')
    for j, (name, values) in enumerate(zip(chart.rows, chart.values)):
        y = top + j * cell
        shown = _cell_text(name)
        short = shown if len(shown) <= 32 else f"…{shown[-31:]}"
        parts.append(f'<text class="tick" x="{left - 6}" y="{y + 11}" text-anchor="end">{escape(short)}</text>')
        for i, value in enumerate(values):
            if value is not None and math.isfinite(value):
                tip = f"{shown}, step {chart.columns[i]}: {value:.2f}"
                parts.append(
                    f'<rect class="heat" style="--v:{max(0.0, min(1.0, value)):.3f}" x="{left + i * cell}" y="{y}"'
                    f' width="{cell - 1}" height="{cell - 1}"><title>{escape(tip)}</title></rect>'
                )
    return _svg(width, top + cell * len(chart.rows) + 4, parts, chart.title, natural=True)


def timeline(chart: Timeline) -> Markup:
    """A bar of segments for each row, in seconds from the left."""
    row, left, width = 16, 120, 900
    longest = max((start + length for _, segments in chart.rows for start, length, _ in segments), default=0.0) or 1.0
    scale = (width - left - 10) / longest
    parts = []
    for x in ticks(0, longest, 8):
        at = left + x * scale
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="16" y2="{20 + row * len(chart.rows)}"/>')
        parts.append(f'<text class="tick" x="{at:.1f}" y="11" text-anchor="middle">{escape(number(x))} s</text>')
    for j, (name, segments) in enumerate(chart.rows):
        y = 20 + j * row
        text = _cell_text(name)[:18]
        parts.append(f'<text class="tick" x="{left - 6}" y="{y + 10}" text-anchor="end">{escape(text)}</text>')
        for start, length, kind in segments:
            tip = f"{_cell_text(name)}: {kind} {length:.3g} s"
            parts.append(
                f'<rect class="seg {escape(kind)}" x="{left + start * scale:.1f}" y="{y}"'
                f' width="{max(0.5, length * scale):.1f}" height="{row - 4}"><title>{escape(tip)}</title></rect>'
            )
    return _svg(width, 24 + row * len(chart.rows), parts, chart.title, natural=True)


def fork_tree(chart: ForkDiagram, linked: bool = True) -> Markup:
    """One row for each trajectory; a branch leaves its parent's row at the turn where it forks."""
    nodes = _in_tree_order(chart.nodes)
    row, left, turn_width = 22, 20, 44
    depth = {"": 0}
    for node in nodes:  # column of the first turn: after the parent's turns up to the fork
        depth[node.id] = depth.get(node.parent, 0) + (node.turn + 1 if node.parent else 0)
    widest = max((depth[n.id] + max(1, n.turns) for n in nodes), default=1)
    values = [n.value for n in nodes]
    low, high = min(values, default=0.0), max(values, default=1.0)
    y_of = {node.id: 16 + i * row for i, node in enumerate(nodes)}
    parts = []
    for node in nodes:
        y, start = y_of[node.id], left + depth[node.id] * turn_width
        end = start + max(1, node.turns) * turn_width
        if node.parent in y_of:
            py = y_of[node.parent]
            parts.append(
                f'<path class="branch" d="M{start - turn_width / 2:.0f},{py} V{y - 6} Q{start - turn_width / 2:.0f},{y}'
                f' {start - turn_width / 2 + 8:.0f},{y} H{start}"/>'
            )
        parts.append(f'<line class="stem" x1="{start}" x2="{end}" y1="{y}" y2="{y}"/>')
        for k in range(max(1, node.turns)):
            parts.append(f'<circle class="turn" cx="{start + (k + 0.5) * turn_width}" cy="{y}" r="4"/>')
        share = (node.value - low) / (high - low) if high > low else 0.5
        name = escape(printable_line(node.label))
        label = f'<text class="leaf" style="--v:{share:.2f}" x="{end + 8}" y="{y + 4}">{name}</text>'
        parts.append(f'<a href="{escape(node.link.href)}">{label}</a>' if linked else label)
    return _svg(left + widest * turn_width + 180, 16 + row * len(nodes), parts, chart.title, natural=True)


def _in_tree_order(nodes: Sequence[TreeNode]) -> list[TreeNode]:
    """Parents before children, each child after its parent's subtree so far; a cycle cannot occur in a ledger."""
    children: dict[str, list[TreeNode]] = {}
    ids = {node.id for node in nodes}
    for node in nodes:
        children.setdefault(node.parent if node.parent in ids else "", []).append(node)
    out: list[TreeNode] = []
    stack = list(reversed(children.get("", [])))
    while stack:
        node = stack.pop()
        out.append(node)
        stack += list(reversed(children.get(node.id, [])))
    return out


def _cell_text(cell: Cell) -> str:
    return printable_line(cell.text if isinstance(cell, Link) else number(cell))


def _svg(
    width: float, height: float, parts: Sequence[str], title: str, natural: bool = False, points: str = ""
) -> Markup:
    """``natural``: drawn at its own size, beside scroll bars where that is wider than the page; otherwise as wide as its card."""
    size = f' width="{width:.0f}" height="{height:.0f}"' if natural else ""
    size += f' data-series="{escape(points)}"' if points else ""
    label = escape(printable_line(title))
    head = f'<svg class="chart" role="img" viewBox="0 0 {width:.0f} {height:.0f}"{size} aria-label="{label}">'
    return Markup(head + "".join(parts) + "</svg>")


# ---------------------------------------------------------------- picture of a run


@dataclass(frozen=True, slots=True)
class PlotPanel:
    """One small plot; the second line, if any, has its own axis on the right."""

    title: str
    left: PlotLine
    right: PlotLine | None = None
    is_rate: bool = False  # the left axis runs from 0 to 1
    evaluated: str = ""  # the metric of held-out tasks that is marked on the left axis
    least: float = 0.0  # a line that stays below this is not drawn

    def shows(self, rows: Sequence[Mapping[str, Any]], *metrics: str) -> bool:
        """Whether one of these metrics has something to draw."""
        numbers = [finite_number(row.get(metric)) for row in rows for metric in metrics]
        return any(value is not None and abs(value) >= self.least for value in numbers)


PANELS = (
    PlotPanel("Success", ("success", "success", BLUE), is_rate=True, evaluated="eval/success"),
    PlotPanel("Reward", ("reward", "reward", GREEN), evaluated="eval/reward"),
    PlotPanel("Entropy", ("entropy", "entropy", PINK)),
    PlotPanel("Turns", ("turns", "turns", BLUE), ("tool_errors", "tool errors", ORANGE)),
    # weights that have not moved since they sampled differ by rounding, which an axis of its own would blow up
    PlotPanel("Clipped share", ("clip_share", "clipped", BLUE), ("kl/behaviour", "KL", ORANGE), least=NOISE),
    PlotPanel("Tokens per second", ("tokens_per_second", "tokens/s", GREY)),
)


def curves(source: str | Path | Sequence[Mapping[str, Any]], out: str | Path, title: str = "") -> Path:
    """Plot the metrics file or rows ``source`` into the PNG ``out``. Panels without data are left out."""
    rows = read_rows(source) if isinstance(source, str | Path) else list(source)
    lines = {panel: [line[0] for line in (panel.left, panel.right) if line] for panel in PANELS}
    panels = [panel for panel in PANELS if panel.shows(rows, *lines[panel], panel.evaluated)] or [PANELS[0]]
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
    points = [(row["step"], value) for row in rows if (value := finite_number(row.get(metric))) is not None]
    array = np.array(sorted(points), dtype=float).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def _draw(axes: Any, panel: PlotPanel, rows: Sequence[Mapping[str, Any]]) -> None:
    right = panel.right if panel.right and panel.shows(rows, panel.right[0]) else None
    axes.set_title(f"{panel.title} and {right[1]}" if right else panel.title, fontsize=10.5, loc="left")
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
    if right:
        _, label, colour = right
        other = axes.twinx()
        other.tick_params(labelsize=8, colors=colour)
        other.spines["top"].set_visible(False)
        _line(other, right, rows, dashed=True)
        other.set_ylabel(label, fontsize=8.5, color=colour)
        _, label, colour = panel.left
        axes.set_ylabel(label, fontsize=8.5, color=colour)
        axes.tick_params(axis="y", colors=colour)


def _line(axes: Any, line: PlotLine, rows: Sequence[Mapping[str, Any]], dashed: bool = False) -> None:
    metric, _, colour = line
    steps, values = _series(rows, metric)
    if len(steps) == 0:
        return
    span = min(20.0, len(steps) / 15)
    if span > 1:
        axes.plot(steps, values, color=colour, alpha=0.22, linewidth=0.8)
    marker = "o" if len(steps) < 3 else ""  # a line through one point is invisible
    style = (0, (4, 1.5)) if dashed else "-"  # dashes as well as colour, for greyscale prints
    look = {"color": colour, "linewidth": 1.8, "linestyle": style, "marker": marker, "markersize": 4}
    axes.plot(steps, smooth(values, span), **look)


def _evaluations(axes: Any, rows: Sequence[Mapping[str, Any]], metric: str, spec: str) -> None:
    """Label the evaluations before and after training; those in between are small marks."""
    steps, values = _series(rows, metric)
    if len(steps) == 0:
        return
    axes.plot(steps, values, linestyle="none", marker="D", markersize=4.5, color=ORANGE, label="evaluation", zorder=4)
    words = {"textcoords": "offset points", "fontsize": 8.5, "color": ORANGE, "fontweight": "bold", "zorder": 6}
    for index, name in ((0, "before"), (-1, "after"))[: len(steps)]:
        axes.plot(steps[index], values[index], "D", markersize=8, color=ORANGE, markeredgecolor="white", zorder=5)
        side, offset = ("left", -4) if index == 0 else ("right", 4)
        text = f"{name} {format(values[index], spec)}"
        # on the side of the marker where the line is not
        _, near = _series(rows, metric.removeprefix("eval/"))
        near = near[: len(near) // 5 + 1] if index == 0 else near[-(len(near) // 5) - 1 :]
        up, base = (-9, "top") if len(near) and near.mean() >= values[index] else (9, "bottom")
        axes.annotate(text, (steps[index], values[index]), xytext=(offset, up), ha=side, va=base, **words)
    axes.margins(y=0.18)
    axes.legend(fontsize=7.5, frameon=False, loc="lower right")
