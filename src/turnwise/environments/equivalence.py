"""Whether an action does what an expert's action does: the same decision, the same tools, arguments that mean the same.

    exact      the same calls with equal arguments, or the same text but for case, spaces and a final dot
    arguments  the same decision to call or to talk, the same tools in order, arguments equal up to type and spelling; without
               calls, texts that are alike
    names      the same decision and the same tools; without calls, any text

Every action that is accepted by a rule is accepted by those below it. Knows actions; no environment and no token.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.core.protocols import Action
from turnwise.environments.base import plain_words
from turnwise.errors import SettingError, nearest

RULES = ("exact", "arguments", "names")


def equivalent(action: Action, expected: Action, rule: str = "arguments", likeness: float = 0.8) -> bool:
    """Whether ``action`` is accepted in the place of ``expected``. ``likeness``: how similar two texts must be, 0 to 1."""
    if action.faults or len(action.calls) != len(expected.calls):
        return False
    if [call.name for call in action.calls] != [call.name for call in expected.calls]:
        return False
    if rule == "names":
        return True
    if not expected.calls:
        exact, other = (" ".join(plain_words(text).split()) for text in (expected.text, action.text))
        return exact == other or (rule == "arguments" and alike(action.text, expected.text, likeness))
    pairs = [(a.arguments, b.arguments) for a, b in zip(action.calls, expected.calls)]
    return all(a == b if rule == "exact" else same_value(a, b, likeness) for a, b in pairs)


def check_rule(rule: str, likeness: Any) -> None:
    """Refuse an unknown rule, and a likeness that no text has."""
    if rule not in RULES:
        raise SettingError(f"rule is {rule!r}; {nearest(rule, RULES)}")
    if not isinstance(likeness, int | float) or not 0 < likeness <= 1:
        raise SettingError(f"likeness is {likeness}; write a number in (0, 1]")


def same_value(a: Any, b: Any, likeness: float = 0.8) -> bool:
    """Whether two arguments mean the same. Numbers and truth values may be written as text; a key that holds nothing may be
    missing; texts may differ a little."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        keys = {key for side in (a, b) for key, value in side.items() if value is not None}
        return all(key in a and key in b and same_value(a[key], b[key], likeness) for key in keys)
    if _is_list(a) and _is_list(b):
        return len(a) == len(b) and all(same_value(x, y, likeness) for x, y in zip(a, b))
    numbers = (_number(a), _number(b))
    if None not in numbers:
        return math.isclose(*numbers, rel_tol=1e-6, abs_tol=1e-9)  # type: ignore[arg-type]
    if numbers != (None, None) or not (isinstance(a, str) and isinstance(b, str)):
        return bool(a == b)
    return alike(a, b, likeness)


def alike(a: str, b: str, likeness: float) -> bool:
    """Whether two texts are equal but for case, spaces and punctuation, or similar enough."""
    a, b = (" ".join(re.sub(r"[^\w\s]", " ", text.lower()).split()) for text in (a, b))
    return a == b or difflib.SequenceMatcher(None, a, b, autojunk=False).ratio() >= likeness


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _number(value: Any) -> float | None:
    """A number or a truth value, also where it is written as text; None: it is neither."""
    if isinstance(value, str):
        word = value.strip().lower()
        if word in ("true", "false"):
            return float(word == "true")
        value = word if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", word) else None
    return None if value is None or isinstance(value, Mapping) or _is_list(value) else float(value)
