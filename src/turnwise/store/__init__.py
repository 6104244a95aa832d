"""The ledger, the checkpoints and the directory of a run. Order of calls: see :mod:`turnwise.store.resume`."""

from turnwise.store.checkpoint import (
    Checkpoint,
    checkpoints,
    discard_after,
    latest,
    load_checkpoint,
    save_checkpoint,
    save_model,
)
from turnwise.store.ledger import Ledger
from turnwise.store.queries import Balance, Entry
from turnwise.store.resume import Issued, Resumed
from turnwise.store.rundir import RunDir, runs

__all__ = [
    "Balance",
    "Checkpoint",
    "Entry",
    "Issued",
    "Ledger",
    "Resumed",
    "RunDir",
    "checkpoints",
    "discard_after",
    "latest",
    "load_checkpoint",
    "runs",
    "save_checkpoint",
    "save_model",
]
