"""A pool of daemon threads for calls that may block.

Starting a thread waits until the operating system schedules it; over a hundred calls per step that costs more than the calls,
so idle threads are reused. A call that never returns keeps its thread and, because it is a daemon, does not delay program exit.
Knows nothing of what is called.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

Work = Callable[[], None]
"""Must not raise: nothing would catch it."""

_idle: list[SimpleQueue[Work]] = []  # append and pop are atomic
os.register_at_fork(after_in_child=_idle.clear)  # threads do not survive a fork


def run_in_thread(work: Work) -> None:
    """Run ``work`` in an idle thread of the pool, or in a new one."""
    try:
        inbox = _idle.pop()
    except IndexError:
        inbox = SimpleQueue()
        threading.Thread(target=_serve, args=(inbox,), daemon=True).start()
    inbox.put(work)


def _serve(inbox: SimpleQueue[Work]) -> None:
    while True:
        work = inbox.get()
        work()
        del work  # otherwise an idle thread keeps an environment alive
        _idle.append(inbox)
