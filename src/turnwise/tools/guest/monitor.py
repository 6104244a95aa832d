"""Watches what a process limit cannot bound: the memory of all processes of a session together, and its scratch directory.

Runs in the zygote, a few times a second. Reads ``/proc`` and directories; kills nothing itself.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from turnwise.tools.guest import scratch

MEMORY_SECONDS, SCRATCH_SECONDS = 0.05, 0.25  # between two measurements


class Monitor:
    """The limits of sessions that are measured, with what is measured on this isolation."""

    def __init__(self, config: dict[str, Any]) -> None:
        limits = config["limits"]
        self.memory_bytes, self.scratch_bytes = limits["memory_bytes"], limits["scratch_bytes"]
        # without child processes the limit of one process is that of the session
        self.measures_memory = limits["processes"] > 1 and (config["namespaces"] or not config["seccomp"])
        self.measures_scratch = not config["namespaces"]  # elsewhere a private file system has its own size
        self.private_pids = config["namespaces"]
        self.pause = MEMORY_SECONDS if self.measures_memory else SCRATCH_SECONDS  # of the caller between two calls
        self._next_memory = self._next_scratch = 0.0

    def violations(self, pids: Mapping[int, int], folders: Mapping[int, str]) -> Iterator[tuple[int, str]]:
        """Sessions above a limit, with the limit in words. Does nothing when it was called a moment ago."""
        now = time.monotonic()
        if self.measures_memory and now >= self._next_memory and pids:
            self._next_memory = now + MEMORY_SECONDS
            yield from self._memory(pids)
        if self.measures_scratch and now >= self._next_scratch and pids:
            self._next_scratch = now + SCRATCH_SECONDS
            yield from self._scratch(pids, folders)

    def _memory(self, pids: Mapping[int, int]) -> Iterator[tuple[int, str]]:
        running = [name for name in os.listdir("/proc") if name.isdigit()]
        if self.private_pids and len(running) <= len(pids) + 1:
            return  # this process and one per session: none has a child
        children = children_by_parent(running)
        for session, pid in pids.items():
            tree = [pid, *descendants(pid, children)]
            if len(tree) > 1 and is_above(tree, self.memory_bytes):
                yield session, f"memory limit of {self.memory_bytes >> 20} MiB for all processes together"

    def _scratch(self, pids: Mapping[int, int], folders: Mapping[int, str]) -> Iterator[tuple[int, str]]:
        for session, folder in folders.items():
            room = self.scratch_bytes - scratch.held_by(pids[session])
            if room < 0 or scratch.used(folder, room):
                limit = f"{self.scratch_bytes >> 10} KiB or {scratch.MAX_ENTRIES} files"
                yield session, f"scratch limit of {limit}"


def children_by_parent(running: list[str]) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for name in running:
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
            parent = int(file.read().rpartition(b")")[2].split()[1])  # the name before it may hold anything
            children.setdefault(parent, []).append(int(name))
    return children


def descendants(pid: int, children: Mapping[int, list[int]] | None = None) -> list[int]:
    """Every process below this one."""
    if children is None:
        children = children_by_parent([name for name in os.listdir("/proc") if name.isdigit()])
    found: list[int] = []
    waiting = list(children.get(pid, ()))
    while waiting:
        found.append(waiting.pop())
        waiting += children.get(found[-1], ())
    return found


def is_above(pids: list[int], limit: int) -> bool:
    """Whether processes use more memory than this. Pages that they share count once, where the kernel tells us."""
    if sum(_kilobytes(f"/proc/{pid}/status", (b"RssAnon:", b"RssShmem:")) or 0 for pid in pids) * 1024 <= limit:
        return False
    shares = [_kilobytes(f"/proc/{pid}/smaps_rollup", (b"Pss:",)) for pid in pids]
    return None in shares or sum(share or 0 for share in shares) * 1024 > limit


def _kilobytes(path: str, names: tuple[bytes, ...]) -> int | None:
    """The sum of these lines; 0 for a process that has ended, None for one that we may not read."""
    try:
        with open(path, "rb") as file:
            lines = [line.split() for line in file.read().split(b"\n")]
    except PermissionError:
        return None
    except OSError:
        return 0
    return sum(int(words[1]) for words in lines if words and words[0] in names)
