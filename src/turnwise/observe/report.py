"""Reports at the end of a run: before and after with confidence intervals, and dialogues as text.

Rows are plain dicts, so the same data prints as a table and as ``--json``. Does not know how anything was measured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from turnwise.core.text import printable, printable_line
from turnwise.observe.numbers import MISSING, finite_number, format_number

ROLES = {"system": "System", "user": "User", "assistant": "Assistant", "tool": "Tool reply"}


def comparison(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per measure in either, in order. A measure is a number, or a mapping or object with estimate, low and high.

    ``clear``: whether the two intervals do not overlap, a conservative test; None without intervals.
    """
    rows = []
    for name in dict.fromkeys([*before, *after]):
        old, new = _bounds(before.get(name)), _bounds(after.get(name))
        change = _difference(old["estimate"], new["estimate"])
        up, down = _difference(old["high"], new["low"]), _difference(new["high"], old["low"])
        clear = None if up is None or down is None else up > 0 or down > 0
        rows.append({"measure": name, "before": old, "after": new, "change": change, "clear": clear})
    return rows


def table(rows: Sequence[Mapping[str, Any]], title: str = "Before and after") -> Table:
    """The rows of :func:`comparison` for a terminal."""
    out = Table(title=title, title_justify="left", header_style="bold")
    out.add_column("measure")
    for name in ("before", "after", "change"):
        out.add_column(name, justify="right")
    for row in rows:
        style = "" if not row["clear"] else "green" if row["change"] > 0 else "red"
        change = Text(format_number(row["change"], "+.3f"), style=style)
        sides = (_format_bounds(row[side]) for side in ("before", "after"))
        out.add_row(Text(printable_line(row["measure"])), *sides, change)
    return out


def _difference(low: float | None, high: float | None) -> float | None:
    return None if low is None or high is None else high - low


def _bounds(measure: Any) -> dict[str, float | None]:
    if isinstance(measure, Mapping):
        return {end: finite_number(measure.get(end)) for end in ("estimate", "low", "high")}
    if finite_number(measure) is not None or measure is None:
        return {"estimate": finite_number(measure), "low": None, "high": None}
    return {end: finite_number(getattr(measure, end, None)) for end in ("estimate", "low", "high")}


def format_measure(measure: Any) -> str:
    """A measure as a cell: three digits with an interval, two without."""
    bounds = _bounds(measure)
    return _format_bounds(bounds) if bounds["low"] is not None else format_number(bounds["estimate"], ".2f")


def _format_bounds(side: Mapping[str, float | None]) -> str:
    if side["low"] is None or side["high"] is None:
        return format_number(side["estimate"])
    return f"{format_number(side['estimate'])}  [{format_number(side['low'])}, {format_number(side['high'])}]"


# ----------------------------------------------------------------- dialogues


def transcript(messages: Sequence[Mapping[str, Any]], title: str = "") -> str:
    """A dialogue as Markdown that also reads well as plain text.

    Content stands in code blocks that it cannot close, and names stay on their line, so that no text of a model or an
    environment can look like a heading, another speaker, a link or HTML.
    """
    parts = [f"## {_inline(title)}"] if title else []
    for message in messages:
        role = str(message.get("role", MISSING))
        name = f" ({_inline(message['name'])})" if message.get("name") else ""
        parts.append(f"**{_inline(ROLES.get(role, role))}**{name}")
        content = message.get("content")
        if isinstance(content, list | tuple):  # OpenAI-style parts: {"type": "text", "text": ...} and other types
            pieces = [part if isinstance(part, Mapping) else {"text": str(part)} for part in content]
            content = "\n".join(str(part.get("text", f"[{part.get('type', 'part')}]")) for part in pieces)
        elif isinstance(content, str):
            content = content.strip("\n")
        content = "" if content is None else str(content)
        if content:
            parts.append(_block(content))
        for call in message.get("tool_calls") or ():
            fields: Mapping[str, Any] = call if isinstance(call, Mapping) else {"name": str(call)}
            function: Mapping[str, Any] = fields.get("function", fields)
            arguments = function.get("arguments", "")
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, default=str)
            parts.append(_block(f"→ calls {printable_line(function.get('name', MISSING), 80)}({text})"))
        if not content and not message.get("tool_calls"):
            parts.append("*(empty)*")
    return "\n\n".join(parts) + "\n"


def _block(content: str) -> str:
    """A code block with a fence longer than any row of backticks in the content."""
    text = printable(content)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"


def _inline(text: object) -> str:
    """A name within a line of Markdown: one line, without formatting, links or HTML."""
    return re.sub(r"([\\`*<>\[\]|~#&])", r"\\\1", printable_line(text, 80))
