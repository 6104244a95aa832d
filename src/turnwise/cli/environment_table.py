"""The output of ``turnwise environments``. Computes nothing."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.cli.display import console

INDENT = " " * 20
OWN = "Your own: --env module:Class or --env file.py:Class,key=value; `turnwise check-env` tests it"


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Two lines for each environment: what it is, what it offers."""
    out = console()

    def line(text: str, first: str = INDENT, style: str = "") -> None:
        wrapped = textwrap.fill(text, out.width, initial_indent=first, subsequent_indent=INDENT)
        out.print(wrapped, style=style, highlight=False, markup=False)

    for row in rows:
        line(row["about"], f"{'  ' + row['environment'] + ' ':<{len(INDENT)}}")
        line(_facts(row), style="dim")
    out.print(f"\n{OWN}", markup=False)


def _facts(row: Mapping[str, Any]) -> str:
    if row["kind"] == "family":
        return f"installed; {row['example']}" if row["installed"] else f"not installed: {row['install']}"
    turns = "–".join(map(str, dict.fromkeys((min(row["turns"]), max(row["turns"])))))
    facts = [
        f"difficulties {', '.join(map(str, row['difficulties']))}",
        f"at most {turns} turns",
        f"tools: {', '.join(row['tools'])}" if row["tools"] else "no tools",
        f"offers {', '.join(row['offers'])}" if row["offers"] else "",
    ]
    return " · ".join(filter(None, facts))
