"""Turnwise: language-model agents trained by reinforcement learning over multi-turn rollouts."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "train": "turnwise.launch",
    "resume": "turnwise.launch",
    "Settings": "turnwise.settings",
    "Recipe": "turnwise.recipe",
    "Environment": "turnwise.environments.base",
    "Action": "turnwise.ports",
    "Step": "turnwise.ports",
    "Task": "turnwise.data",
    "Turn": "turnwise.data",
    "Trajectory": "turnwise.data",
    "Group": "turnwise.data",
    "Field": "turnwise.levels",
    "Tree": "turnwise.levels",
    "Partition": "turnwise.levels",
    "Level": "turnwise.levels",
    "Batch": "turnwise.batch",
    "pack": "turnwise.batch",
    "from_padded": "turnwise.padded",
    "to_padded": "turnwise.padded",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    """Public names are imported when first used: `turnwise list` must not wait for torch's whole house."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'turnwise' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_PUBLIC[name]), name)
