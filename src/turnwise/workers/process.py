"""A process that works for this one, at the other end of a socket: start it, ask it, notice that it is stuck, say how it ended.

Every child of ours but the sandboxed interpreter is one: the generator of ``--generator local``, hosts of isolated environments,
reward functions, ranks of a learner. A kind is a module with ``main(descriptor, *arguments)``, which takes its end of the socket
with ``workers.child``.

``WorkerProcess`` is the process and frames of bytes in both directions, for those whose messages go by turns: a pool of ranks
(``engines/sharded/rank_pool.py``) sends to all, polls ``connection`` and asks ``how_it_ended`` of each that is silent. ``Worker``
answers any number of requests at a time. ``SharedWorkers`` replaces those that died. Ray is another way to start the same
programs (``training/cluster``). Knows processes and bytes; not what messages mean.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from turnwise.workers.sockets import allow_many_files

STUCK_SECONDS = 60.0  # until a write that nobody reads is given up
END_SECONDS = 2.0  # for a process whose socket closed to show how it ended
MAX_ANSWER = 1 << 28  # bytes: more, and a worker that a model's text misled would fill this process's memory
RECORD = struct.Struct(">QI")  # the number of a request, and the bytes of its payload or answer, which follow
# modules are imported where this process finds them; PYTHONPATH stays as it is, for what the worker itself starts
BOOT = (
    "import importlib, json, sys; sys.path[:], module, arguments = json.loads(sys.argv[1]); "
    "sys.exit(importlib.import_module(module).main(*arguments))"
)


def pack(records: Iterable[tuple[int, bytes]]) -> bytes:
    # one frame for all that is to be said now: a frame for each request would wake several threads each time. A
    # request without payload takes back the one of that number: nobody waits for its answer any longer
    return b"".join(part for number, payload in records for part in (RECORD.pack(number, len(payload)), payload))


def unpack(frame: bytes) -> list[tuple[int, bytes]]:
    records, start = [], 0
    while start < len(frame):
        number, size = RECORD.unpack_from(frame, start)
        start += RECORD.size + size
        records.append((number, frame[start - size : start]))
    return records


class WorkerStuck(OSError):
    """The process has read nothing for too long: it is stopped or stuck."""


class WorkerLost(Exception):
    """The process ended before it answered; the message says how, and continues a sentence about the process. ``by_host``:
    nothing that it was asked for ended it, as far as can be told."""

    def __init__(self, how: str, by_host: bool = False) -> None:
        super().__init__(how)
        self.by_host = by_host


FROZEN = "was stopped by somebody (SIGSTOP), gave no answer and was killed"


def is_stopped(pid: int) -> bool:
    """Whether somebody stopped the process; False where the system does not say."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False


def exit_words(status: int, last_line: str = "") -> str:
    """How a process ended: ``was ended by SIGKILL``, ``ended with status 3: KeyError: 'x'``."""
    if status < 0:
        name = next((s.name for s in signal.Signals if s == -status), f"signal {-status}")
        return f"was ended by {name}"
    return f"ended with status {status}" + (f": {last_line}" if last_line else "")


def kill_group(process: int) -> None:
    """Kill a process that leads a session, and everything it started."""
    with contextlib.suppress(OSError):
        os.killpg(process, signal.SIGKILL)


Answer = Future[bytes] | asyncio.Future[bytes]
AnyAnswer = TypeVar("AnyAnswer", Future[bytes], asyncio.Future[bytes])


class WorkerProcess:
    """Runs ``main`` of ``module`` with its end of the socket and ``arguments``. ``seconds``: until a write that nobody reads
    raises ``WorkerStuck``; a message that does not fit the socket's buffer waits for its reader. ``quiet``: what it prints is
    kept, and its last line told with its end; otherwise it is printed to standard error.

    It ends with this process, however that ends: its socket closes."""

    def __init__(self, module: str, *arguments: Any, seconds: float = STUCK_SECONDS, quiet: bool = True) -> None:
        allow_many_files()
        ours, theirs = socket.socketpair()
        whole, rest = divmod(seconds, 1)
        # a write that nobody reads for so long raises BlockingIOError; 0: never
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(whole), int(rest * 1e6)))
        self.seconds = seconds
        self.log = tempfile.TemporaryFile() if quiet else None  # noqa: SIM115 (closed with the process)
        with theirs:
            start = json.dumps([list(map(str, sys.path)), module, [theirs.fileno(), *arguments]])
            self.process = subprocess.Popen(
                [sys.executable, "-c", BOOT, start],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self.log or 2,
                stderr=self.log,
                start_new_session=True,  # Ctrl-C is for the run, which then ends this process
            )
        self.connection = Connection(ours.detach())

    def send_bytes(self, data: Any) -> None:
        # after `WorkerStuck` half a message may be in the socket: the process is of no use any longer
        try:
            self.connection.send_bytes(data)
        except BlockingIOError:
            raise WorkerStuck(f"it has read nothing for {self.seconds:.0f} s: it is stopped or stuck") from None

    def how_it_ended(self) -> str:
        """How the process ended, in words; empty while it runs."""
        status, lines = self.process.poll(), list[str]()
        if status is None:
            return ""
        if self.log is not None and not self.log.closed:
            self.log.seek(0)
            lines = self.log.read().decode(errors="replace").strip().splitlines()
        return exit_words(status, *lines[-1:])

    def close(self) -> None:
        """End the process and everything it started."""
        self.connection.close()
        if self.process.poll() is None:  # afterwards its number may be another's
            kill_group(self.process.pid)
        self.process.wait()
        if self.log is not None:
            self.log.close()


class Worker(WorkerProcess):
    """Answers requests of any thread or event loop, many at a time, each with bytes."""

    def __init__(self, module: str, *arguments: Any, seconds: float = STUCK_SECONDS, quiet: bool = False) -> None:
        super().__init__(module, *arguments, seconds=seconds, quiet=quiet)
        self.ended = ""  # why it takes no more requests, in words
        self.killed = False  # by us: no request is to blame for its end
        self.frozen = False  # when we killed it: somebody had stopped it, so it could not answer
        self.answered = False  # a first request, by which it has loaded what it works with
        self.proven = False  # whether another of its kind has worked: then its own code does not end it while it starts
        self.users = 0  # that a pool gave it to
        self.alone = False  # whether its user must not share it
        self._pending: dict[int, Answer] = {}
        self._numbers, self._outbox = itertools.count(), deque[tuple[int, bytes]]()
        self._wake = SimpleQueue[None]()  # wakes the writer
        self._waking: asyncio.AbstractEventLoop | None = None  # that will do so at the end of its round
        for target in (self._read, self._write):
            threading.Thread(target=target, daemon=True, name="turnwise-worker").start()

    def ask(self, payload: bytes) -> Future[bytes]:
        """The answer, once it comes; ``WorkerLost`` where the process ends first. Cancelling it tells the process."""
        return self._ask(payload, Future())

    def exchange(self, payload: bytes) -> asyncio.Future[bytes]:
        """``ask``, in an event loop, which is woken once for all answers that come together. What it asks in one round is one
        frame: to wake a thread costs more than the rest of a request."""
        loop = asyncio.get_running_loop()
        return self._ask(payload, loop.create_future(), loop)

    def _post(self, record: tuple[int, bytes], loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._outbox.append(record)
        if loop is None:
            self._wake.put(None)
        elif self._waking is not loop:
            self._waking = loop
            loop.call_soon(self._end_round)

    def _end_round(self) -> None:
        self._waking = None
        self._wake.put(None)

    def _ask(self, payload: bytes, answer: AnyAnswer, loop: asyncio.AbstractEventLoop | None = None) -> AnyAnswer:
        number = next(self._numbers)
        self._pending[number] = answer

        def drop(done: Answer) -> None:
            if done.cancelled() and self._pending.pop(number, None) is not None:
                self._post((number, b""))  # the process need not finish it

        answer.add_done_callback(drop)
        self._post((number, payload), loop)
        if self.ended:  # perhaps before the answer was among those that its end fails
            self._settle([(number, None)])
        return answer

    def call(self, payload: bytes, seconds: float) -> bytes:
        """``ask``, in a thread that waits. A process that does not answer within ``seconds`` is killed."""
        try:
            return self.ask(payload).result(seconds)
        except BaseException as fault:
            if not isinstance(
                fault, WorkerLost
            ):  # else interrupted: what it does for this request, it would do for nobody
                late = f"gave no answer within {seconds:g} s"
                self.kill(late if isinstance(fault, TimeoutError) else "was interrupted")
                if self.frozen and isinstance(fault, TimeoutError):
                    raise WorkerLost(FROZEN, by_host=True) from None
            raise

    def kill(self, reason: str, blame: bool = False) -> None:
        """End the process; ``reason`` continues a sentence about it. ``blame``: for what it was asked at this moment."""
        self.ended, self.killed = self.ended or reason, not blame
        if self.process.poll() is None:
            self.frozen = is_stopped(self.process.pid)
            kill_group(self.process.pid)

    def close(self) -> None:
        self.kill("was ended")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5)

    def _settle(self, records: Iterable[tuple[int, bytes | None]]) -> None:
        """Give these answers to whoever waits; None: it will never come."""
        by_loop = defaultdict[asyncio.AbstractEventLoop, list[tuple[Answer, bytes | None]]](list)
        for number, payload in records:
            answer = self._pending.pop(number, None)
            if isinstance(answer, asyncio.Future):
                by_loop[answer.get_loop()].append((answer, payload))
            elif answer is not None and answer.set_running_or_notify_cancel():
                self._fulfil([(answer, payload)])
        for loop, answers in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(self._fulfil, answers)

    def _fulfil(self, answers: Iterable[tuple[Answer, bytes | None]]) -> None:
        for answer, payload in answers:
            if not answer.done():  # otherwise it was cancelled meanwhile
                answer.set_exception(self._lost()) if payload is None else answer.set_result(payload)

    def _lost(self) -> WorkerLost:
        # SIGKILL that we did not send is the kernel's, for want of memory, or an operator's
        outside = self.process.poll() == -signal.SIGKILL or (self.proven and not self.answered)
        return WorkerLost(self.ended, outside and not self.killed)

    def _write(self) -> None:
        # in a thread: a socket whose reader is stuck would block whoever asks
        try:
            while not self.ended:
                self._wake.get()
                records = [self._outbox.popleft() for _ in range(len(self._outbox))]  # nobody else takes from it
                if records:
                    self.send_bytes(pack(records))
        except WorkerStuck:
            self.kill(f"has read nothing for {self.seconds:.0f} s: it is stopped or stuck")
        except (OSError, ValueError):
            pass  # it has ended, which the reader says

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                records = unpack(self.connection.recv_bytes(MAX_ANSWER))
                self.answered = True
                self._settle(records)
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill("closed its socket")
            self.process.wait()
        self.ended = self.ended or self.how_it_ended()
        self._wake.put(None)
        self._settle([(number, None) for number in tuple(self._pending)])
        self.connection.close()
        if self.log is not None:
            self.log.close()


AnyWorker = TypeVar("AnyWorker", bound=Worker)


class SharedWorkers(Generic[AnyWorker]):
    """As many workers as their users need. ``start`` makes one; ``share``: how many users one may have at a time. A worker that
    died is not given again."""

    def __init__(self, start: Callable[..., AnyWorker], share: int = 1) -> None:
        self.workers: list[AnyWorker] = []
        self._start, self._share, self._lock, self._owner = start, share, threading.Lock(), os.getpid()
        self._worked = False  # whether one of them ever answered
        _pools.add(self)

    def take(self, *arguments: Any, alone: bool = False, least: int = 0) -> AnyWorker:
        """The living worker with the fewest users, or a new one, started with ``arguments``: where all are full, or where fewer
        than ``least`` live and none is idle. ``alone``: one that nobody else has."""
        with self._lock:
            self._worked = self._worked or any(worker.answered for worker in self.workers)
            worker = self._with_room(alone, least)
            while worker is not None and worker.process.poll() is not None:  # its reader does not know yet
                self.workers.remove(worker)
                worker = self._with_room(alone, least)
            if worker is None:
                worker = self._start(*arguments)
                worker.proven = self._worked
                self.workers.append(worker)
            worker.users += 1
            worker.alone = alone
            return worker

    def _with_room(self, alone: bool, least: int) -> AnyWorker | None:
        self.workers[:] = [worker for worker in self.workers if not worker.ended]
        most = 1 if alone or len(self.workers) < least else self._share
        with_room = (worker for worker in self.workers if worker.users < most and not worker.alone)
        return min(with_room, key=lambda worker: worker.users, default=None)

    def leave(self, worker: AnyWorker) -> None:
        with self._lock:
            worker.users -= 1
            worker.alone = worker.alone and worker.users > 0

    def stop(self) -> None:
        """End the workers. Later users get new ones, which end with the program."""
        with self._lock:
            workers, self.workers = self.workers, []
        if os.getpid() == self._owner:  # not in a fork of it
            for worker in workers:
                worker.close()


_pools: weakref.WeakSet[SharedWorkers[Any]] = weakref.WeakSet()


@atexit.register
def _stop_pools() -> None:
    for pool in list(_pools):
        pool.stop()
