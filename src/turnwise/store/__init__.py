"""Run directories: ledger, checkpoints and metadata. The order of calls is described in :mod:`turnwise.store.resume`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnwise.store.checkpoint import (
        Checkpoint,
        checkpoints,
        discard_after,
        latest,
        load_checkpoint,
        save_checkpoint,
        save_model,
    )
    from turnwise.store.ledger import SqliteLedger
    from turnwise.store.queries import GroupCounts, GroupSummary
    from turnwise.store.resume import IssuedGroup, ResumePlan
    from turnwise.store.rundir import RunDir, runs

_MODULES = {
    "checkpoint": (
        "Checkpoint", "checkpoints", "discard_after", "latest", "load_checkpoint", "save_checkpoint", "save_model",
    ),
    "ledger": ("SqliteLedger",),
    "queries": ("GroupCounts", "GroupSummary"),
    "resume": ("IssuedGroup", "ResumePlan"),
    "rundir": ("RunDir", "runs"),
}  # fmt: skip

__all__ = [
    "Checkpoint",
    "GroupCounts",
    "GroupSummary",
    "IssuedGroup",
    "ResumePlan",
    "RunDir",
    "SqliteLedger",
    "checkpoints",
    "discard_after",
    "latest",
    "load_checkpoint",
    "runs",
    "save_checkpoint",
    "save_model",
]


def __getattr__(name: str) -> Any:
    """Import on first use: a run directory that does not exist is refused before torch is loaded."""
    import importlib

    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"turnwise.store.{module}"), name)
    raise AttributeError(f"module 'turnwise.store' has no attribute {name!r}")
