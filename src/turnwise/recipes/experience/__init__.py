"""Named pieces of experience: samplers, budgets, strategies, guidance and replay, for the settings of the same names.

    piece("sampler", "vade,pool=512")      the piece of a slot, by name and arguments
    module:function or file.py:function    names one of the user's own

Each function's docstring is its entry in ``turnwise list`` and ``turnwise explain``, as for methods.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from turnwise.config.named_object import call_arguments, load_object, signature_of, split_arguments
from turnwise.errors import SettingError, TurnwiseError, nearest
from turnwise.recipes import provenance
from turnwise.recipes.experience import budgets, guidance, replay, samplers, strategies

MODULES = {"sampler": samplers, "budget": budgets, "strategy": strategies, "guidance": guidance, "replay": replay}
SLOTS: dict[str, dict[str, Callable[..., Any]]] = {
    slot: {
        name: function
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__ == module.__name__
    }
    for slot, module in MODULES.items()
}


def piece(slot: str, spec: str) -> Any:
    """The piece that ``spec`` names: ``vade``, ``vade,pool=512`` or ``my.py:sampler``. Mistakes are refused with the remedy."""
    name, arguments = split_arguments(spec)
    function = find(slot, name)
    what = f"{slot} {name!r}"
    try:
        return function(**call_arguments(function, arguments, what))
    except SettingError:
        raise
    except (TurnwiseError, TypeError) as wrong:
        raise SettingError(f"{what}: {wrong}") from wrong


def find(slot: str, name: str) -> Callable[..., Any]:
    """The function of a named piece."""
    if ":" in name:
        function: Callable[..., Any] = load_object(name, f"{slot} {name!r}", callable, "function")
        return function
    if name not in SLOTS[slot]:
        raise SettingError(f"no {slot} {name!r}; {nearest(name, SLOTS[slot])}; your own: module:function")
    return SLOTS[slot][name]


def slots_with(name: str) -> list[str]:
    """The slots that have a piece of this name. ``guidance/none`` names one slot."""
    slot, slash, bare = name.partition("/")
    if slash:
        return [slot] if slot in SLOTS and bare.partition(",")[0] in SLOTS[slot] else []
    return [slot for slot, pieces in SLOTS.items() if name.partition(",")[0] in pieces]


def rows() -> list[dict[str, str]]:
    """The rows of ``turnwise list --experience``, one per piece."""
    described = [describe_piece(slot, name) for slot, pieces in SLOTS.items() for name in pieces]
    return [{key: one[key] for key in ("slot", "name", "idea", "paper", "deviation", "sure of")} for one in described]


def describe_piece(slot: str, name: str) -> dict[str, Any]:
    """One piece from its docstring and its signature."""
    from turnwise.recipes.catalogue import docstring_section

    function = find(slot, name.partition(",")[0])
    doc = inspect.getdoc(function) or ""
    built, bare = piece(slot, name), name.partition(",")[0]
    record = provenance.records(MODULES[slot].__name__.rsplit(".", 1)[-1]).get(bare)
    head, _, body = doc.partition("\n\n")
    body = body.split("\n\nPaper:")[0] if not body.startswith("Paper:") else ""
    return {
        "slot": slot,
        "name": name,
        "idea": " ".join(head.split()).split(": ", 1)[-1],
        "body": body,
        "paper": docstring_section(doc, "Paper") or "–",
        "settings": docstring_section(doc, "Settings"),
        "deviation": docstring_section(doc, "Deviation") or " ".join(record.left_out if record else ()) or "–",
        "sure of": record.sure_of if record else docstring_section(doc, "Sure of") or "–",
        "sources": {title: text for title, text in record.lines().items() if title != "Left out"} if record else {},
        "parameters": {key: p.default for key, p in signature_of(function).items()},
        "requirements": sorted(getattr(built, "requirements", None) or getattr(built, "requires", None) or ()),
        "piece": repr(built),
    }
