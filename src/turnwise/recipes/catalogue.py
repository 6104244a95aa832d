"""The catalogue of methods, read from the recipes themselves: nothing is written down twice."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from typing import Any

from turnwise import recipes
from turnwise.errors import RecipeError, SettingError, nearest
from turnwise.recipes.compose import composed
from turnwise.recipes.kind import Kind, kind_of
from turnwise.recipes.recipe import Recipe


def kind(name: str) -> Kind:
    """Which question a method answers anew, as its recipe declares."""
    return kind_of(recipes.method(name))


def named(name: str, credit: str = "") -> Recipe:
    """A method by its name; with the credit of another: ``named("sapo", "hgpo")``, or ``named("sapo+hgpo")``."""
    method, _, other = name.partition("+")
    return lend(recipes.build(method), other or credit)


def lend(recipe: Recipe, credit: str, options: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe with the credit of another method, by its name; as it is without one."""
    if not credit:
        return recipe
    if credit not in recipes.METHODS:
        raise SettingError(f"no method {credit!r} to take the credit of; {nearest(credit, recipes.METHODS)}")
    try:
        return composed(recipe, recipes.build(credit, **(options or {})))
    except RecipeError as fault:
        raise SettingError(f"the credit of {credit} does not go with this method: {fault}") from fault


def entry(name: str, credit: str = "") -> dict[str, Any]:
    """One method, from its docstring and its recipe; its slots with the credit of another, where that is asked for."""
    doc = inspect.getdoc(recipes.method(name)) or ""
    recipe = named(name, credit)
    return {
        "name": f"{name}+{credit}" if credit else name,
        "kind": str(kind(name)),
        "family": recipes.method(name).__module__.rsplit(".", 1)[-1],
        "about": (sys.modules[recipes.method(name).__module__].__doc__ or "").splitlines()[0].rstrip("."),
        "idea": doc.splitlines()[0].split(": ", 1)[-1],
        "paper": section(doc, "Paper"),
        "settings": section(doc, "Settings"),
        "deviation": section(doc, "Deviation"),
        "sure_of": section(doc, "Sure of"),
        "parameters": {n: p.default for n, p in recipes.parameters(name).items()},
        "needs": sorted(map(str, recipe.objective.needs)),
        "asks": sorted(recipe.asks),
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
        changed, wanted = changes(base, recipes.build(name)), [*e["needs"], *e["asks"]]
        out.append(
            {
                "method": name,
                "kind": e["kind"],
                "family": e["family"],
                "about": e["about"],
                "idea": e["idea"],
                "paper": e["paper"],
                "arxiv": " ".join(re.findall(r"arXiv [\d.]+\d", e["paper"])[:1]) or e["paper"][:60],
                "changes vs grpo": ", ".join(changed) or "–",
                "needs": ", ".join(dict.fromkeys(n for n in wanted if n not in ("logp", "entropy"))) or "–",
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
    a, b = named(left).slots(), named(right).slots()
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
        *(f"- **{kind}**: {kind.meaning}" for kind in Kind),
        "",
        "| method | kind | family | idea | changes vs `grpo` | needs | sure of | deviation |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| `{r['method']}` | {r['kind']} | {r['family']} | {r['idea']} | {r['changes vs grpo']} | {r['needs']} | {r['sure of']} "
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
