"""The registry of methods: every recipe function by name, and how to build one. Defines no method itself."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from turnwise.config.named_object import load_object, signature_of
from turnwise.errors import SettingError
from turnwise.recipes.families import (
    actor_critic,
    critic_free,
    entropy,
    experts_and_replay,
    group_credit,
    off_policy,
    preferences,
    reward_shaping,
    sampler_mismatch,
    segment_credit,
    selection,
    tool_agents,
    trust_region,
    turn_credit,
    values,
)
from turnwise.recipes.recipe import Recipe
from turnwise.recipes.signatures import check_method, typed_options

# in the order of `turnwise list`
FAMILIES = (
    critic_free, actor_critic, trust_region, sampler_mismatch, off_policy, entropy, tool_agents, turn_credit,
    group_credit, segment_credit, reward_shaping, experts_and_replay, selection, values, preferences,
)  # fmt: skip

METHODS: dict[str, Callable[..., Recipe]] = {
    name: function
    for family in FAMILIES
    for name, function in vars(family).items()
    if inspect.isfunction(function)
    and (function.__module__, function.__annotations__.get("return")) == (family.__name__, "Recipe")
}
"""A function of a family that returns a recipe is a method; its pieces and their helpers stand beside it."""


def method(name: str) -> Callable[..., Recipe]:
    """The recipe function of a method; an unknown name is refused with the nearest one. ``module:recipe`` or
    ``file.py:recipe`` names one of the user's own, a function or a ``Recipe``."""
    if ":" in name:
        makes_recipes = lambda x: isinstance(x, Recipe | functools.partial) or inspect.isfunction(x)  # noqa: E731
        loaded = load_object(name, f"method {name!r}", makes_recipes, "recipe")
        return (lambda: loaded) if isinstance(loaded, Recipe) else loaded
    if name not in METHODS:
        check_method(name)
    return METHODS[name]


def parameters(name: str) -> dict[str, inspect.Parameter]:
    """The hyper-parameters of a method, with types and defaults."""
    return dict(signature_of(method(name)))


def build(name: str, **hyper: Any) -> Recipe:
    """Build the recipe of a method; an unknown hyper-parameter is refused with the nearest name, a wrong type with a
    message."""
    recipe = method(name)(**typed_options(name, hyper, parameters(name)))
    if not isinstance(recipe, Recipe):
        raise SettingError(f"{name} returned {type(recipe).__name__}, not a Recipe; write a function that returns one")
    return recipe
