"""``list --experience``, ``explain`` and ``diff`` for samplers, budgets, strategies, guidance and replay. Text out only.

A name that is also a method's is explained as the method; ``budget/xrpo`` names the piece.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.recipes.signatures import method_names


def _slots(name: str) -> list[str]:
    """The slots that have a piece of this name, unless a method has it."""
    if ":" in name or "+" in name or (name in method_names() and "/" not in name):
        return []
    from turnwise.recipes import experience

    return experience.slots_with(name)


def show_experience(rows: Sequence[Mapping[str, str]]) -> None:
    """Names and ideas, by slot."""
    width = max(len(row["name"]) for row in rows)
    for slot in dict.fromkeys(row["slot"] for row in rows):
        print(f"--{slot} NAME")
        for row in (r for r in rows if r["slot"] == slot):
            head = f"  {row['name']:<{width}}  "
            print(textwrap.fill(row["idea"], 118, initial_indent=head, subsequent_indent=" " * len(head)))
        print()
    print("`turnwise explain NAME` shows formula, paper, deviations and arguments; NAME,key=value sets them.")


def explain_pieces(name: str, as_json: bool = False) -> bool:
    """Explain the pieces of this name; False if there is none."""
    found = _slots(name)
    if not found:
        return False
    from turnwise.recipes import experience

    bare = name.partition("/")[2] or name
    described = [experience.describe_piece(slot, bare) for slot in found]
    if as_json:
        print(json.dumps(described, indent=1, default=str))
        return True
    print("\n\n".join(map(_text, described)))
    return True


def _text(described: Mapping[str, Any]) -> str:
    signature = "".join(f",{key}={value}" for key, value in described["parameters"].items())
    lines = [f"--{described['slot']} {described['name'].partition(',')[0]}{signature}", "", described["idea"], ""]
    lines += [described["body"], ""] if described["body"] else []
    for title in ("paper", "settings", "deviation", "sure of"):
        if described[title] not in ("", "–"):
            lines += textwrap.wrap(f"{title.capitalize()}: {described[title]}", 118)
    lines += [f"Piece: {described['piece']}"]
    return "\n".join(
        [*lines, *([f"Requires: {', '.join(described['requirements'])}"] * bool(described["requirements"]))]
    )


def diff_pieces(left: str, right: str, as_json: bool = False) -> bool:
    """Compare two pieces of one slot argument by argument; False unless both are pieces."""
    common = [slot for slot in _slots(left) if slot in _slots(right)]
    if not common:
        return False
    from turnwise.recipes import experience

    a, b = (experience.describe_piece(common[0], name.partition("/")[2] or name) for name in (left, right))
    rows = [{"what": key, left: str(a[key]), right: str(b[key])} for key in ("idea", "piece") if a[key] != b[key]]
    if as_json:
        print(json.dumps(rows, indent=1))
        return True
    print(
        "\n".join(f"{r['what']:<6} {r[left]}\n    →  {r[right]}" for r in rows) or f"{left} and {right} do not differ"
    )
    return True
