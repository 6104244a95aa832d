"""``torch`` for modules that name it long before they compute: it is imported when one of its attributes is first read.

    from turnwise.maths.lazy_torch import torch

The pieces of a method are built and checked without a tensor, so a run is refused before torch is loaded, which takes two
seconds. What computes anyway (engines, models) imports torch as usual.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


class LazyModule:
    """Stands for a module. ``sys.modules`` holds the module itself or nothing, so no library ever meets this object."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(importlib.import_module(self._name), attribute)
        setattr(
            self, attribute, value
        )  # the next reading is an ordinary one: losses read torch.exp a thousand times a step
        return value


if TYPE_CHECKING:
    import torch as torch
else:
    torch = LazyModule("torch")
