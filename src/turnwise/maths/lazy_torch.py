"""``torch`` for modules that name it long before they compute: it is imported when one of its attributes is first read.

    from turnwise.maths.lazy_torch import torch

The pieces of a method are built and checked without a tensor, so a run is refused before torch is loaded, which takes two
seconds. What computes anyway (engines, models) imports torch as usual. ``without_gradient`` and ``with_gradient`` stand for the
decorators ``torch.no_grad()`` and ``torch.enable_grad()``, which would load torch when a module is imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar


class LazyModule:
    """Stands for a module. ``sys.modules`` holds the module itself or nothing, so no library ever meets this object."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(importlib.import_module(self._name), attribute)
        # the next reading is an ordinary one: losses read torch.exp a thousand times a step
        setattr(self, attribute, value)
        return value


if TYPE_CHECKING:
    import torch as torch
else:
    torch = LazyModule("torch")


Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")


def with_gradient(function: Callable[Arguments, Value], keep: bool = True) -> Callable[Arguments, Value]:
    """The function, computed with a graph, also where its caller keeps none."""

    @wraps(function)
    def computed(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
        with torch.set_grad_enabled(keep):
            return function(*args, **kwargs)

    return computed


def without_gradient(function: Callable[Arguments, Value]) -> Callable[Arguments, Value]:
    """The function, computed without a graph."""
    return with_gradient(function, keep=False)
