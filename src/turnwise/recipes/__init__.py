"""Published methods, one function each, no arithmetic. A new method is a new function in a family's file."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from turnwise.errors import SettingError, nearest
from turnwise.recipe import Recipe
from turnwise.recipes import (
    agents,
    critic,
    critic_free,
    exploration,
    groups,
    mismatch,
    others,
    preferences,
    relative,
    segments,
    shaping,
    trust,
    turns,
)
from turnwise.typed import convert

FAMILIES = (
    critic_free,
    critic,
    trust,
    mismatch,
    relative,
    exploration,
    agents,
    turns,
    groups,
    segments,
    shaping,
    others,
    preferences,
)

METHODS: dict[str, Callable[..., Recipe]] = {
    name: function
    for family in FAMILIES
    for name, function in vars(family).items()
    if inspect.isfunction(function) and function.__module__ == family.__name__
}


def method(name: str) -> Callable[..., Recipe]:
    if name not in METHODS:
        raise SettingError(f"no method {name!r}; {nearest(name, METHODS)}")
    return METHODS[name]


def parameters(name: str) -> dict[str, inspect.Parameter]:
    """The hyper-parameters of a method, with types and defaults."""
    return dict(inspect.signature(method(name), eval_str=True).parameters)


def build(name: str, **hyper: Any) -> Recipe:
    """The recipe of a method; an unknown hyper-parameter is refused with the nearest name, an ill-typed one in words."""
    known = parameters(name)
    for key in hyper:
        if key not in known:
            raise SettingError(f"{name} has no hyper-parameter {key!r}; {nearest(key, known)}")
    return method(name)(**{key: convert(key, value, known[key].annotation) for key, value in hyper.items()})
