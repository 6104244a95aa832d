"""The state of every group when a run continues from a checkpoint. The checkpoint is the single source of truth.

A checkpoint contains weights, sampler state and counters of one moment, which ``seal(step)`` records on the ledger's
clock. The state of a group follows from where that snapshot has it, not from where the killed process left it:

    issued after the seal             unknown to the snapshot; the restored sampler draws its task again by itself:
                                      dropped as "rolled back", not returned (that would issue it twice)
    trained or dropped by the seal    part of the snapshot: kept
    finished by the seal, not trained or dropped by then
                                      its rollouts are complete and no newer than the weights: finished again
    all others issued by the seal     in flight for the snapshot, but their rollouts are lost, or were sampled by weights
                                      that no longer exist: dropped as "interrupted", their tasks returned for reissue

It does not matter whether the kill came before or after the checkpoint's rename: only the step found on the disk
counts, and a seal without a checkpoint is never used. Resuming twice from one checkpoint, or later from an older
one, is safe, because the clock never goes back. Seals after the one resumed from are abandoned: resuming from a
checkpoint of theirs raises.

The order a loop must keep: ``train`` before the update; then, with no group issued or finished in between,
``seal(step)`` and the snapshot of every state; then ``save_checkpoint``.

Does not know about files, checkpoints or processes.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from turnwise.core.records import Group, Task
from turnwise.errors import RecordError, StoreError

INTERRUPTED = "interrupted"
ROLLED_BACK = "rolled back"


@dataclass(frozen=True, slots=True)
class IssuedGroup:
    """A group that was issued: ``IssuedGroup("g7", Task("calculator", 7), step=3, version=3)``"""

    group_id: str
    task: Task
    step: int
    version: int


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """What the loop must do after a resume."""

    to_reissue: tuple[IssuedGroup, ...]  # issue these again, under the same id or a new one
    pending: tuple[Group, ...]  # finished, not yet trained on
    rolled_back: tuple[IssuedGroup, ...]  # for information only: the restored sampler draws these tasks by itself


def record_seal(db: sqlite3.Connection, step: int, now: int) -> None:
    if step < 1:  # resuming from step 0 means from scratch: a seal of step 0 would be ambiguous
        raise RecordError("step 0 cannot be sealed: a run without a checkpoint starts there")
    last = db.execute("SELECT clock FROM seals WHERE step = ? AND void = 0", (step,)).fetchone()
    if last is not None and last["clock"] != now - 1:
        raise RecordError(f"the checkpoint of step {step} is already sealed and transitions have followed it")
    db.execute("DELETE FROM seals WHERE step = ? AND void = 0", (step,))
    db.execute("INSERT INTO seals (clock, step) VALUES (?, ?)", (now, step))


def digest(fetch: Callable[[str, Any], list[sqlite3.Row]], step: int) -> str | None:
    """A digest of all that the ledger knew when the checkpoint of ``step`` was sealed: every transition of every group, and
    size and reward of every trajectory. None without a seal. Later transitions, a rollback and pruned tokens do not change it.

    The texts and tokens themselves are left out: reading them all at every checkpoint would cost more than the checkpoint."""
    seals = fetch("SELECT clock FROM seals WHERE step = ? AND void = 0", (step,))
    if not seals:
        return None
    seal, content = int(seals[0]["clock"]), hashlib.sha256()
    past = ", ".join(
        f"CASE WHEN {name} <= :seal THEN {name} END" for name in ("finished_at", "trained_at", "dropped_at")
    )
    groups = f"SELECT row, id, task, version, issued_at, {past} FROM groups WHERE issued_at <= :seal ORDER BY row"
    trajectories = (
        "SELECT t.owner, t.id, t.reward, t.turns, t.sampled FROM trajectories t JOIN groups g ON g.row = t.owner"
        " WHERE g.finished_at <= :seal ORDER BY t.row"
    )
    for query in (groups, trajectories):
        for values in fetch(query, {"seal": seal}):
            content.update(repr(tuple(values)).encode())
    return content.hexdigest()


def roll_back(
    db: sqlite3.Connection, step: int, now: int, keep_finished: bool
) -> tuple[list[sqlite3.Row], list[sqlite3.Row]]:
    """Apply the rules above inside the caller's transaction; return the rows to reissue and those rolled back."""
    row = db.execute("SELECT clock, void FROM seals WHERE step = ? ORDER BY void, clock DESC", (step,)).fetchone()
    if step and row is not None and row["void"]:
        raise StoreError(
            f"the checkpoint of step {step} was abandoned when the run was resumed from an older one; remove it"
        )
    seal = 0 if step == 0 else None if row is None else int(row["clock"])
    if seal is None and db.execute("SELECT 1 FROM groups LIMIT 1").fetchone() is None:
        raise StoreError(
            f"the ledger is empty, and the run has a checkpoint of step {step}: which groups were trained on is unknown; "
            "restore ledger.sqlite, or start a new run"
        )
    # A ledger older than its checkpoint (power lost before the log reached the disk) does not know which finished groups
    # the weights were trained on. Reissuing all of them trains on none twice.
    values = {"seal": now - 1 if seal is None else seal, "now": now, "keep": keep_finished and seal is not None}
    rolled_back = db.execute(
        "SELECT * FROM groups WHERE issued_at > :seal AND void = 0 ORDER BY row", values
    ).fetchall()
    is_open = "issued_at <= :seal AND coalesce(trained_at > :seal, 1) AND coalesce(dropped_at > :seal, 1)"
    has_rollouts = (
        "coalesce(finished_at <= :seal, 0) AND :keep AND NOT EXISTS"
        " (SELECT 1 FROM trajectories WHERE owner = groups.row AND tokens IS NULL)"
    )
    to_reissue = db.execute(
        f"SELECT * FROM groups WHERE {is_open} AND NOT ({has_rollouts}) ORDER BY row", values
    ).fetchall()
    db.execute(
        "UPDATE groups SET state = 'finished', reason = '', void = 0, trained_at = NULL, dropped_at = NULL"
        f" WHERE {is_open} AND {has_rollouts}",
        values,
    )
    for rows, reason in ((rolled_back, ROLLED_BACK), (to_reissue, INTERRUPTED)):
        db.executemany(
            "UPDATE groups SET state = 'dropped', reason = ?, void = 1, trained_at = NULL, dropped_at = ?"
            " WHERE row = ?",
            [(reason, now, row["row"]) for row in rows],
        )
    db.execute("UPDATE seals SET void = 1 WHERE clock > :seal", values)
    db.execute("UPDATE mixed SET void = 1 WHERE clock > :seal", values)
    return to_reissue, rolled_back
