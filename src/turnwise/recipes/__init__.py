"""Published methods as recipes: one function per paper in ``families``, no arithmetic. Does not know who trains with
them.

recipes.build("grpo", clip=0.2)   the recipe of a method
recipes.METHODS                   every method by name

The registry imports every family, and with them torch, so it is imported when one of its names is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnwise.recipes.registry import FAMILIES, METHODS, build, method, parameters

__all__ = ["FAMILIES", "METHODS", "build", "method", "parameters"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'turnwise.recipes' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module("turnwise.recipes.registry"), name)
