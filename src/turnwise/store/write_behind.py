"""A ledger that is written when there is time: while a device computes and the host would only wait.

Arrows are kept in order and written together by ``drain``, by ``seal``, and before anything is read. What was not written when
a run is killed belongs to steps after the last checkpoint, which a resumed run takes again anyway: a group that finished then
counts as in flight. A fault (a full disk, an arrow that is not allowed) is raised where the writing happens.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from turnwise.core.records import Group, Task, Trajectory
from turnwise.errors import RecordError, StoreError
from turnwise.store.ledger import Ledger
from turnwise.store.queries import Balance
from turnwise.store.resume import Resumed


class Behind:
    """Before ``ledger``, with the same arrows. Safe to call from several threads."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._owed: deque[Callable[[], None]] = deque()
        self._writing = threading.RLock()

    def __enter__(self) -> Behind:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """What a run that fails has to tell stands in its last records; that they cannot be written is then the lesser news."""
        with contextlib.suppress(StoreError, RecordError) if kind else contextlib.nullcontext():
            self.drain()

    def drain(self) -> None:
        """Write what is owed. What fails stays owed, with all that comes behind it."""
        with self._writing:
            while self._owed:
                self._owed[0]()
                self._owed.popleft()

    # ------------------------------------------------------------ the arrows

    def issue(self, group_id: str, task: Task, step: int, version: int) -> None:
        self._owed.append(partial(self._ledger.issue, group_id, task, step, version))

    def finish(self, group: Group, step: int) -> None:
        self._owed.append(partial(self._ledger.finish, group, step))

    def train(self, group_ids: Iterable[str], step: int) -> None:
        self._owed.append(partial(self._ledger.train, tuple(group_ids), step))

    def mix(self, trajectories: Iterable[Trajectory], step: int) -> None:
        self._owed.append(partial(self._ledger.mix, tuple(trajectories), step))

    def drop(self, group_id: str, reason: str, step: int) -> None:
        self._owed.append(partial(self._ledger.drop, group_id, reason, step))

    # ------------------------------------------------------ what must be true

    def seal(self, step: int) -> None:
        self.drain()
        self._ledger.seal(step)

    def resume(self, step: int, keep_finished: bool = True) -> Resumed:
        self.drain()
        return self._ledger.resume(step, keep_finished)

    def trajectory(self, trajectory_id: str) -> Trajectory:
        self.drain()
        return self._ledger.trajectory(trajectory_id)

    def balance(self) -> Balance:
        self.drain()
        return self._ledger.balance()
