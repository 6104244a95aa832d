"""Rows of the benchmark table: who did what how fast, relative to a reference and to the hardware limit. Measures nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

PARTS = ("generation", "learning", "step", "memory")


@dataclass(frozen=True)
class BenchRow:
    """One measurement. ``value`` is None if it failed; ``note`` says why. The field names are keys of the JSON report."""

    part: str  # generation, learning, whole step, memory
    load: str
    who: str
    value: float | None
    unit: str
    times: float | None = None  # how many times better than the reference of this workload
    of_limit: float | None = None
    note: str = ""


def better(row: BenchRow, reference: BenchRow) -> float | None:
    """How many times better ``row`` is: more tokens per second, or fewer seconds or bytes."""
    if not row.value or not reference.value:
        return None
    return row.value / reference.value if row.unit.endswith("/s") else reference.value / row.value


def with_ratio_to(rows: Iterable[BenchRow], reference: str) -> list[BenchRow]:
    """Rows of one workload with their ratio to the row of ``reference``."""
    rows = list(rows)
    base = next((r for r in rows if r.who == reference), None)
    return [r if base is None or r is base else BenchRow(**{**asdict(r), "times": better(r, base)}) for r in rows]


def cells(row: BenchRow) -> dict[str, str]:
    """The formatted cells of a row."""
    digits = 3 if row.value is not None and row.value < 20 else 0
    return {
        "part": row.part,
        "load": row.load,
        "who": row.who,
        "value": "–" if row.value is None else f"{row.value:,.{digits}f} {row.unit}",
        "times better": "" if row.times is None else f"{row.times:.2f}",
        "of the limit": "" if row.of_limit is None else f"{row.of_limit:.1%}",
        "note": row.note,
    }


def markdown(title: str, rows: Iterable[BenchRow]) -> str:
    table = [cells(row) for row in rows]
    heads = list(table[0]) if table else []
    lines = ["| " + " | ".join(row.values()) + " |" for row in table]
    return "\n".join([f"# {title}", "", "| " + " | ".join(heads) + " |", "|" + "---|" * len(heads), *lines, ""])


def as_json(facts: dict[str, Any], rows: Iterable[BenchRow]) -> str:
    return json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=1)
