"""How much space a session may take where no file system of its own bounds it: the kernel asks here before each call.

A session has a credit of bytes and entries. A call costs the most that it can take; when the credit is used up, the scratch
directory is measured and the credit becomes what is left. So the limit holds at every moment, and measuring is rare. A call
above it fails with "no space left", as in a full file system. Knows one session; the caller waits for its questions.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import platform
import struct
import time

from turnwise.tools.guest import scratch, seccomp

RECEIVE, ANSWER, CONTINUE = 0xC0502100, 0xC0182101, 1  # SECCOMP_IOCTL_NOTIF_RECV and _SEND, and go on with the call
QUESTION = struct.Struct("=QIIiIQ6Q")  # id, thread, flags, call, machine, address, arguments
REST = 4  # after a measurement, in its own durations: one session takes at most a fifth of the supervisor's time


class Meter:
    """The credit of one session, and the descriptor on which the kernel asks."""

    def __init__(self, listener: int, pid: int, folder: str, max_bytes: int) -> None:
        self.listener, self.ready_at = listener, 0.0
        self._pid, self._folder, self._limit = pid, folder, max_bytes
        self._bytes, self._entries = float(max_bytes), scratch.MAX_ENTRIES
        self._block = min(max(4096, os.stat(folder).st_blksize), 1 << 16)
        column = seccomp.MACHINES[platform.machine()][0]
        self._writes = [seccomp.METERED[name][column] for name in ("write", "pwrite64")]
        # the last call of each thread may still run: what it takes is not measured yet
        self._running: dict[int, tuple[int, int]] = {}

    def answer(self) -> None:
        """Answer one question that waits."""
        question = bytearray(QUESTION.size)
        with contextlib.suppress(OSError):  # the thread was killed, before or after we read its question
            fcntl.ioctl(self.listener, RECEIVE, question)
            number, thread, _, call, _, _, *arguments = QUESTION.unpack(question)
            self._running.pop(thread, None)  # a thread that asks has ended its last call
            cost = self._cost(call, arguments[2])
            if not self._covers(cost):
                self._measure()
            if granted := self._covers(cost):
                self._bytes, self._entries = self._bytes - cost[0], self._entries - cost[1]
                self._running[thread] = cost
            answer = (0, CONTINUE) if granted else (-errno.ENOSPC, 0)
            fcntl.ioctl(self.listener, ANSWER, struct.pack("=QqiI", number, 0, *answer))

    def close(self) -> None:
        os.close(self.listener)

    def _cost(self, call: int, count: int) -> tuple[int, int]:
        """Bytes and entries. One block more than needed: a write may begin inside one, a name may lengthen its directory."""
        if call in self._writes:
            return (count + 2 * self._block - 1) // self._block * self._block, 0
        return 2 * self._block, 1

    def _covers(self, cost: tuple[int, int]) -> bool:
        return cost[0] <= self._bytes and cost[1] <= self._entries

    def _measure(self) -> None:
        began = time.monotonic()
        held = scratch.held_by(self._pid)
        if held < math.inf:  # otherwise nothing is given back: the limit is on all that was ever written
            size, entries = scratch.usage(self._folder, self._limit)
            tasks = f"/proc/{self._pid}/task"
            self._running = {n: cost for n, cost in self._running.items() if os.path.exists(f"{tasks}/{n}")}
            self._bytes = self._limit - size - held - sum(cost[0] for cost in self._running.values())
            self._entries = scratch.MAX_ENTRIES - entries - sum(cost[1] for cost in self._running.values())
        now = time.monotonic()
        self.ready_at = now + REST * (now - began)
