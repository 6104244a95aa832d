"""The catalogue of methods: names, docstrings and slots, read from the recipes themselves. Holds no text of its own
about a method."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from turnwise import recipes
from turnwise.algebra.gate import NoGate
from turnwise.algebra.ratio import Importance, OnPolicy
from turnwise.errors import RecipeError, SettingError, nearest
from turnwise.recipes import provenance, signatures
from turnwise.recipes.compose import compose
from turnwise.recipes.provenance import Record
from turnwise.recipes.recipe import Kind, Recipe, kind_of


def kind(name: str) -> Kind:
    """The kind of a method, as its recipe declares it."""
    return kind_of(recipes.method(name))


def parse_method(name: str, credit: str = "") -> Recipe:
    """The recipe of ``"sapo"``, or with the credit of another method of ``"sapo+hgpo"`` or ``parse_method("sapo",
    "hgpo")``."""
    method, _, credit_name = name.partition("+")
    return with_credit(recipes.build(method), credit_name or credit)


def with_credit(recipe: Recipe, credit: str, options: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe with the credit of another method, by name; unchanged without a name."""
    if not credit:
        return recipe
    if ":" not in credit and credit not in recipes.METHODS:
        raise SettingError(f"no method {credit!r} to take the credit of; {nearest(credit, recipes.METHODS)}")
    try:
        return compose(recipe, recipes.build(credit, **(options or {})))
    except RecipeError as error:
        raise SettingError(f"the credit of {credit} does not go with this method: {error}") from error


def describe_method(name: str, credit: str = "") -> dict[str, Any]:
    """One method from its docstring and its recipe; with ``credit``, its slots with the credit of that method."""
    doc = inspect.getdoc(recipes.method(name)) or ""
    recipe, record = parse_method(name, credit), record_of(name)
    return {
        "name": f"{name}+{credit}" if credit else name,
        "kind": str(kind(name)),
        "family": family_of(name),
        "about": first_line(sys.modules[recipes.method(name).__module__].__doc__).rstrip("."),
        "idea": first_line(doc).split(": ", 1)[-1],
        "paper": docstring_section(doc, "Paper"),
        "settings": docstring_section(doc, "Settings"),
        "deviation": docstring_section(doc, "Deviation"),
        "sure_of": record.sure_of if record else docstring_section(doc, "Sure of"),
        "sources": record.lines() if record else {},
        "parameters": {n: p.default for n, p in recipes.parameters(name).items()},
        "needs": sorted(map(str, recipe.objective.signals)),
        "requirements": sorted(recipe.requirements),
        "idle_without": sorted(recipe.idle_without),
        "sets": signatures.suggested_settings(name),
        "slots": recipe.slots(),
    }


def record_of(name: str) -> Record | None:
    """Where a built-in method is from, by its record; None for one of the user's own, or without a record."""
    return None if ":" in name else provenance.records(family_of(name)).get(name)


def family_of(name: str) -> str:
    """The file of ``families`` that holds a method."""
    return recipes.method(name).__module__.rsplit(".", 1)[-1]


def first_line(doc: str | None) -> str:
    """The first line of a docstring; empty without one, as a recipe of one's own may be."""
    return next(iter((doc or "").splitlines()), "")


def docstring_section(doc: str, title: str) -> str:
    """The text of a titled section (``Paper``, ``Settings`` ...) of a method's docstring, on one line."""
    match = re.search(rf"^{title}: (.*?)(?=^\w[\w ]*: |\Z)", doc, re.MULTILINE | re.DOTALL)
    return " ".join(match.group(1).split()) if match else ""


@cache
def base_recipe() -> Recipe:
    """The method that others are compared with, slot by slot."""
    return recipes.build("grpo")


def changed_slots(recipe: Recipe) -> frozenset[str]:
    """The slots with another piece than the base method's, and that a recipe's author set. How many groups, rollouts and passes
    there are is the run's choice; a limit or penalty that is missing does nothing."""
    plain = replace(base_recipe(), gate=NoGate(), penalties=()).slots()
    base, slots = (
        base_recipe().slots(),
        replace(recipe, ratio=Importance() if recipe.ratio == OnPolicy() else recipe.ratio).slots(),
    )
    changed = {slot for slot, piece in slots.items() if piece not in (base[slot], plain[slot])}
    kinds = {
        slot for slot in ("budget", "control") if type(getattr(recipe, slot)) is type(getattr(base_recipe(), slot))
    }
    added = any(weighted.weight and weighted not in base_recipe().penalties for weighted in recipe.penalties)
    return frozenset(changed - kinds - (set() if added else {"penalties"}))


def method_rows() -> list[dict[str, Any]]:
    """The rows of ``turnwise list``, one per method."""
    base = base_recipe().slots()
    rows = []
    for name in recipes.METHODS:
        described = describe_method(name)
        slots = [slot for slot, piece in described["slots"].items() if piece != base[slot]]
        needs = [*described["needs"], *described["requirements"]]
        rows.append(
            {
                "method": name,
                **{key: described[key] for key in ("kind", "family", "about", "idea", "paper")},
                "arxiv": " ".join(re.findall(r"arXiv [\d.]+\d", described["paper"])[:1]) or described["paper"][:60],
                "changes vs grpo": ", ".join(slots) or "–",
                "needs": ", ".join(dict.fromkeys(n for n in needs if n not in ("logp", "entropy"))) or "–",
                "sure of": described["sure_of"],
                "deviation": described["deviation"] or "–",
            }
        )
    return rows


def slot_differences(left: str, right: str) -> list[dict[str, str]]:
    """The slots in which two methods differ, with both pieces."""
    a, b = parse_method(left).slots(), parse_method(right).slots()
    return [{"slot": slot, left: a[slot], right: b[slot]} for slot in a if a[slot] != b[slot]]
