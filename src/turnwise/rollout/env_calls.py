"""Daemon threads for calls that may block, kept and lent again.

Whoever starts a thread waits until it has been scheduled; over a hundred calls a step that costs more than the calls. A
call that never returns keeps its thread, and, being a daemon, does not hold up the end of the program. Knows nothing of
what is called.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

Work = Callable[[], None]
"""Must not raise: nobody would hear it."""

_idle: list[SimpleQueue[Work]] = []  # appending and popping are atomic
os.register_at_fork(after_in_child=_idle.clear)  # threads do not survive a fork


def lend(work: Work) -> None:
    """Run ``work`` in a thread that has nothing to do, or a new one."""
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
        del work  # or an idle thread would keep an environment alive
        _idle.append(inbox)
