"""Limits of a field, declared where the field is, and refused in words where an object breaks them.

    gamma: float = number(1.0, least=0, most=1)
    low: float = number(0.6, least=0, most="high")    at most the field ``high`` of the same object
    form: str = choice("linear", "exponential")       the first one is the default

``Declared`` checks them when an object is made, ``check_limits`` where another dataclass has them. Knows no particular object.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field, fields
from typing import Any, dataclass_transform

from turnwise.errors import RecipeError

LIMIT = "limit"
SIDES: dict[str, tuple[Callable[[Any, Any], bool], str, str]] = {  # holds, sign, bracket; the lower side first
    "above": (operator.gt, ">", "("), "least": (operator.ge, ">=", "["), "below": (operator.lt, "<", ")"),
    "most": (operator.le, "<=", "]"), "multiple_of": (lambda x, step: x % step == 0, "that is a multiple of", ""),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The bounds of a number, where a name stands for another field; or the options of a choice."""

    above: float | str | None = None
    least: float | str | None = None
    below: float | str | None = None
    most: float | str | None = None
    multiple_of: int | None = None
    options: tuple[Any, ...] = ()
    why: str = ""  # what a refusal adds, such as what the number means

    def cure(self, value: Any, owner: Any = None, or_else: str = "") -> str:
        """What to write instead of a value outside; "" for one inside. What is no number (None, "auto", a weight that changes)
        passes."""
        if self.options:
            return "" if value in self.options else " or ".join(map(str, self.options))
        declared = {side: bound for side in SIDES if (bound := getattr(self, side)) is not None}
        bounds = {side: getattr(owner, b) if isinstance(b, str) else b for side, b in declared.items()}
        numbers = [x for x in (value, *bounds.values()) if isinstance(x, int | float)]
        if len(numbers) <= len(bounds) or all(SIDES[side][0](value, bound) for side, bound in bounds.items()):
            return ""
        named = "".join(f" ({b} is {bounds[side]})" for side, b in declared.items() if isinstance(b, str))
        span = " ".join(f"{SIDES[side][1]} {bound}" for side, bound in declared.items())
        if len(declared) == 2 and self.multiple_of is None:
            low, high = declared
            span = f"in {SIDES[low][2]}{declared[low]}, {declared[high]}{SIDES[high][2]}"
        return f"a number {span}{named}{or_else}{self.why and ': ' + self.why}"


def number(default: Any = MISSING, **limit: Any) -> Any:
    """A field that holds a number inside the bounds of a ``Bounds``."""
    return field(default=default, metadata={LIMIT: Bounds(**limit)})


def choice(*options: Any, default: Any = None) -> Any:
    """A field that holds one of these; the first one unless another default is given."""
    return field(default=options[0] if default is None else default, metadata={LIMIT: Bounds(options=options)})


def check_limits(owner: Any, fault: type[Exception] = RecipeError) -> None:
    """Raise for the first field of a dataclass that holds something else than it declares."""
    for f in fields(owner):
        if (limit := f.metadata.get(LIMIT)) is not None:
            value = getattr(owner, f.name)
            if cure := limit.cure(value, owner, ", or None" if "None" in str(f.type) else ""):
                raise fault(f"{type(owner).__name__}: {f.name} is {value!r}; write {cure}")


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
        raise FrozenInstanceError(f"a piece is frozen; write dataclasses.replace(piece, {name}=...)")

    __delattr__ = __setattr__

    def __post_init__(self) -> None:
        check_limits(self)
