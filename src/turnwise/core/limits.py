"""Limits of a field, declared where the field is, and refused in words where an object breaks them.

    gamma: float = number(1.0, least=0, most=1)
    low: float = number(0.6, least=0, most="high")    at most the field ``high`` of the same object
    form: str = choice("linear", "exponential")       the first one is the default

``check_limits`` in ``__post_init__`` reads them; pieces of recipes inherit that. Knows no particular object.
"""

from __future__ import annotations

import operator
from dataclasses import MISSING, field, fields
from typing import Any

from turnwise.errors import RecipeError

LIMIT = "limit"
COMPARES = {"above": operator.gt, "least": operator.ge, "below": operator.lt, "most": operator.le}
SIGNS = {"above": ">", "least": ">=", "below": "<", "most": "<="}
BRACKETS = {"above": "(", "least": "[", "below": ")", "most": "]"}


def number(
    default: Any = MISSING,
    *,
    above: float | str | None = None,
    least: float | str | None = None,
    below: float | str | None = None,
    most: float | str | None = None,
    why: str = "",
) -> Any:
    """A field that holds a number inside these bounds; a name stands for another field. Anything that is no number (None, a
    weight that changes) passes. ``why``: what the refusal adds, such as what the number means."""
    sides = {"above": above, "least": least, "below": below, "most": most}
    bounds = {side: bound for side, bound in sides.items() if bound is not None}
    return field(default=default, metadata={LIMIT: (bounds, why)})


def choice(*options: Any, default: Any = None) -> Any:
    """A field that holds one of these; the first one unless another default is given."""
    return field(default=options[0] if default is None else default, metadata={LIMIT: options})


def check_limits(owner: Any) -> None:
    """Raise a RecipeError for the first field of a dataclass that holds something else than it declares."""
    for f in fields(owner):
        limit, value = f.metadata.get(LIMIT), getattr(owner, f.name)
        head = f"{type(owner).__name__}: {f.name} is {value!r}"
        if limit is None:
            continue
        if not isinstance(limit[0], dict):
            if value not in limit:
                raise RecipeError(f"{head}; write {' or '.join(map(str, limit))}")
            continue
        declared, why = limit
        bounds = {side: getattr(owner, b) if isinstance(b, str) else b for side, b in declared.items()}
        numbers = [x for x in (value, *bounds.values()) if isinstance(x, int | float)]
        if len(numbers) <= len(bounds) or all(COMPARES[side](value, bound) for side, bound in bounds.items()):
            continue
        named = "".join(f" ({b} is {bounds[side]})" for side, b in declared.items() if isinstance(b, str))
        if len(declared) == 2:  # an interval: the lower side is declared first
            (low, bottom), (high, top) = declared.items()
            span = f"in {BRACKETS[low]}{bottom}, {top}{BRACKETS[high]}"
        else:
            span = " ".join(f"{SIGNS[side]} {bound}" for side, bound in declared.items())
        none = ", or None" if "None" in str(f.type) else ""
        raise RecipeError(f"{head}; write a number {span}{named}{none}{why and ': ' + why}")
