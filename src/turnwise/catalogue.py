"""The catalogue of methods, read from the recipes themselves: nothing is written down twice."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

from turnwise import recipes
from turnwise.recipe import Recipe


def entry(name: str) -> dict[str, Any]:
    """One method, from its docstring and its recipe."""
    doc = inspect.getdoc(recipes.method(name)) or ""
    recipe = recipes.build(name)
    return {
        "name": name,
        "family": recipes.method(name).__module__.rsplit(".", 1)[-1],
        "about": (sys.modules[recipes.method(name).__module__].__doc__ or "").splitlines()[0].rstrip("."),
        "idea": doc.splitlines()[0].split(": ", 1)[-1],
        "paper": section(doc, "Paper"),
        "settings": section(doc, "Settings"),
        "deviation": section(doc, "Deviation"),
        "sure_of": section(doc, "Sure of"),
        "parameters": {n: p.default for n, p in recipes.parameters(name).items()},
        "needs": sorted(map(str, recipe.objective.needs)),
        "slots": recipe.slots(),
    }


def section(doc: str, title: str) -> str:
    found = re.search(rf"^{title}: (.*?)(?=^\w[\w ]*: |\Z)", doc, re.MULTILINE | re.DOTALL)
    return " ".join(found.group(1).split()) if found else ""


def rows() -> list[dict[str, Any]]:
    """What ``turnwise list`` shows: a line for each method."""
    base = recipes.build("grpo")
    out = []
    for name in recipes.METHODS:
        e = entry(name)
        changed = changes(base, recipes.build(name))
        out.append(
            {
                "method": name,
                "family": e["family"],
                "about": e["about"],
                "idea": e["idea"],
                "paper": e["paper"],
                "arxiv": " ".join(re.findall(r"arXiv [\d.]+\d", e["paper"])[:1]) or e["paper"][:60],
                "changes vs grpo": ", ".join(changed) or "–",
                "needs": ", ".join(n for n in e["needs"] if n not in ("logp", "entropy")) or "–",
                "sure of": e["sure_of"],
                "deviation": e["deviation"] or "–",
            }
        )
    return out


def changes(left: Recipe, right: Recipe) -> list[str]:
    a, b = left.slots(), right.slots()
    return [slot for slot in a if a[slot] != b[slot]]


def difference(left: str, right: str) -> list[dict[str, str]]:
    """The slots in which two methods differ."""
    a, b = recipes.build(left).slots(), recipes.build(right).slots()
    return [{"slot": slot, left: a[slot], right: b[slot]} for slot in a if a[slot] != b[slot]]


def markdown() -> str:
    """The catalogue as a page: written by ``make docs``, compared by a test."""
    lines = [
        "# Methods",
        "",
        "Generated from the recipes by `make docs`; do not edit. `turnwise explain NAME` prints one of them whole,",
        "`turnwise diff A B` the slots in which two differ. Each method agrees with an independent oracle in loss and",
        "gradient and passes the contract of all methods (`tests/algebra/test_recipes.py`,",
        "`tests/test_every_method.py`); how each of them learns is in [learning.md](learning.md).",
        "",
        "| method | family | idea | changes vs `grpo` | needs | sure of | deviation |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| `{r['method']}` | {r['family']} | {r['idea']} | {r['changes vs grpo']} | {r['needs']} | {r['sure of']} "
        f"| {r['deviation']} |"
        for r in rows()
    ]
    for name in recipes.METHODS:
        e = entry(name)
        lines += ["", f"## {name}", "", "```text", inspect.getdoc(recipes.method(name)) or "", "```", ""]
        lines += [f"- **{slot}**: `{piece}`" for slot, piece in e["slots"].items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    from pathlib import Path

    Path(sys.argv[1]).write_text(markdown(), encoding="utf-8")
