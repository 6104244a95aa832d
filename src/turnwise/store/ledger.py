"""The ledger of a run: every group issued is in flight, finished, trained, or dropped and why.

    in_flight ──finish──> finished ──train──> trained
        └──────────drop──────┴──────drop────> dropped(reason)

Anything else than the arrows above raises. How a killed run goes on is told in :mod:`turnwise.store.resume`; for that
the ledger numbers all events by a clock of its own. ``step`` is the number of steps completed when a thing happens.

Does not know what a reward means, how tasks are chosen, or what a checkpoint holds.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from turnwise.core.records import Group, Task, Trajectory
from turnwise.errors import RecordError, StoreError
from turnwise.store import queries
from turnwise.store.database import Database
from turnwise.store.lock import Lock
from turnwise.store.queries import Balance, Entry
from turnwise.store.resume import Issued, Resumed, seal_moment, settle
from turnwise.store.trajectory_codec import clean, decode_task, encode, encode_task


class Ledger:
    """One writer; any number of readers (``readonly=True``) beside it. Safe to call from several threads."""

    def __init__(self, path: str | Path, readonly: bool = False) -> None:
        self.path = Path(path)
        if not self.path.parent.is_dir():
            raise StoreError(f"there is no run directory at {self.path.parent}")
        self._lock = None if readonly else Lock(self.path.with_name(self.path.name + ".lock"))
        try:
            self._database = Database(self.path, readonly)
        except BaseException:
            self._unlock()
            raise
        # a ledger with a past must first be told from which checkpoint the run goes on
        self._ready = not self._database.all("SELECT 1 FROM groups LIMIT 1")

    def close(self) -> None:
        self._database.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ the arrows

    def issue(self, group_id: str, task: Task, step: int, version: int) -> None:
        """Promise a group. Its id must be new, or that of a group undone by :meth:`resume`."""
        with self._write() as db:
            if queries.find(self._database, group_id) is not None:
                raise RecordError(f"group {group_id!r} was already issued; give every group its own id")
            db.execute(
                "INSERT INTO groups (id, task, version, state, step, issued_at) VALUES (?, ?, ?, 'in_flight', ?, ?)",
                (group_id, encode_task(task), version, step, self._database.tick()),
            )
            db.execute("UPDATE facts SET value = value + 1 WHERE name = 'issued'")

    def finish(self, group: Group, step: int) -> None:
        """Store the rollouts of a group in flight."""
        rows = [_row(trajectory) for trajectory in group.trajectories]
        with self._write() as db:
            row = self._expect(group.id, "finish", "in_flight")
            if decode_task(row["task"]) != group.task:
                raise RecordError(f"group {group.id!r} was issued for another task than {group.task.key}")
            sql = "UPDATE groups SET state = 'finished', step = ?, finished_at = ? WHERE row = ?"
            db.execute(sql, (step, self._database.tick(), row["row"]))
            db.executemany(
                "INSERT INTO trajectories (owner, id, status, reason, reward, success, turns, sampled, record, tokens)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [(row["row"], *values) for values in rows],
            )

    def train(self, group_ids: Iterable[str], step: int) -> None:
        """Mark finished groups as used by step ``step``, all or none. Call it *before* the update."""
        with self._write() as db:
            for group_id in group_ids:
                row = self._expect(group_id, "train on", "finished")
                sql = "UPDATE groups SET state = 'trained', step = ?, trained_at = ? WHERE row = ?"
                db.execute(sql, (step, self._database.tick(), row["row"]))

    def mix(self, trajectories: Iterable[Trajectory], step: int) -> None:
        """Note what else step ``step`` learns from: replayed trajectories, demonstrations. Call it *before* the update."""
        rows = [(step, clean(t.id), str(t.origin)) for t in trajectories]
        if rows:
            with self._write() as db:
                now = self._database.tick()
                db.executemany(
                    "INSERT INTO mixed (clock, step, trajectory, origin) VALUES (?, ?, ?, ?)",
                    [(now, *row) for row in rows],
                )

    def drop(self, group_id: str, reason: str, step: int) -> None:
        """Give up a group in flight or finished; say why."""
        if not reason:
            raise RecordError(f"group {group_id!r} cannot be dropped without a reason")
        with self._write() as db:
            row = self._expect(group_id, "drop", "in_flight", "finished")
            sql = "UPDATE groups SET state = 'dropped', step = ?, dropped_at = ?, reason = ? WHERE row = ?"
            db.execute(sql, (step, self._database.tick(), clean(reason), row["row"]))

    # ---------------------------------------------------- checkpoints, resume

    def seal(self, step: int) -> None:
        """Mark this moment as that of the checkpoint of ``step``, and force everything so far to the disk.

        Call it just before the checkpoint is written. A step is sealed once (twice only if nothing happened between):
        with two different moments for one step nobody could tell which of them a checkpoint shows.
        """
        with self._write(durable=True) as db:
            seal_moment(db, step, self._database.tick())

    def drain(self) -> None:
        """Everything is written at once here; :class:`turnwise.store.write_behind.Behind` puts it off."""

    def resume(self, step: int, keep_finished: bool = True) -> Resumed:
        """Go on from the checkpoint of ``step`` (0 when there is no checkpoint).

        ``keep_finished=False`` also rolls out finished groups afresh: for a run that must stay on-policy.
        """
        with self._write(resuming=True) as db:
            again, rolled_back = settle(db, step, self._database.tick(), keep_finished)
        self._ready = True
        return Resumed(tuple(map(queries.issued, again)), self.pending(), tuple(map(queries.issued, rolled_back)))

    def prune(self, before: int) -> int:
        """Forget the token arrays of settled groups of steps < ``before``; counts, texts and rewards stay.

        ``before`` must not exceed the step of the oldest checkpoint kept: groups used since then may be needed again.
        Returns how many trajectories lost theirs.
        """
        with self._write() as db:
            return db.execute(
                "UPDATE trajectories SET tokens = NULL WHERE tokens IS NOT NULL AND owner IN"
                " (SELECT row FROM groups WHERE step < ? AND state IN ('trained', 'dropped'))",
                (before,),
            ).rowcount

    # --------------------------------------------------------------- queries

    def balance(self) -> Balance:
        """Counts by state; raises when they do not add up to what was issued."""
        return queries.balance(self._database)

    def pending(self) -> tuple[Group, ...]:
        """Finished but untrained groups, oldest first."""
        return queries.pending(self._database)

    def in_flight(self) -> tuple[Issued, ...]:
        return queries.in_flight(self._database)

    def groups(self, step: int | None = None) -> tuple[Entry, ...]:
        """The groups to which something last happened during ``step`` (those it trained on, too); ``None``: all."""
        return queries.groups(self._database, step)

    def group(self, group_id: str) -> Group:
        return queries.group(self._database, group_id)

    def trajectory(self, trajectory_id: str) -> Trajectory:
        """The newest of that id. After pruning its token arrays are empty, all else is there."""
        return queries.trajectory(self._database, trajectory_id)

    def mixed(self) -> tuple[tuple[int, str, str], ...]:
        """What was mixed in, in order: step, trajectory id, origin."""
        return queries.mixed(self._database)

    def failures(self) -> dict[str, int]:
        """Failed trajectories by reason, commonest first."""
        return queries.failures(self._database)

    # --------------------------------------------------------------- private

    @contextlib.contextmanager
    def _write(self, resuming: bool = False, durable: bool = False) -> Iterator[sqlite3.Connection]:
        if self._lock is None:
            raise StoreError(f"{self.path} was opened for reading only")
        if not (self._ready or resuming):
            raise StoreError(f"{self.path} holds an earlier run; call resume(step of its checkpoint, or 0) first")
        with self._database.transaction(durable) as db:
            yield db

    def _expect(self, group_id: str, verb: str, *states: str) -> sqlite3.Row:
        row = queries.find(self._database, group_id)
        if row is None:
            raise RecordError(f"cannot {verb} group {group_id!r}: it was never issued")
        if row["state"] not in states:
            raise RecordError(f"cannot {verb} group {group_id!r}: it is {row['state']}, not {' or '.join(states)}")
        return row


def _row(trajectory: Trajectory) -> tuple[Any, ...]:
    record, tokens = encode(trajectory)
    verdict = None if trajectory.success is None else int(trajectory.success)
    names = (clean(trajectory.id), str(trajectory.status), clean(trajectory.reason))
    return (*names, float(trajectory.reward), verdict, len(trajectory.turns), trajectory.sampled, record, tokens)
