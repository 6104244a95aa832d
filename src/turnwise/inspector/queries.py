"""Typed reads of a run directory, while the run goes on or afterwards: the one way of this room to its data.

    run = RunReader("runs/grpo-lookup-s0-1")
    run.steps()                     the steps that were logged
    run.groups(step=3)              the groups that step 3 trained on or dropped
    run.token_columns(step=3)       what its updates computed for each token

A step is numbered as in ``metrics.jsonl``: step 1 is the first. (The ledger counts the steps completed *before*, so its step
0 is step 1 here; only this module knows.) Everything is read-only, and nothing is cached that a running run may still change.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from turnwise.core.records import Group, Task, Trajectory
from turnwise.errors import StoreError
from turnwise.observe.trackers import MESSAGES, read_rows
from turnwise.store import token_columns as columns
from turnwise.store.atomic import DIGEST
from turnwise.store.database import LedgerReader
from turnwise.store.rundir import RunDir
from turnwise.store.token_columns import TokenColumns
from turnwise.store.trajectory_codec import decode, decode_task

IDS_PER_QUERY = 500  # below the number of values that any SQLite accepts
LIVE = "g.void = 0"  # groups that no resume has undone
# Columns are named as the fields of the rows below, so that a row of the database is the arguments of its class.
GROUP_FIELDS = (
    "g.id, g.task, g.state, g.step + 1 AS step, g.reason, g.version, g.void, count(t.row) AS trajectories,"
    " coalesce(sum(t.sampled), 0) AS tokens, avg(t.reward) AS reward, min(t.reward) AS reward_low,"
    " max(t.reward) AS reward_high, avg(t.success) AS success"
)
TRAJECTORY_FIELDS = (
    't.id, g.id AS "group", g.task, g.state, g.step + 1 AS step, g.version, t.status, t.reason, t.reward, t.success, t.turns,'
    " t.sampled AS tokens"
)


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One row of ``metrics.jsonl``: the numbers of a step by name; None where a number was not finite."""

    step: int
    time: float
    values: Mapping[str, float | None]

    def __getitem__(self, name: str) -> float | None:
        return self.values.get(name)


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One group as the ledger counts it, without its trajectories' content."""

    id: str
    task: Task
    state: str  # in_flight, finished, trained, dropped
    step: int  # of its last transition
    reason: str  # why it was dropped
    version: int  # of the policy when it was issued
    void: bool  # undone by a resume
    trajectories: int
    tokens: int
    reward: float | None  # mean
    reward_low: float | None
    reward_high: float | None
    success: float | None  # share


@dataclass(frozen=True, slots=True)
class TrajectoryRow:
    """One trajectory without its tokens and messages."""

    id: str
    group: str
    task: Task
    state: str  # of its group
    step: int  # of its group
    version: int
    status: str  # finished, truncated, failed
    reason: str
    reward: float | None
    success: bool | None
    turns: int
    tokens: int


@dataclass(frozen=True, slots=True)
class FlowRow:
    """How many groups of one step ended in one state, for one reason."""

    step: int
    state: str
    reason: str
    groups: int
    without_spread: int  # whose trajectories all have the same reward


@dataclass(frozen=True, slots=True)
class TaskRow:
    """The trajectories of one task in one step."""

    task: str  # its key
    step: int
    trajectories: int
    successes: int | None
    reward: float | None


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The trajectories that one step trained on or dropped: how many, their reward, how many succeeded."""

    step: int
    trajectories: int
    tokens: int
    reward: float  # mean
    deviation: float  # standard deviation of the reward
    judged: int  # with a verdict
    successes: int
    best: float  # highest reward
    at_best: int  # trajectories that have it


class RunReader:
    """One run, read-only. Safe to call from several threads; close it, or use it in a ``with`` block."""

    def __init__(self, path: str | Path) -> None:
        self.run = RunDir.open(path)
        self.path = self.run.path
        self._metadata = self.run.metadata()

    # --------------------------------------------------------------- the run

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def settings(self) -> Mapping[str, Any]:
        return dict(self._metadata.get("settings", {}))

    @property
    def summary(self) -> Mapping[str, Any] | None:
        """The content of ``summary.json``; None while the run goes on."""
        return _read_json(self.run.summary)

    def evaluation(self, when: str) -> Mapping[str, Any] | None:
        """The evaluation ``before`` or ``after`` training: ``{"summary": ..., "rows": [...]}``."""
        return _read_json(self.path / f"evaluation_{when}.json")

    def messages(self) -> list[dict[str, Any]]:
        """What the run told its user: ``step``, ``time``, ``level``, ``text`` and ``name`` of each message."""
        return read_rows(self.path / MESSAGES)

    # --------------------------------------------------------------- metrics

    def metrics(self) -> list[StepMetrics]:
        """Every row, in order. A step has a second row where it was also evaluated."""
        rows = []
        for values in read_rows(self.run.metrics):
            step, time = int(values.pop("step")), float(values.pop("time", None) or 0)
            rows.append(StepMetrics(step, time, values))
        return rows

    def steps(self) -> list[int]:
        return sorted({row.step for row in self.metrics()})

    # ---------------------------------------------------------------- ledger

    @cached_property
    def database(self) -> LedgerReader:
        """The ledger's database, opened on first use: a run may have metrics and no ledger yet."""
        return LedgerReader(self.run.ledger)

    @property
    def has_ledger(self) -> bool:
        return self.run.ledger.is_file()

    def groups(self, step: int | None = None, state: str = "", limit: int = -1, offset: int = 0) -> list[GroupRow]:
        """Groups in the order of issue."""
        where = [LIVE] + (["g.step = :step - 1"] if step is not None else []) + (["g.state = :state"] if state else [])
        # the limit stands inside: grouping all trajectories of a run for a page of hundred groups would take seconds
        return self._groups(
            f"(SELECT * FROM groups g WHERE {' AND '.join(where)} ORDER BY g.row LIMIT :limit OFFSET :offset) g"
            " LEFT JOIN trajectories t ON t.owner = g.row GROUP BY g.row ORDER BY g.row",
            {"step": step, "state": state, "limit": limit, "offset": offset},
        )

    def group_row(self, group_id: str) -> GroupRow:
        where = "LEFT JOIN trajectories t ON t.owner = g.row WHERE g.id = ? GROUP BY g.row ORDER BY g.void, g.row DESC"
        return self._one(self._groups(f"groups g {where}", (group_id,)), "group", group_id)

    def _groups(self, source: str, values: Any) -> list[GroupRow]:
        rows = map(dict, self.database.fetch_all(f"SELECT {GROUP_FIELDS} FROM {source}", values))
        return [GroupRow(**{**row, "task": decode_task(row["task"]), "void": bool(row["void"])}) for row in rows]

    def _one(self, rows: Sequence[Any], kind: str, name: str) -> Any:
        if not rows:
            raise StoreError(f"there is no {kind} {name!r} in {self.path}")
        return rows[0]

    def group(self, group_id: str) -> Group:
        """A group with everything its trajectories hold; also one that a resume has undone."""
        rows = self.database.fetch_all("SELECT row, task FROM groups WHERE id = ? ORDER BY void, row DESC", (group_id,))
        row = self._one(rows, "group", group_id)
        return Group(group_id, decode_task(row["task"]), self.database.members(row["row"]))

    def mixed(self, step: int) -> list[tuple[str, str]]:
        """Trajectory id and origin of what a step trained on besides its own groups."""
        return [(trajectory, origin) for at, trajectory, origin in self.database.mixed() if at == step - 1]

    # ---------------------------------------------------------- trajectories

    def trajectories(
        self,
        step: int | None = None,
        group: str = "",
        search: str = "",
        order: str = "t.row",
        limit: int = -1,
        offset: int = 0,
    ) -> list[TrajectoryRow]:
        """``search``: a part of the id, the reason or the task's key. ``order``: a column, with ``DESC`` if so wished."""
        # the only text that enters SQL from outside as it is
        if order.removesuffix(" DESC") not in ("t.row", "t.reward", "t.sampled", "t.turns"):
            raise StoreError(f"trajectories cannot be ordered by {order!r}")
        where = [LIVE] + (["g.step = :step - 1"] if step is not None else []) + (["g.id = :group"] if group else [])
        if search:
            where.append("(instr(t.id, :search) OR instr(t.reason, :search) OR instr(t.record, :search))")
        values = {"step": step, "group": group, "search": search, "limit": limit, "offset": offset}
        return self._trajectories(f"{' AND '.join(where)} ORDER BY {order} LIMIT :limit OFFSET :offset", values)

    def trajectory_row(self, trajectory_id: str) -> TrajectoryRow:
        rows = self._trajectories("t.id = ? ORDER BY g.void, t.row DESC LIMIT 1", (trajectory_id,))
        return self._one(rows, "trajectory", trajectory_id)

    def _trajectories(self, where: str, values: Any) -> list[TrajectoryRow]:
        sql = f"SELECT {TRAJECTORY_FIELDS} FROM trajectories t JOIN groups g ON g.row = t.owner WHERE {where}"
        rows = [dict(row) for row in self.database.fetch_all(sql, values)]
        for row in rows:
            row["task"] = decode_task(row["task"])
            row["success"] = None if row["success"] is None else bool(row["success"])
        return [TrajectoryRow(**row) for row in rows]

    def trajectory(self, trajectory_id: str) -> Trajectory:
        """Everything that is stored of it: turns with tokens, log-probabilities and times, rewards, messages."""
        return self.database.trajectory(trajectory_id)

    def stored_trajectories(self, ids: Sequence[str]) -> dict[str, Trajectory]:
        """By id, those of ``ids`` that the ledger holds: rows of a file and demonstrations are not in it. The newest where a
        resume took one again."""
        stored: dict[str, Trajectory] = {}
        # one query for hundreds, because a query for each takes longer than what it reads
        for start in range(0, len(ids), IDS_PER_QUERY):
            some = tuple(ids[start : start + IDS_PER_QUERY])
            marks = ",".join("?" * len(some))
            sql = f"SELECT id, record, tokens FROM trajectories WHERE id IN ({marks}) ORDER BY row"
            newest = {row["id"]: row for row in self.database.fetch_all(sql, some)}
            stored |= {one: decode(row["record"], row["tokens"], one) for one, row in newest.items()}
        return stored

    def episodes_of(self, first: int, last: int, limit: int) -> list[Trajectory]:
        """The trajectories of some steps, at most ``limit``, without their tokens."""
        sql = (
            "SELECT t.record, t.id FROM trajectories t JOIN groups g ON g.row = t.owner"
            f" WHERE {LIVE} AND g.step BETWEEN ? AND ? ORDER BY t.row LIMIT ?"
        )
        rows = self.database.fetch_all(sql, (first - 1, last - 1, limit))
        return [decode(row["record"], None, row["id"]) for row in rows]

    def count_trajectories(self) -> tuple[int, int]:
        """Numbers of trajectories and of sampled tokens."""
        sql = "SELECT count(*), coalesce(sum(t.sampled), 0) FROM trajectories t JOIN groups g ON g.row = t.owner WHERE "
        row = self.database.fetch_all(sql + LIVE)[0]
        return int(row[0]), int(row[1])

    # ------------------------------------------------------ where groups went

    def flow(self) -> list[FlowRow]:
        """Groups by step, state and reason; a resume's "rolled back" and "interrupted" are reasons like any other."""
        rows = self.database.fetch_all(
            "SELECT g.step + 1 AS step, g.state, g.reason, count(*) AS groups, sum(coalesce(flat, 0)) AS without_spread"
            " FROM groups g LEFT JOIN (SELECT owner, min(reward) = max(reward) AS flat FROM trajectories"
            " GROUP BY owner) s ON s.owner = g.row GROUP BY g.step, g.state, g.reason ORDER BY g.step, g.state, g.reason"
        )
        return [FlowRow(**dict(row)) for row in rows]

    def step_outcomes(self) -> list[StepOutcome]:
        """Rewards and successes of all finished trajectories, by step."""
        rows = self.database.fetch_all(
            "WITH done AS (SELECT g.step + 1 AS step, t.sampled, t.reward, t.success FROM trajectories t"
            f" JOIN groups g ON g.row = t.owner WHERE {LIVE} AND t.status != 'failed')"
            " SELECT step, count(*) AS trajectories, sum(sampled) AS tokens, coalesce(avg(reward), 0.0) AS reward,"
            " coalesce(avg(reward * reward), 0.0) AS deviation, count(success) AS judged, coalesce(sum(success), 0)"
            " AS successes, coalesce(max(reward), 0.0) AS best, coalesce(sum(reward = (SELECT max(reward) FROM done)), 0)"
            " AS at_best FROM done GROUP BY step ORDER BY step"
        )
        outcomes = [StepOutcome(**dict(row)) for row in rows]
        # SQLite has no standard deviation: the mean of the squares stands in its column until here
        return [replace(o, deviation=max(0.0, o.deviation - o.reward**2) ** 0.5) for o in outcomes]

    def task_rows(self) -> list[TaskRow]:
        """Trajectories and successes of each task, by step, in order."""
        rows = self.database.fetch_all(
            "SELECT g.task, g.step + 1 AS step, count(*) AS trajectories, sum(t.success) AS successes, avg(t.reward) AS reward"
            f" FROM trajectories t JOIN groups g ON g.row = t.owner WHERE {LIVE} GROUP BY g.task, g.step"
            " ORDER BY g.task, g.step"
        )
        return [TaskRow(**{**dict(row), "task": decode_task(row["task"]).key}) for row in rows]

    # ---------------------------------------------------------------- tokens

    def kept_steps(self) -> list[int]:
        """The steps whose token columns are stored."""
        return [step + 1 for step in columns.kept_steps(self.database)]

    def token_columns(self, step: int) -> tuple[TokenColumns, ...]:
        """What the updates of a step computed for each token, in order; empty once pruned."""
        return columns.read_columns(self.database, step - 1)

    # --------------------------------------------------------------- closing

    def close(self) -> None:
        if "database" in vars(self):
            self.database.close()

    def __enter__(self) -> RunReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        # the digest seals the file and is no result
        content = dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None
        return None if content is None else {name: value for name, value in content.items() if name != DIGEST}
    except ValueError:
        return None  # being written
