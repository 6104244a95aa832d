"""What becomes of every group when a run goes on from a checkpoint. The checkpoint is the single truth.

A checkpoint holds weights, sampler state and counters of one moment, which ``seal(step)`` marks on the ledger's clock.
A group is judged by where that snapshot believes it to be, not by where the dead process left it:

    issued after the mark             the snapshot never heard of it; the restored sampler will draw its task itself:
                                      dropped as "rolled back", not handed back (that would issue it twice)
    trained or dropped by the mark    part of the snapshot: stays
    finished by the mark, not settled by then
                                      its rollouts are whole and no younger than the weights: finished again
    anything else issued by the mark  in flight for the snapshot, but its rollouts are gone, or were sampled by weights
                                      that no longer exist: dropped as "interrupted", its task handed back

It does not matter whether the kill came before or after the checkpoint's rename: only the step found on the disk
counts, and a seal without a checkpoint is never asked for. Resuming twice from one checkpoint, or next from an older
one, is safe, because the clock never goes back. Seals younger than the mark are abandoned: a checkpoint of theirs is
refused.

The order a loop must keep: ``train`` before the update; then, with nothing issued or finished in between,
``seal(step)`` and the snapshot of every state; then ``save_checkpoint``.

Does not know about files, checkpoints or processes.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from turnwise.core.records import Group, Task
from turnwise.errors import RecordError, StoreError

INTERRUPTED = "interrupted"
ROLLED_BACK = "rolled back"


@dataclass(frozen=True, slots=True)
class Issued:
    """A group that was promised: ``Issued("g7", Task("calculator", 7), step=3, version=3)``"""

    group_id: str
    task: Task
    step: int
    version: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """What the loop owes after a resume."""

    again: tuple[Issued, ...]  # issue these again, under the old id or a new one
    pending: tuple[Group, ...]  # finished, not in the weights: train on them
    rolled_back: tuple[Issued, ...]  # for information: the restored sampler draws these tasks itself


def seal_moment(db: sqlite3.Connection, step: int, now: int) -> None:
    if step < 1:  # resuming from step 0 means from nothing: a mark there could not be told from none
        raise RecordError("step 0 cannot be sealed: a run without a checkpoint starts there anyway")
    last = db.execute("SELECT clock FROM seals WHERE step = ? AND void = 0", (step,)).fetchone()
    if last is not None and last["clock"] != now - 1:
        raise RecordError(f"the checkpoint of step {step} is already sealed and things have happened since")
    db.execute("DELETE FROM seals WHERE step = ? AND void = 0", (step,))
    db.execute("INSERT INTO seals (clock, step) VALUES (?, ?)", (now, step))


def _mark(db: sqlite3.Connection, step: int) -> int | None:
    """The moment of the checkpoint of ``step``; None when the ledger does not know it."""
    seals = db.execute("SELECT clock, void FROM seals WHERE step = ? ORDER BY void, clock DESC", (step,)).fetchall()
    if step == 0:
        return 0
    if not seals:
        return None
    if seals[0]["void"]:
        raise StoreError(
            f"the checkpoint of step {step} was left behind when the run went back to an older one; remove it"
        )
    return int(seals[0]["clock"])


def settle(
    db: sqlite3.Connection, step: int, now: int, keep_finished: bool
) -> tuple[list[sqlite3.Row], list[sqlite3.Row]]:
    """Apply the rule above inside the caller's transaction; return the rows handed back and those rolled back."""
    mark = _mark(db, step)
    # A ledger behind its checkpoint (power lost before the log reached the disk) cannot say which finished groups are
    # already in the weights. Rolling them out afresh trains none of them twice.
    facts = {"mark": now - 1 if mark is None else mark, "now": now, "keep": keep_finished and mark is not None}
    rolled_back = db.execute("SELECT * FROM groups WHERE issued_at > :mark AND void = 0 ORDER BY row", facts).fetchall()
    unsettled = "issued_at <= :mark AND coalesce(trained_at > :mark, 1) AND coalesce(dropped_at > :mark, 1)"
    whole = (
        "coalesce(finished_at <= :mark, 0) AND :keep AND NOT EXISTS"
        " (SELECT 1 FROM trajectories WHERE owner = groups.row AND tokens IS NULL)"
    )
    again = db.execute(f"SELECT * FROM groups WHERE {unsettled} AND NOT ({whole}) ORDER BY row", facts).fetchall()
    db.execute(
        "UPDATE groups SET state = 'finished', reason = '', void = 0, trained_at = NULL, dropped_at = NULL"
        f" WHERE {unsettled} AND {whole}",
        facts,
    )
    for rows, reason in ((rolled_back, ROLLED_BACK), (again, INTERRUPTED)):
        db.executemany(
            "UPDATE groups SET state = 'dropped', reason = ?, void = 1, trained_at = NULL, dropped_at = ?"
            " WHERE row = ?",
            [(reason, now, row["row"]) for row in rows],
        )
    db.execute("UPDATE seals SET void = 1 WHERE clock > :mark", facts)
    db.execute("UPDATE mixed SET void = 1 WHERE clock > :mark", facts)
    return again, rolled_back
