"""Turnwise: language-model agents trained by reinforcement learning over multi-turn rollouts."""

from __future__ import annotations

import os
from typing import Any

# OpenMP reads these when torch is loaded: threads that wait must sleep, or a second busy process makes every operation slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("KMP_BLOCKTIME", "0")

__version__ = "0.3.0"

_PUBLIC = {
    "train": "turnwise.training.api",
    "resume": "turnwise.training.api",
    "show_run": "turnwise.observe.notebook",
    "Settings": "turnwise.config.settings",
    "Recipe": "turnwise.recipes.recipe",
    "Environment": "turnwise.environments.base",
    "Action": "turnwise.core.protocols",
    "Step": "turnwise.core.protocols",
    "Task": "turnwise.core.records",
    "Turn": "turnwise.core.records",
    "Trajectory": "turnwise.core.records",
    "Group": "turnwise.core.records",
    "Field": "turnwise.core.levels",
    "Tree": "turnwise.core.levels",
    "Partition": "turnwise.core.levels",
    "Level": "turnwise.core.levels",
    "Batch": "turnwise.core.batch",
    "pack": "turnwise.core.batch",
    "from_padded": "turnwise.integrations.padded",
    "to_padded": "turnwise.integrations.padded",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    """Import public names on first use: `turnwise list` must not wait for torch to load."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'turnwise' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    """The public names, also those that nobody has used yet."""
    return sorted({*globals(), *_PUBLIC})
