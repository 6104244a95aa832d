"""Modules that load when they are first used. Recipes are built and checked without a tensor, so that a refusal does not wait
for torch, which takes seconds to import.

``importlib.util.LazyLoader`` does not serve: each further ``import`` statement reads ``__spec__``, which loads the module.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any


class DeferredModule(ModuleType):
    """In ``sys.modules`` in place of a module that is not loaded yet; becomes that module when an attribute is read.

    It has no ``__path__`` until then, so that importing a submodule loads it, too. Not safe for threads: ``load_deferred``
    is called before others start."""

    def __getattr__(self, name: str) -> Any:
        _load(self)
        return getattr(self, name)


def defer(name: str) -> None:
    """Let ``import name`` cost nothing until the module is used. A module that is loaded, or not installed, stays as it is."""
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is None:
        return
    module = DeferredModule(name)
    module.__spec__ = spec
    sys.modules[name] = module


def load_deferred(name: str) -> None:
    """Load the module now, where ``defer`` put it off."""
    module = sys.modules.get(name)
    if isinstance(module, DeferredModule):
        _load(module)


def _load(module: DeferredModule) -> None:
    spec = module.__spec__
    assert spec is not None and spec.loader is not None
    # The module's own code reads it while it runs, and finds what any module would have.
    module.__class__ = ModuleType  # type: ignore[assignment]
    importlib._bootstrap._init_module_attrs(spec, module, override=True)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(spec.name, None)
        raise
