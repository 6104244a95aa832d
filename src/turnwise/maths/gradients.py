"""Functions that always, or never, keep a graph for a gradient. The decorators ``torch.no_grad()`` and ``torch.enable_grad()``
would load torch when a module is imported; recipes are built without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from turnwise.maths.lazy_torch import torch

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")


def without_gradient(function: Callable[Arguments, Value]) -> Callable[Arguments, Value]:
    """The function, computed without a graph."""
    return _graph(function, keep=False)


def with_gradient(function: Callable[Arguments, Value]) -> Callable[Arguments, Value]:
    """The function, computed with a graph, also where its caller keeps none."""
    return _graph(function, keep=True)


def _graph(function: Callable[Arguments, Value], keep: bool) -> Callable[Arguments, Value]:
    @wraps(function)
    def computed(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
        with torch.set_grad_enabled(keep):
            return function(*args, **kwargs)

    return computed
