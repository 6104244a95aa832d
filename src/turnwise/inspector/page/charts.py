"""Charts as SVG text: lines with intervals, bars, heat maps, time lines, trees of forks.

Only numbers and escaped labels enter the text. Colours are CSS classes, so a chart follows the page's light or dark theme.
A plotting library would draw the same on the server with fixed colours, or add a script of its own to the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from markupsafe import Markup, escape

from turnwise.core.text import printable_line
from turnwise.inspector.page.blocks import Cell, ForkDiagram, HeatMap, LineChart, Link, Series, Timeline, TreeNode

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 460, 180, 52, 22, 10, 12
Place = Callable[[float], float]  # a value to its position in the drawing
POINTS = 600  # drawn of a long series: more than a screen resolves


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


def tick_labels(marks: Sequence[float]) -> list[str]:
    """Four significant digits, or as many as it takes to tell the marks apart."""
    for digits in range(4, 12):
        labels = [f"{mark:,.{digits}g}" for mark in marks]
        if len(set(labels)) == len(labels):
            break
    return labels


def line_chart(chart: LineChart) -> Markup:
    """Lines over steps, each with its interval as a band."""
    thinned = [_thin(series) for series in chart.series if len(series.x)]
    values = [v for s in thinned for v in (*s.y, *s.low, *s.high) if math.isfinite(v)]
    if not values:
        return Markup("")
    x0, x1 = min(min(s.x) for s in thinned), max(max(s.x) for s in thinned)
    y0, y1 = min(values), max(values)
    pad = (y1 - y0) * 0.05 or abs(y1) * 0.1 or 1.0
    y0, y1 = (0.0 if 0 <= y0 < 0.3 * y1 or y0 == y1 == 0 else y0 - pad), y1 + pad
    px = lambda x: LEFT + (x - x0) / max(x1 - x0, 1e-9) * (WIDTH - LEFT - RIGHT)  # noqa: E731
    py = lambda y: HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - BOTTOM - TOP)  # noqa: E731
    parts = [_axes(x0, x1, y0, y1, px, py)]
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
    return _svg(WIDTH, HEIGHT, parts, chart.title)


def _thin(series: Series) -> Series:
    every = -(-len(series.x) // POINTS)
    if every <= 1:
        return series
    cut = lambda values: list(values)[::every]  # noqa: E731
    return Series(series.name, cut(series.x), cut(series.y), cut(series.low), cut(series.high))


def _axes(x0: float, x1: float, y0: float, y1: float, px: Place, py: Place) -> str:
    out = []
    marks = ticks(y0, y1, 3)
    for y, text in zip(marks, tick_labels(marks), strict=True):
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(y):.1f}" y2="{py(y):.1f}"/>')
        out.append(f'<text class="tick" x="{LEFT - 6}" y="{py(y) + 3:.1f}" text-anchor="end">{escape(text)}</text>')
    for x in ticks(x0, x1, 5):
        if x == int(x):
            out.append(
                f'<text class="tick" x="{px(x):.1f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(number(int(x)))}</text>'
            )
    return "".join(out)


def heat_map(chart: HeatMap, prefix: str = "") -> Markup:
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
    return _svg(width, 24 + row * len(chart.rows), parts, chart.title)


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
    known = {node.id for node in nodes}
    for node in nodes:
        children.setdefault(node.parent if node.parent in known else "", []).append(node)
    out: list[TreeNode] = []
    stack = list(reversed(children.get("", [])))
    while stack:
        node = stack.pop()
        out.append(node)
        stack += list(reversed(children.get(node.id, [])))
    return out


def _cell_text(cell: Cell) -> str:
    return printable_line(cell.text if isinstance(cell, Link) else number(cell))


def _svg(width: float, height: float, parts: Sequence[str], title: str, natural: bool = False) -> Markup:
    """``natural``: drawn at its own size, beside scroll bars where that is wider than the page; otherwise as wide as its card."""
    size = f' width="{width:.0f}" height="{height:.0f}"' if natural else ""
    label = escape(printable_line(title))
    head = f'<svg class="chart" role="img" viewBox="0 0 {width:.0f} {height:.0f}"{size} aria-label="{label}">'
    return Markup(head + "".join(parts) + "</svg>")
