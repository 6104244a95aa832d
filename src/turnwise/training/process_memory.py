"""The memory of the processes that a run starts: its own generator, ranks of the learner, tools. Reads ``/proc``; without one it
counts nothing. Knows no run.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType

INTERVAL = 0.25  # seconds between two looks


def descendants(root: int, proc: Path = Path("/proc")) -> list[int]:
    """The processes below ``root``, at any depth."""
    children: dict[int, list[int]] = {}
    for folder in proc.glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])  # a name may hold blanks
        except (OSError, IndexError, ValueError):
            continue  # it has just ended
        children.setdefault(parent, []).append(int(folder.name))
    found, left = list[int](), [root]
    while left:
        below = children.get(left.pop(), [])
        found += below
        left += below
    return found


def process_bytes(process: int, proc: Path = Path("/proc")) -> int:
    """What one process takes: pages that several share are divided among them."""
    try:
        lines = (proc / str(process) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


class ChildMemory:
    """While entered, looks at the processes below this one; ``peak`` is the most that they took together, in bytes."""

    def __init__(self, interval: float = INTERVAL) -> None:
        self.interval, self.peak = interval, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="child memory")

    def __enter__(self) -> ChildMemory:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(self.interval):
            self.peak = max(self.peak, sum(process_bytes(process) for process in descendants(os.getpid())))
