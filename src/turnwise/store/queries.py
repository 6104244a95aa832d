"""What a ledger can be asked. Reads only; knows no rule about what may happen next."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass

from turnwise.core.records import Group, Task, Trajectory
from turnwise.errors import StoreError
from turnwise.store.database import Database
from turnwise.store.resume import Issued
from turnwise.store.trajectory_codec import clean, decode, decode_task


@dataclass(frozen=True, slots=True)
class Balance:
    """``issued == in_flight + finished + trained + dropped``, always."""

    issued: int
    in_flight: int
    finished: int
    trained: int
    dropped: int
    reasons: Mapping[str, int]  # of the dropped


@dataclass(frozen=True, slots=True)
class Entry:
    """One group as a viewer lists it."""

    group_id: str
    task: Task
    state: str
    reason: str
    version: int
    step: int  # of the last thing that happened to it: for a trained group, the step that used it
    trajectories: tuple[str, ...]
    reward: float | None  # mean over its trajectories
    success: float | None  # share, where the environment gives a verdict


STATES = ("in_flight", "finished", "trained", "dropped")


def balance(database: Database) -> Balance:
    counted = database.all(
        "SELECT state, count(*) AS n, (SELECT value FROM facts WHERE name = 'issued') AS issued"
        " FROM groups GROUP BY state"
    )
    dropped = database.all(
        "SELECT reason, count(*) FROM groups WHERE state = 'dropped' GROUP BY reason ORDER BY 2 DESC, 1"
    )
    states = {**dict.fromkeys(STATES, 0), **{row["state"]: row["n"] for row in counted}}
    issued = counted[0]["issued"] if counted else 0
    if issued != sum(states.values()):
        raise StoreError(f"{database.path} does not balance: {issued} groups were issued but {states} are on record")
    return Balance(issued=issued, **states, reasons={row[0]: row[1] for row in dropped})


def pending(database: Database) -> tuple[Group, ...]:
    rows = database.all("SELECT * FROM groups WHERE state = 'finished' ORDER BY row")
    return tuple(_load(database, row) for row in rows)


def in_flight(database: Database) -> tuple[Issued, ...]:
    return tuple(map(issued, database.all("SELECT * FROM groups WHERE state = 'in_flight' ORDER BY row")))


def groups(database: Database, step: int | None) -> tuple[Entry, ...]:
    where = "" if step is None else "WHERE step = :step"
    rows = database.all(f"SELECT * FROM groups {where} ORDER BY row", {"step": step})
    return tuple(_entry(database, row) for row in rows)


def group(database: Database, group_id: str) -> Group:
    row = find(database, group_id)
    if row is None:
        raise StoreError(f"there is no group {group_id!r} in {database.path}")
    return _load(database, row)


def trajectory(database: Database, trajectory_id: str) -> Trajectory:
    sql = "SELECT record, tokens FROM trajectories WHERE id = ? ORDER BY row DESC LIMIT 1"
    rows = database.all(sql, (clean(trajectory_id),))
    if not rows:
        raise StoreError(f"there is no trajectory {trajectory_id!r} in {database.path}")
    return decode(rows[0]["record"], rows[0]["tokens"])


def mixed(database: Database) -> tuple[tuple[int, str, str], ...]:
    if not database.all("SELECT 1 FROM sqlite_master WHERE name = 'mixed'"):
        return ()
    rows = database.all("SELECT step, trajectory, origin FROM mixed WHERE void = 0 ORDER BY clock, rowid")
    return tuple((row["step"], row["trajectory"], row["origin"]) for row in rows)


def failures(database: Database) -> dict[str, int]:
    sql = "SELECT reason, count(*) FROM trajectories WHERE status = 'failed' GROUP BY reason ORDER BY 2 DESC, 1"
    return {row[0]: row[1] for row in database.all(sql)}


def find(database: Database, group_id: str) -> sqlite3.Row | None:
    """The row of a group that no resume has undone."""
    rows = database.all("SELECT * FROM groups WHERE id = ? AND void = 0", (group_id,))
    return rows[0] if rows else None


def issued(row: sqlite3.Row) -> Issued:
    return Issued(row["id"], decode_task(row["task"]), row["step"], row["version"])


def _load(database: Database, row: sqlite3.Row) -> Group:
    members = database.all("SELECT record, tokens FROM trajectories WHERE owner = ? ORDER BY row", (row["row"],))
    return Group(row["id"], decode_task(row["task"]), tuple(decode(m["record"], m["tokens"]) for m in members))


def _entry(database: Database, row: sqlite3.Row) -> Entry:
    members = database.all("SELECT id, reward, success FROM trajectories WHERE owner = ? ORDER BY row", (row["row"],))
    return Entry(
        group_id=row["id"],
        task=decode_task(row["task"]),
        state=row["state"],
        reason=row["reason"],
        version=row["version"],
        step=row["step"],
        trajectories=tuple(m["id"] for m in members),
        reward=_mean([m["reward"] for m in members]),
        success=_mean([m["success"] for m in members]),
    )


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
