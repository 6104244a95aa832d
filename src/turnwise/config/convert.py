"""Converts a value to its declared type and holds it to its declared limit: one rule for flags, settings, their options and
hyper-parameters. Knows no setting's name."""

from __future__ import annotations

import contextlib
import json
import math
import re
import types
import typing
from pathlib import Path
from typing import Annotated, Any

from turnwise.core.limits import Bounds
from turnwise.errors import SettingError, nearest

EXAMPLES = {int: "a whole number, such as 4", float: "a number, such as 0.1 or 1e-5", bool: "true or false"}
BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
Positive = Annotated[int, Bounds(least=1)]
Count = Annotated[int, Bounds(least=0)]
Share = Annotated[float, Bounds(least=0, below=1)]
Rate = Annotated[float, Bounds(least=0, below=math.inf)]
Seconds = Annotated[float, Bounds(above=0)]
Finite = Annotated[float, Bounds(above=-math.inf, below=math.inf)]


def convert(name: str, value: Any, kind: Any) -> Any:
    """``value`` as ``kind``: text is parsed, anything else must already have the type. A kind with a limit
    (``Annotated[int, Bounds(least=1)]``) refuses what lies outside."""
    limits: list[Bounds] = []
    if typing.get_origin(kind) is Annotated:
        kind, *limits = typing.get_args(kind)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    try:
        if hasattr(kind, "read"):  # a type that reads its own text
            value = value if isinstance(value, kind) else kind.read(name, value)
        else:
            value = _convert(value, kind)
        cure = next((cure for limit in limits if (cure := limit.cure(value))), "")
        wrong = f" is {value}; write {cure}" if cure else ""
    except SettingError:  # a type with a text of its own has said what to write
        raise
    except (ValueError, TypeError, OverflowError):
        expected = str(kind).replace("typing.", "") if args else getattr(kind, "__name__", str(kind))
        expected = "dict: write key=value,key=value" if origin is dict else expected
        example = f"; write {EXAMPLES[kind]}" if kind in EXAMPLES else ""
        wrong = f" is {value!r}, which is not {expected}{example}"
        if origin is typing.Literal:
            wrong = f" is {value!r}; {nearest(str(value), args)}"
    if wrong:
        raise SettingError(name + wrong)
    return value


def _convert(value: Any, kind: Any) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        # None, also as the text "none", if the union has it; else the first member that accepts the value
        if type(None) in args and (value is None or (isinstance(value, str) and value.lower() == "none")):
            return None
        for member in args:
            with contextlib.suppress(ValueError, TypeError, OverflowError):
                if member is not type(None):
                    return _convert(value, member)
    if origin is tuple:
        parts = value if isinstance(value, list | tuple) else (value,)
        if isinstance(value, str):  # parts between commas; a comma after a backslash belongs to its part
            parts = [part.replace("\\,", ",") for part in re.split(r"(?<!\\),", value)]
        return tuple(_convert(p.strip() if isinstance(p, str) else p, args[0]) for p in parts if p != "")
    if origin is dict or kind is dict:
        return _pairs(value) if isinstance(value, str) else dict(value)
    if kind is bool and str(value).lower() in BOOLEANS:
        return BOOLEANS[str(value).lower()]
    if kind in (int, float) and not isinstance(value, bool):  # True is 1 for Python, and a mistake for a setting
        if kind is float or not isinstance(value, float) or value == int(value):
            return kind(value)
    if kind is Path:
        return Path(value)
    # whatever is left must already be what the setting holds
    unlike = (origin is typing.Literal and value not in args) or (kind is str and not isinstance(value, str))
    if unlike or kind in (bool, int, float) or origin in (types.UnionType, typing.Union):
        raise TypeError
    return value


def _pairs(text: str) -> dict[str, Any]:
    """``key=value,key=value`` or a JSON object. A value is JSON, a word of Python, or else text."""
    if text.lstrip().startswith("{"):
        return dict(json.loads(text))
    pairs: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise ValueError
        text = pairs[key.strip()] = value.strip()
        with contextlib.suppress(ValueError):
            pairs[key.strip()] = json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    return pairs
