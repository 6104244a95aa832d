"""The ledger of a run: every group issued is in flight, finished, trained, or dropped with a reason.

    in_flight ──finish──> finished ──train──> trained
        └──────────drop──────┴──────drop────> dropped(reason)

Any other transition raises. :mod:`turnwise.store.resume` defines how a killed run continues; for that purpose the
ledger numbers all events by a logical clock. ``step`` is the number of steps completed at the time of a transition.

Does not know what a reward means, how tasks are chosen, or what a checkpoint holds.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from turnwise.core.records import Group, Task, Trajectory
from turnwise.core.text import clean
from turnwise.errors import RecordError, StoreError
from turnwise.store.database import LedgerReader, issued_group
from turnwise.store.lock import ProcessLock
from turnwise.store.resume import ResumePlan, digest, record_seal, roll_back
from turnwise.store.token_columns import TokenColumns, encode_columns
from turnwise.store.trajectory_codec import decode_task, encode, encode_task


class SqliteLedger(LedgerReader):
    """One writer; any number of readers (``readonly=True``) beside it. Safe to call from several threads."""

    def __init__(self, path: str | Path, readonly: bool = False) -> None:
        path = Path(path)
        if not path.parent.is_dir():
            raise StoreError(f"there is no run directory at {path.parent}")
        self._lock = None if readonly else ProcessLock(path.with_name(path.name + ".lock"))
        try:
            super().__init__(path, readonly)
        except BaseException:
            self._unlock()
            raise
        # a ledger with earlier groups accepts no writes before resume() names the checkpoint to continue from
        self._writable = not self.fetch_all("SELECT 1 FROM groups LIMIT 1")

    def close(self) -> None:
        super().close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> SqliteLedger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------- transitions

    def issue(self, group_id: str, task: Task, step: int, version: int) -> None:
        """Register a group in flight. Its id must be new, or that of a group rolled back by :meth:`resume`."""
        with self._write() as db:
            if self.find_group(group_id) is not None:
                raise RecordError(f"group {group_id!r} was already issued; give every group its own id")
            db.execute(
                "INSERT INTO groups (id, task, version, state, step, issued_at) VALUES (?, ?, ?, 'in_flight', ?, ?)",
                (group_id, encode_task(task), version, step, self.next_tick()),
            )
            db.execute("UPDATE facts SET value = value + 1 WHERE name = 'issued'")

    def finish(self, group: Group, step: int) -> None:
        """Store the rollouts of a group in flight."""
        rows = [_row(trajectory) for trajectory in group.trajectories]
        with self._write() as db:
            row = self._require_state(group.id, "finish", "in_flight")
            if decode_task(row["task"]) != group.task:
                raise RecordError(f"group {group.id!r} was issued for another task than {group.task.key}")
            sql = "UPDATE groups SET state = 'finished', step = ?, finished_at = ? WHERE row = ?"
            db.execute(sql, (step, self.next_tick(), row["row"]))
            db.executemany(
                "INSERT INTO trajectories (owner, id, status, reason, reward, success, turns, sampled, record, tokens)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [(row["row"], *values) for values in rows],
            )

    def train(self, group_ids: Iterable[str], step: int) -> None:
        """Mark finished groups as used by step ``step``, all or none. Call it *before* the update."""
        with self._write() as db:
            for group_id in group_ids:
                row = self._require_state(group_id, "train on", "finished")
                sql = "UPDATE groups SET state = 'trained', step = ?, trained_at = ? WHERE row = ?"
                db.execute(sql, (step, self.next_tick(), row["row"]))

    def record_mixed(self, trajectories: Iterable[Trajectory], step: int) -> None:
        """Record what else step ``step`` trains on: replayed trajectories, demonstrations. Call it *before* the update."""
        rows = [(step, clean(t.id), str(t.origin)) for t in trajectories]
        if rows:
            with self._write() as db:
                now = self.next_tick()
                db.executemany(
                    "INSERT INTO mixed (clock, step, trajectory, origin) VALUES (?, ?, ?, ?)",
                    [(now, *row) for row in rows],
                )

    def keep_tokens(self, make: Callable[[], Sequence[TokenColumns]], step: int, steps: int) -> None:
        """Store what the updates of step ``step`` computed for each token, and delete that of all but the last ``steps`` steps.

        ``make`` copies the numbers from the device: it is called when they are written."""
        rows = [(t.step, t.position, *encode_columns(t)) for t in make()]
        with self._write() as db:
            db.executemany("INSERT OR REPLACE INTO token_columns VALUES (?, ?, ?, ?)", rows)
            db.execute("DELETE FROM token_columns WHERE step <= ?", (step - steps,))

    def drop(self, group_id: str, reason: str, step: int) -> None:
        """Drop a group that is in flight or finished, with a reason."""
        if not reason:
            raise RecordError(f"group {group_id!r} cannot be dropped without a reason")
        with self._write() as db:
            row = self._require_state(group_id, "drop", "in_flight", "finished")
            sql = "UPDATE groups SET state = 'dropped', step = ?, dropped_at = ?, reason = ? WHERE row = ?"
            db.execute(sql, (step, self.next_tick(), clean(reason), row["row"]))

    # ---------------------------------------------------- checkpoints, resume

    def seal(self, step: int) -> None:
        """Record the clock of the checkpoint of ``step`` and force everything so far to the disk.

        Call it just before the checkpoint is written. A step is sealed once (twice only without a transition in
        between): with two different clocks for one step it would be ambiguous which one the checkpoint contains.
        """
        with self._write(durable=True) as db:
            record_seal(db, step, self.next_tick())

    def digest(self, step: int) -> str | None:
        """A digest of what the seal of ``step`` covers, for the checkpoint to hold; None without such a seal."""
        return digest(self.fetch_all, step)

    def flush(self) -> None:
        """Does nothing: this class writes immediately, :class:`WriteBehindLedger` defers writes."""

    def resume(self, step: int, keep_finished: bool = True) -> ResumePlan:
        """Continue from the checkpoint of ``step`` (0 when there is no checkpoint).

        ``keep_finished=False`` discards finished groups too and reissues them: for a run that must stay on-policy.
        """
        with self._write(resuming=True) as db:
            to_reissue, rolled_back = roll_back(db, step, self.next_tick(), keep_finished)
            db.execute("DELETE FROM token_columns WHERE step >= ?", (step,))  # those steps are taken again
        self._writable = True
        return ResumePlan(tuple(map(issued_group, to_reissue)), self.pending(), tuple(map(issued_group, rolled_back)))

    def prune(self, before: int) -> int:
        """Delete the token arrays of trained and dropped groups of steps < ``before``; counts, texts and rewards stay.

        ``before`` must not exceed the step of the oldest checkpoint kept: a resume may need later groups again.
        Returns the number of trajectories pruned.
        """
        with self._write() as db:
            return db.execute(
                "UPDATE trajectories SET tokens = NULL WHERE tokens IS NOT NULL AND owner IN"
                " (SELECT row FROM groups WHERE step < ? AND state IN ('trained', 'dropped'))",
                (before,),
            ).rowcount

    # --------------------------------------------------------------- private

    @contextlib.contextmanager
    def _write(self, resuming: bool = False, durable: bool = False) -> Iterator[sqlite3.Connection]:
        if self._lock is None:
            raise StoreError(f"{self.path} was opened read-only")
        if not (self._writable or resuming):
            raise StoreError(f"{self.path} contains an earlier run; call resume(step of its checkpoint, or 0) first")
        with self.transaction(durable) as db:
            yield db

    def _require_state(self, group_id: str, verb: str, *states: str) -> sqlite3.Row:
        row = self.find_group(group_id)
        if row is None:
            raise RecordError(f"cannot {verb} group {group_id!r}: it was never issued")
        if row["state"] not in states:
            raise RecordError(f"cannot {verb} group {group_id!r}: it is {row['state']}, not {' or '.join(states)}")
        return row


def _row(trajectory: Trajectory) -> tuple[Any, ...]:
    record, tokens = encode(trajectory)
    success = None if trajectory.success is None else int(trajectory.success)
    labels = (clean(trajectory.id), str(trajectory.status), clean(trajectory.reason))
    return (*labels, float(trajectory.reward), success, len(trajectory.turns), trajectory.sampled, record, tokens)


Given = ParamSpec("Given")
Result = TypeVar("Result")


def _queued(
    write: Callable[Concatenate[SqliteLedger, Given], None],
) -> Callable[Concatenate[WriteBehindLedger, Given], None]:
    """A transition that is written with the next flush."""

    def queue(self: WriteBehindLedger, *args: Given.args, **more: Given.kwargs) -> None:
        self._queue.append(partial(write, self._ledger, *args, **more))

    return queue


def _flushed(
    use: Callable[Concatenate[SqliteLedger, Given], Result],
) -> Callable[Concatenate[WriteBehindLedger, Given], Result]:
    """An operation before which the queue is written."""

    def flush_and_use(self: WriteBehindLedger, *args: Given.args, **more: Given.kwargs) -> Result:
        self.flush()
        return use(self._ledger, *args, **more)

    return flush_and_use


class WriteBehindLedger:
    """A queue in front of ``ledger``, with the same transitions: it defers writes to a moment when the host would otherwise wait
    for the device. Safe to call from several threads.

    It queues transitions in order and writes them together on ``flush``, on ``seal`` and before every read. What a killed run had
    not written belongs to steps after the last checkpoint, which a resumed run repeats anyway: a group that finished in them
    counts as in flight. An error (a full disk, an illegal transition) is raised where the write happens, not where it is queued.
    """

    def __init__(self, ledger: SqliteLedger) -> None:
        self._ledger = ledger
        self._queue: deque[Callable[[], None]] = deque()
        self._write_lock = threading.RLock()

    def __enter__(self) -> WriteBehindLedger:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write the queue also when the run fails, for diagnosis; then a failing write must not hide the run's own error."""
        with contextlib.suppress(StoreError, RecordError) if kind else contextlib.nullcontext():
            self.flush()

    def flush(self) -> None:
        """Write the queue in order. A write that fails stays queued, with everything after it."""
        with self._write_lock:
            while self._queue:
                self._queue[0]()
                self._queue.popleft()

    @property
    def queued(self) -> int:
        """Writes that wait for the next flush."""
        return len(self._queue)

    issue, finish, drop = _queued(SqliteLedger.issue), _queued(SqliteLedger.finish), _queued(SqliteLedger.drop)
    train, record_mixed = _queued(SqliteLedger.train), _queued(SqliteLedger.record_mixed)
    keep_tokens, seal = _queued(SqliteLedger.keep_tokens), _flushed(SqliteLedger.seal)
    digest, resume = _flushed(SqliteLedger.digest), _flushed(SqliteLedger.resume)
    trajectory, group_counts = _flushed(SqliteLedger.trajectory), _flushed(SqliteLedger.group_counts)
