"""Many trajectories of a run at once: one query for hundreds, because a query for each takes longer than what it reads."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.core.records import Trajectory
from turnwise.errors import StoreError
from turnwise.inspector.queries import RunReader
from turnwise.store.trajectory_codec import decode

IDS_PER_QUERY = 500  # below the number of values that any SQLite accepts


def stored_trajectories(run: RunReader, ids: Sequence[str]) -> dict[str, Trajectory]:
    """By id, all of them; refuses where one is missing."""
    found = ledger_trajectories(run, ids)
    missing = [one for one in ids if one not in found]
    if missing:
        raise StoreError(f"there is no trajectory {missing[0]!r} in {run.path}")
    return found


def ledger_trajectories(run: RunReader, ids: Sequence[str]) -> dict[str, Trajectory]:
    """By id, those that the ledger holds: rows of a file and demonstrations are not in it. The newest where a resume took one
    again."""
    found: dict[str, Trajectory] = {}
    for start in range(0, len(ids), IDS_PER_QUERY):
        some = ids[start : start + IDS_PER_QUERY]
        marks = ",".join("?" * len(some))
        sql = f"SELECT id, record, tokens FROM trajectories WHERE id IN ({marks}) ORDER BY row"
        newest = {row["id"]: row for row in run.database.fetch_all(sql, tuple(some))}
        found |= {one: decode(row["record"], row["tokens"]) for one, row in newest.items()}
    return found
