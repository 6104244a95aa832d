"""Read-only queries of a ledger. Knows no rule about which transitions are allowed."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass

from turnwise.core.records import Facts, Group, Status, Task, Trajectory
from turnwise.core.text import clean
from turnwise.errors import StoreError
from turnwise.store.database import Database
from turnwise.store.resume import IssuedGroup
from turnwise.store.trajectory_codec import decode, decode_task


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """Groups by state. ``issued == in_flight + finished + trained + dropped`` always holds."""

    issued: int
    in_flight: int
    finished: int
    trained: int
    dropped: int
    reasons: Mapping[str, int]  # number of dropped groups by reason


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """One group without its token arrays, for listings."""

    group_id: str
    task: Task
    state: str
    reason: str
    version: int
    step: int  # of its last transition: for a trained group, the step that trained on it
    trajectories: tuple[str, ...]
    reward: float | None  # mean over its trajectories
    success: float | None  # success rate, where the environment reports success


@dataclass(frozen=True, slots=True)
class EpisodeFacts:
    """One trajectory without tokens and messages."""

    status: str
    reason: str
    sampled: int  # tokens
    trained: bool
    facts: Facts


STATES = ("in_flight", "finished", "trained", "dropped")


def group_counts(database: Database) -> GroupCounts:
    state_rows = database.fetch_all(
        "SELECT state, count(*) AS n, (SELECT value FROM facts WHERE name = 'issued') AS issued"
        " FROM groups GROUP BY state"
    )
    reason_rows = database.fetch_all(
        "SELECT reason, count(*) FROM groups WHERE state = 'dropped' GROUP BY reason ORDER BY 2 DESC, 1"
    )
    states = {**dict.fromkeys(STATES, 0), **{row["state"]: row["n"] for row in state_rows}}
    issued = state_rows[0]["issued"] if state_rows else 0
    if issued != sum(states.values()):
        raise StoreError(f"{database.path} is inconsistent: {issued} groups were issued but {states} are recorded")
    return GroupCounts(issued=issued, **states, reasons={row[0]: row[1] for row in reason_rows})


def pending(database: Database) -> tuple[Group, ...]:
    rows = database.fetch_all("SELECT * FROM groups WHERE state = 'finished' ORDER BY row")
    return tuple(_load_group(database, row) for row in rows)


def in_flight(database: Database) -> tuple[IssuedGroup, ...]:
    return tuple(map(issued_group, database.fetch_all("SELECT * FROM groups WHERE state = 'in_flight' ORDER BY row")))


def groups(database: Database, step: int | None) -> tuple[GroupSummary, ...]:
    where = "" if step is None else "WHERE step = :step"
    rows = database.fetch_all(f"SELECT * FROM groups {where} ORDER BY row", {"step": step})
    return tuple(_summary(database, row) for row in rows)


def group(database: Database, group_id: str) -> Group:
    row = find_group(database, group_id)
    if row is None:
        raise StoreError(f"there is no group {group_id!r} in {database.path}")
    return _load_group(database, row)


def trajectory(database: Database, trajectory_id: str) -> Trajectory:
    sql = "SELECT record, tokens FROM trajectories WHERE id = ? ORDER BY row DESC LIMIT 1"
    rows = database.fetch_all(sql, (clean(trajectory_id),))
    if not rows:
        raise StoreError(f"there is no trajectory {trajectory_id!r} in {database.path}")
    return decode(rows[0]["record"], rows[0]["tokens"])


def mixed(database: Database) -> tuple[tuple[int, str, str], ...]:
    if not database.fetch_all("SELECT 1 FROM sqlite_master WHERE name = 'mixed'"):
        return ()
    rows = database.fetch_all("SELECT step, trajectory, origin FROM mixed WHERE void = 0 ORDER BY clock, rowid")
    return tuple((row["step"], row["trajectory"], row["origin"]) for row in rows)


def failures(database: Database) -> dict[str, int]:
    sql = "SELECT reason, count(*) FROM trajectories WHERE status = 'failed' GROUP BY reason ORDER BY 2 DESC, 1"
    return {row[0]: row[1] for row in database.fetch_all(sql)}


def episode_facts(database: Database) -> tuple[EpisodeFacts, ...]:
    """All stored trajectories in order, without tokens and messages."""
    rows = database.fetch_all(
        "SELECT g.state, t.status, t.reason, t.sampled, t.record FROM trajectories t JOIN groups g ON g.row = t.owner"
        " WHERE g.void = 0 ORDER BY t.row"
    )
    return tuple(
        EpisodeFacts(
            r["status"],
            r["reason"],
            r["sampled"],
            r["state"] == "trained" and r["status"] != Status.FAILED,
            json.loads(r["record"]).get("facts", {}),
        )
        for r in rows
    )


def find_group(database: Database, group_id: str) -> sqlite3.Row | None:
    """The row of a group that no resume has rolled back."""
    rows = database.fetch_all("SELECT * FROM groups WHERE id = ? AND void = 0", (group_id,))
    return rows[0] if rows else None


def issued_group(row: sqlite3.Row) -> IssuedGroup:
    return IssuedGroup(row["id"], decode_task(row["task"]), row["step"], row["version"])


def _load_group(database: Database, row: sqlite3.Row) -> Group:
    members = database.fetch_all("SELECT record, tokens FROM trajectories WHERE owner = ? ORDER BY row", (row["row"],))
    return Group(row["id"], decode_task(row["task"]), tuple(decode(m["record"], m["tokens"]) for m in members))


def _summary(database: Database, row: sqlite3.Row) -> GroupSummary:
    members = database.fetch_all(
        "SELECT id, reward, success FROM trajectories WHERE owner = ? ORDER BY row", (row["row"],)
    )
    return GroupSummary(
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
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None
