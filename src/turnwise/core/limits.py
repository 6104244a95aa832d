"""Limits of a field, declared where the field is, and refused in words where an object breaks them.

    gamma: float = number(1.0, least=0, most=1)
    low: float = number(0.6, least=0, most="high")    at most the field ``high`` of the same object
    form: str = choice("linear", "exponential")       the first one is the default

``Declared`` checks them when an object is made, ``check_limits`` where another dataclass has them. Knows no particular object.
"""

from __future__ import annotations

import operator
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field, fields
from typing import Any, dataclass_transform

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


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Declared:
    """Base of what a recipe is made of: a subclass is a frozen dataclass without the decorator, and its limits are checked."""

    def __init_subclass__(cls) -> None:
        declared = {name: value for name, value in vars(cls).items() if isinstance(value, Field)}
        dataclass(frozen=True)(cls)
        # A user's own piece may carry the decorator as well. It runs after this hook and reads the class again: it must find
        # the limits that were declared, and no __setattr__, which it refuses to replace.
        for name, value in declared.items():
            setattr(cls, name, value)
        del cls.__setattr__, cls.__delattr__

    def __setattr__(self, name: str, value: Any = None) -> None:
        raise FrozenInstanceError(
            f"a piece is frozen: {name!r} cannot be changed; write dataclasses.replace(piece, {name}=...)"
        )

    __delattr__ = __setattr__

    def __post_init__(self) -> None:
        check_limits(self)
