"""Rows of the table: who did what how fast, against whom, and against what is possible."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """``value`` is None where something could not be measured; ``note`` says why."""

    part: str  # generation, learning, whole step, memory
    load: str
    who: str
    value: float | None
    unit: str
    times: float | None = None  # how many times better than the reference of this load
    of_limit: float | None = None
    note: str = ""


def better(row: Row, reference: Row) -> float | None:
    """How many times better ``row`` is: more tokens a second, or fewer seconds or bytes."""
    if not row.value or not reference.value:
        return None
    return row.value / reference.value if row.unit.endswith("/s") else reference.value / row.value


def against(rows: Iterable[Row], reference: str) -> list[Row]:
    """Rows of one load with their ratio to the one named ``reference``."""
    rows = list(rows)
    base = next((r for r in rows if r.who == reference), None)
    return [r if base is None or r is base else Row(**{**asdict(r), "times": better(r, base)}) for r in rows]


def cells(row: Row) -> dict[str, str]:
    """What a table shows of a row."""
    return {
        "part": row.part,
        "load": row.load,
        "who": row.who,
        "value": "–"
        if row.value is None
        else f"{row.value:,.3f} {row.unit}"
        if row.value < 20
        else f"{row.value:,.0f} {row.unit}",
        "times better": "" if row.times is None else f"{row.times:.2f}",
        "of the limit": "" if row.of_limit is None else f"{row.of_limit:.1%}",
        "note": row.note,
    }


def markdown(title: str, rows: Iterable[Row]) -> str:
    shown = [cells(row) for row in rows]
    heads = list(shown[0]) if shown else []
    lines = ["| " + " | ".join(row.values()) + " |" for row in shown]
    return "\n".join([f"# {title}", "", "| " + " | ".join(heads) + " |", "|" + "---|" * len(heads), *lines, ""])


def as_json(facts: dict[str, Any], rows: Iterable[Row]) -> str:
    return json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=1)
