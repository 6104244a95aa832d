"""Converts a value to its declared type: one rule for flags, settings and hyper-parameters. Knows no setting's name."""

from __future__ import annotations

import contextlib
import types
import typing
from typing import Any

from turnwise.errors import SettingError

BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def convert(name: str, value: Any, kind: Any) -> Any:
    """``value`` as ``kind``: text is parsed, anything else must already have the type."""
    try:
        return _convert(value, kind)
    except (ValueError, TypeError, OverflowError):
        expected = (
            getattr(kind, "__name__", str(kind)) if not typing.get_args(kind) else str(kind).replace("typing.", "")
        )
        raise SettingError(f"{name} is {value!r}, which is not {expected}") from None


def _convert(value: Any, kind: Any) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _first(value, args)
    if origin is typing.Literal and value not in args:
        raise TypeError
    if origin is tuple:
        parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else (value,)
        return tuple(_convert(p.strip() if isinstance(p, str) else p, args[0]) for p in parts if p != "")
    if origin is dict or kind is dict:
        return dict(value)
    if kind is bool:
        if str(value).lower() not in BOOLEANS:
            raise TypeError
        return BOOLEANS[str(value).lower()]
    if kind is int:
        if isinstance(value, bool) or (isinstance(value, float) and value != int(value)):
            raise TypeError
        return int(value)
    if kind is float:
        if isinstance(value, bool):
            raise TypeError
        return float(value)
    if kind is str and not isinstance(value, str):
        raise TypeError
    return value


def _first(value: Any, kinds: tuple[Any, ...]) -> Any:
    """The value as the first member of a union that accepts it; None, also as the text "none", if the union has it."""
    if type(None) in kinds and (value is None or (isinstance(value, str) and value.lower() == "none")):
        return None
    for kind in kinds:
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            if kind is not type(None):
                return _convert(value, kind)
    raise TypeError
