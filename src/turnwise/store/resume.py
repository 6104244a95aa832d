"""What becomes of every group when a run goes on from a checkpoint. The checkpoint is the single truth.

A checkpoint holds weights, sampler state, counters, and a *mark*: the reading of the ledger's clock at which all of
them were taken. A group is judged by where that snapshot believes it to be, not by where the dead process left it:

    issued after the mark             the snapshot never heard of it; the restored sampler will draw its task itself:
                                      dropped as "rolled back", not handed back (that would issue it twice)
    trained or dropped by the mark    part of the snapshot: stays
    finished by the mark, not settled by then
                                      its rollouts are whole and no younger than the weights: finished again
    anything else issued by the mark  in flight for the snapshot, but its rollouts are gone, or were sampled by weights
                                      that no longer exist: dropped as "interrupted", its task handed back

It does not matter whether the kill came before or after the checkpoint's rename: each checkpoint on the disk has its
own mark. Resuming twice from one, or next from an older one, is safe, because the clock never goes back. What lies
between the mark and the resume is abandoned for good: a checkpoint from there is refused.

The order a loop must keep: ``train`` before the update; then, with nothing issued or finished in between, ``mark =
seal()`` and the snapshot of every state; then ``save_checkpoint`` with the mark inside.

Does not know about files, checkpoints or processes.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from turnwise.data import Group, Task
from turnwise.errors import StoreError

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


def settle(
    db: sqlite3.Connection, mark: int, now: int, keep_finished: bool
) -> tuple[list[sqlite3.Row], list[sqlite3.Row]]:
    """Apply the rule above inside the caller's transaction; return the rows handed back and those rolled back."""
    if db.execute("SELECT 1 FROM resumes WHERE mark < ? AND ? <= clock", (mark, mark)).fetchone():
        raise StoreError(
            "this checkpoint was left behind when the run went back to an older one; resume from the newest"
        )
    # A ledger behind its checkpoint (power lost before the log reached the disk) cannot say which finished groups are
    # already in the weights. Rolling them out afresh trains none of them twice.
    certain = now > mark
    facts = {"mark": mark, "now": max(now, mark + 1), "keep": keep_finished and certain}
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
            [(reason, facts["now"], row["row"]) for row in rows],
        )
    db.execute("UPDATE facts SET value = :now WHERE name = 'clock'", facts)
    db.execute("INSERT INTO resumes VALUES (:mark, :now)", facts)
    return again, rolled_back
