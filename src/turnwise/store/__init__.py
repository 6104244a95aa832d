"""Run directories: ledger, checkpoints and metadata. The order of calls is described in :mod:`turnwise.store.resume`."""

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
