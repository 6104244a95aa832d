"""A write-behind ledger: it defers writes to a moment when the host would otherwise wait for the device.

It queues transitions in order and writes them together on ``flush``, on ``seal`` and before every read. What a killed run had
not written belongs to steps after the last checkpoint, which a resumed run repeats anyway: a group that finished in them
counts as in flight. An error (a full disk, an illegal transition) is raised where the write happens, not where it is queued.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from turnwise.core.records import Group, Task, Trajectory
from turnwise.errors import RecordError, StoreError
from turnwise.store.database import GroupCounts
from turnwise.store.ledger import SqliteLedger
from turnwise.store.resume import ResumePlan
from turnwise.store.token_columns import TokenColumns


class WriteBehindLedger:
    """A queue in front of ``ledger``, with the same transitions. Safe to call from several threads."""

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

    # ------------------------------------------- transitions, queued

    def issue(self, group_id: str, task: Task, step: int, version: int) -> None:
        self._queue.append(partial(self._ledger.issue, group_id, task, step, version))

    def finish(self, group: Group, step: int) -> None:
        self._queue.append(partial(self._ledger.finish, group, step))

    def train(self, group_ids: Iterable[str], step: int) -> None:
        self._queue.append(partial(self._ledger.train, tuple(group_ids), step))

    def record_mixed(self, trajectories: Iterable[Trajectory], step: int) -> None:
        self._queue.append(partial(self._ledger.record_mixed, tuple(trajectories), step))

    def keep_tokens(self, make: Callable[[], Sequence[TokenColumns]], step: int, steps: int) -> None:
        self._queue.append(partial(self._ledger.keep_tokens, make, step, steps))

    def drop(self, group_id: str, reason: str, step: int) -> None:
        self._queue.append(partial(self._ledger.drop, group_id, reason, step))

    # ------------------------------------- operations that flush first

    def seal(self, step: int) -> None:
        self.flush()
        self._ledger.seal(step)

    def digest(self, step: int) -> str | None:
        self.flush()
        return self._ledger.digest(step)

    def resume(self, step: int, keep_finished: bool = True) -> ResumePlan:
        self.flush()
        return self._ledger.resume(step, keep_finished)

    def trajectory(self, trajectory_id: str) -> Trajectory:
        self.flush()
        return self._ledger.trajectory(trajectory_id)

    def group_counts(self) -> GroupCounts:
        self.flush()
        return self._ledger.group_counts()
