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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from turnwise.core.records import Group, Task, Trajectory
from turnwise.errors import StoreError
from turnwise.inspector.queries_rows import (
    FlowRow,
    GroupRow,
    MessageRow,
    StepMetrics,
    StepOutcome,
    TaskRow,
    TrajectoryRow,
)
from turnwise.observe.trackers import MESSAGES, read_rows
from turnwise.store import token_columns as columns
from turnwise.store.atomic import DIGEST
from turnwise.store.database import GroupCounts, LedgerReader
from turnwise.store.resume import INTERRUPTED, ROLLED_BACK
from turnwise.store.rundir import RunDir
from turnwise.store.token_columns import TokenColumns
from turnwise.store.trajectory_codec import decode, decode_task, encode_task

LIVE = "g.void = 0"  # groups that no resume has undone
GROUP_FIELDS = (
    "g.*, count(t.row) AS n, sum(t.sampled) AS tokens, avg(t.reward) AS mean, min(t.reward) AS low,"
    " max(t.reward) AS high, avg(t.success) AS success"
)
TRAJECTORY_FIELDS = (
    "t.id, t.status, t.reason, t.reward, t.success, t.turns, t.sampled, g.id AS group_id, g.task, g.state, g.step,"
    " g.version"
)


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
    def metadata(self) -> Mapping[str, Any]:
        """The content of ``run.json``."""
        return self._metadata

    @property
    def summary(self) -> Mapping[str, Any] | None:
        """The content of ``summary.json``; None while the run goes on."""
        return _read_json(self.run.summary)

    def evaluation(self, when: str) -> Mapping[str, Any] | None:
        """The evaluation ``before`` or ``after`` training: ``{"summary": ..., "rows": [...]}``."""
        return _read_json(self.path / f"evaluation_{when}.json")

    def messages(self) -> list[MessageRow]:
        rows = read_rows(self.path / MESSAGES)
        return [
            MessageRow(
                int(row["step"]),
                float(row.get("time", 0)),
                str(row.get("level", "info")),
                str(row.get("text", "")),
                str(row.get("name", "")),
            )
            for row in rows
        ]

    # --------------------------------------------------------------- metrics

    def metrics(self) -> list[StepMetrics]:
        """Every row, in order. A step has a second row where it was also evaluated."""
        reserved = ("step", "time")
        return [
            StepMetrics(
                int(row["step"]), float(row.get("time") or 0), {k: v for k, v in row.items() if k not in reserved}
            )
            for row in read_rows(self.run.metrics)
        ]

    def steps(self) -> list[int]:
        return sorted({row.step for row in self.metrics()})

    def series(self, name: str) -> list[tuple[int, float]]:
        """The finite values of one metric, by step."""
        return [(row.step, value) for row in self.metrics() if (value := row[name]) is not None]

    # ---------------------------------------------------------------- ledger

    @cached_property
    def database(self) -> LedgerReader:
        """The ledger's database, opened on first use: a run may have metrics and no ledger yet."""
        return LedgerReader(self.run.ledger)

    @property
    def has_ledger(self) -> bool:
        return self.run.ledger.is_file()

    def counts(self) -> GroupCounts:
        """Groups by state and, of the dropped ones, by reason."""
        return self.database.group_counts()

    def groups(
        self,
        step: int | None = None,
        state: str = "",
        task: str = "",
        void: bool = False,
        limit: int = -1,
        offset: int = 0,
    ) -> list[GroupRow]:
        """Groups in the order of issue. ``task``: a task's key; ``void``: also those that a resume has undone."""
        where = ["1"] if void else [LIVE]
        values: dict[str, Any] = {"limit": limit, "offset": offset}
        if step is not None:
            where.append("g.step = :step")
            values["step"] = step - 1
        if state:
            where.append("g.state = :state")
            values["state"] = state
        if task:
            where.append("g.task = :task")
            values["task"] = _encoded_task(task)
        rows = self.database.fetch_all(
            f"SELECT {GROUP_FIELDS} FROM"
            f" (SELECT * FROM groups g WHERE {' AND '.join(where)} ORDER BY g.row LIMIT :limit OFFSET :offset) g"
            " LEFT JOIN trajectories t ON t.owner = g.row GROUP BY g.row ORDER BY g.row",
            values,
        )
        return [_group_row(row) for row in rows]

    def group(self, group_id: str) -> Group:
        """A group with everything its trajectories hold; also one that a resume has undone."""
        rows = self.database.fetch_all("SELECT row, task FROM groups WHERE id = ? ORDER BY void, row DESC", (group_id,))
        if not rows:
            raise StoreError(f"there is no group {group_id!r} in {self.path}")
        sql = "SELECT record, tokens FROM trajectories WHERE owner = ? ORDER BY row"
        members = self.database.fetch_all(sql, (rows[0]["row"],))
        return Group(group_id, decode_task(rows[0]["task"]), tuple(decode(m["record"], m["tokens"]) for m in members))

    def group_row(self, group_id: str) -> GroupRow:
        rows = self.database.fetch_all(
            f"SELECT {GROUP_FIELDS} FROM groups g"
            " LEFT JOIN trajectories t ON t.owner = g.row WHERE g.id = ? GROUP BY g.row ORDER BY g.void, g.row DESC",
            (group_id,),
        )
        if not rows:
            raise StoreError(f"there is no group {group_id!r} in {self.path}")
        return _group_row(rows[0])

    def trained_groups(self, step: int) -> list[Group]:
        """The groups that a step trained on, with everything their trajectories hold."""
        return [self.group(row.id) for row in self.groups(step=step, state="trained")]

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
        if order.removesuffix(" DESC") not in ("t.row", "t.reward", "t.sampled", "t.turns"):
            raise StoreError(f"trajectories cannot be ordered by {order!r}")
        where, values = [LIVE], dict[str, Any](limit=limit, offset=offset)
        if step is not None:
            where.append("g.step = :step")
            values["step"] = step - 1
        if group:
            where.append("g.id = :group")
            values["group"] = group
        if search:
            where.append("(instr(t.id, :search) OR instr(t.reason, :search) OR instr(t.record, :search))")
            values["search"] = search
        rows = self.database.fetch_all(
            f"SELECT {TRAJECTORY_FIELDS} FROM trajectories t JOIN groups g ON g.row = t.owner"
            f" WHERE {' AND '.join(where)} ORDER BY {order} LIMIT :limit OFFSET :offset",
            values,
        )
        return [_trajectory_row(row) for row in rows]

    def trajectory_row(self, trajectory_id: str) -> TrajectoryRow:
        rows = self.database.fetch_all(
            f"SELECT {TRAJECTORY_FIELDS} FROM trajectories t JOIN groups g ON g.row = t.owner"
            " WHERE t.id = ? ORDER BY g.void, t.row DESC LIMIT 1",
            (trajectory_id,),
        )
        if not rows:
            raise StoreError(f"there is no trajectory {trajectory_id!r} in {self.path}")
        return _trajectory_row(rows[0])

    def trajectory(self, trajectory_id: str) -> Trajectory:
        """Everything that is stored of it: turns with tokens, log-probabilities and times, rewards, messages."""
        return self.database.trajectory(trajectory_id)

    def count_trajectories(self, step: int | None = None) -> tuple[int, int]:
        """Numbers of trajectories and of sampled tokens, of one step or of all."""
        where, values = (LIVE, ()) if step is None else (f"{LIVE} AND g.step = ?", (step - 1,))
        sql = "SELECT count(*), coalesce(sum(t.sampled), 0) FROM trajectories t JOIN groups g ON g.row = t.owner WHERE "
        row = self.database.fetch_all(sql + where, values)[0]
        return int(row[0]), int(row[1])

    # ------------------------------------------------------ where groups went

    def flow(self) -> list[FlowRow]:
        """Groups by step, state and reason; a resume's "rolled back" and "interrupted" are reasons like any other."""
        rows = self.database.fetch_all(
            "SELECT g.step AS step, g.state AS state, g.reason AS reason, count(*) AS n, sum(coalesce(flat, 0)) AS flat"
            " FROM groups g LEFT JOIN (SELECT owner, min(reward) = max(reward) AS flat FROM trajectories"
            " GROUP BY owner) s ON s.owner = g.row GROUP BY g.step, g.state, g.reason ORDER BY g.step, g.state, g.reason"
        )
        return [FlowRow(r["step"] + 1, r["state"], r["reason"], r["n"], r["flat"]) for r in rows]

    def drops(self) -> dict[str, int]:
        """Dropped groups by reason, most frequent first."""
        return dict(self.counts().reasons)

    def failures(self) -> dict[str, int]:
        """Failed trajectories by reason, most frequent first."""
        return self.database.failures()

    def step_outcomes(self) -> list[StepOutcome]:
        """Rewards and successes of all finished trajectories, by step."""
        rows = self.database.fetch_all(
            "SELECT g.step AS step, count(*) AS n, sum(t.sampled) AS tokens, avg(t.reward) AS reward,"
            " avg(t.reward * t.reward) AS square, count(t.success) AS judged, coalesce(sum(t.success), 0) AS good,"
            " max(t.reward) AS best FROM trajectories t JOIN groups g ON g.row = t.owner"
            f" WHERE {LIVE} AND t.status != 'failed' GROUP BY g.step ORDER BY g.step"
        )
        top = max((row["best"] for row in rows if row["best"] is not None), default=0.0)
        at_top = self.database.fetch_all(
            "SELECT g.step AS step, count(*) AS n FROM trajectories t JOIN groups g ON g.row = t.owner"
            f" WHERE {LIVE} AND t.status != 'failed' AND t.reward = ? GROUP BY g.step",
            (top,),
        )
        counts = {row["step"]: row["n"] for row in at_top}
        return [
            StepOutcome(
                step=r["step"] + 1,
                trajectories=r["n"],
                tokens=r["tokens"],
                reward=r["reward"] or 0.0,
                deviation=max(0.0, (r["square"] or 0.0) - (r["reward"] or 0.0) ** 2) ** 0.5,
                judged=r["judged"],
                successes=r["good"],
                best=r["best"] or 0.0,
                at_best=counts.get(r["step"], 0),
            )
            for r in rows
        ]

    def task_rows(self) -> list[TaskRow]:
        """Trajectories and successes of each task, by step, in order."""
        rows = self.database.fetch_all(
            "SELECT g.task AS task, g.step AS step, count(*) AS n, sum(t.success) AS good, avg(t.reward) AS reward"
            f" FROM trajectories t JOIN groups g ON g.row = t.owner WHERE {LIVE} GROUP BY g.task, g.step"
            " ORDER BY g.task, g.step"
        )
        return [TaskRow(decode_task(r["task"]).key, r["step"] + 1, r["n"], r["good"], r["reward"]) for r in rows]

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


@contextmanager
def open_runs(paths: list[str]) -> Iterator[list[RunReader]]:
    """Readers of several runs, closed together."""
    readers = [RunReader(path) for path in paths]
    try:
        yield readers
    finally:
        for reader in readers:
            reader.close()


def _group_row(row: Any) -> GroupRow:
    return GroupRow(
        id=row["id"],
        task=decode_task(row["task"]),
        state=row["state"],
        step=row["step"] + 1,
        reason=row["reason"],
        version=row["version"],
        void=bool(row["void"]),
        trajectories=row["n"],
        tokens=row["tokens"] or 0,
        reward=row["mean"],
        reward_low=row["low"],
        reward_high=row["high"],
        success=row["success"],
    )


def _trajectory_row(row: Any) -> TrajectoryRow:
    return TrajectoryRow(
        id=row["id"],
        group=row["group_id"],
        task=decode_task(row["task"]),
        state=row["state"],
        step=row["step"] + 1,
        version=row["version"],
        status=row["status"],
        reason=row["reason"],
        reward=row["reward"],
        success=None if row["success"] is None else bool(row["success"]),
        turns=row["turns"],
        tokens=row["sampled"],
    )


def _encoded_task(key: str) -> str:
    """The ledger's text of a task with this key."""
    environment, split, difficulty, seed = key.rsplit("/", 3)
    if not (seed.lstrip("-").isdigit() and difficulty.lstrip("-").isdigit()):
        raise StoreError(f"{key!r} is not a task; write environment/split/difficulty/seed")
    return encode_task(Task(environment, int(seed), split, int(difficulty)))


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None
        return None if content is None else {name: value for name, value in content.items() if name != DIGEST}
    except ValueError:
        return None  # being written


__all__ = [
    "INTERRUPTED",
    "ROLLED_BACK",
    "FlowRow",
    "GroupRow",
    "MessageRow",
    "RunReader",
    "StepMetrics",
    "StepOutcome",
    "TaskRow",
    "TokenColumns",
    "TrajectoryRow",
    "open_runs",
]
