"""Untrusted Python for an episode: names persist between calls, the code is isolated, every violation is reported as text.

    tool = PythonTool(SandboxLimits(wall_seconds=2.0))
    with tool.open() as session:
        session.run("x = 20")
        session.run("x + 1")        # ExecutionResult(output='21', ok=True, ...)

The host sends only source text and reads only JSON whose size and types it checks: replies are data, never pickled objects. Every
wait has a deadline. Knows nothing of models, environments or rewards.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import itertools
import json
import os
import secrets
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
import warnings
import weakref
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.core.text import clean
from turnwise.errors import ToolFault
from turnwise.tools.guest.scratch import remove_tree
from turnwise.tools.isolation import ENVIRONMENT, Interpreter, Isolation, SandboxLimits, interpreters, mechanisms
from turnwise.workers.sockets import allow_many_files

READY = 256  # interpreters that may wait for their episodes, at most
STARTED_AT_ONCE = 4  # of them: more would fill the zygote's queue, and hold up who opens or ends a session
START_SECONDS = 20.0  # for an interpreter to start or to end a session on a loaded machine
MODULES = ("landlock", "seccomp", "confine", "scratch", "meter", "repl", "exam", "zygote")
BOOT = """
import json, socket, sys, types
control = socket.socket(fileno=0)
boot = json.loads(control.recv(1 << 20))
for name, source in boot["modules"]:
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
    exec(compile(source, name, "exec"), module.__dict__)
sys.path[:] = [entry for entry in sys.path if entry]
module.main(control, boot["config"])
"""


# one sequence for all pools of this process: a session's user id comes from its number, and the process limit counts users
_session_numbers = itertools.count(1)


class Hung(Exception):
    """No reply arrived before the deadline."""


class Gone(Exception):
    """The worker's end of the channel is closed."""


class Garbled(Exception):
    """The message received is not a valid reply."""


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """How a worker ended: its exit code (negative: a signal; None: we killed it), its CPU time and the limit it exceeded."""

    code: int | None
    cpu_seconds: float
    limit: str = ""  # the limit for which it was killed, in words


class ZygoteHandle:
    """A running zygote process. ``spawn`` only sends a message; the fork happens in the zygote, concurrently."""

    def __init__(
        self, isolation: Isolation, interpreter: Interpreter, limits: SandboxLimits, *, keep_user: bool = False
    ) -> None:
        self.limits, self.alive, self.landlock = limits, False, False
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(START_SECONDS)
        with theirs, tempfile.TemporaryFile() as errors:
            self._process = subprocess.Popen(
                isolation.command(interpreter, BOOT), stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=errors,
                env=ENVIRONMENT, cwd="/", start_new_session=True,
            )  # fmt: skip
            theirs.close()
            try:
                package, folder = "turnwise.tools.guest", Path(__file__).with_name("guest")
                modules = [("turnwise", ""), ("turnwise.tools", ""), (package, "")]
                modules += [(f"{package}.{name}", (folder / f"{name}.py").read_text()) for name in MODULES]
                config = isolation.config(interpreter, limits, keep_user=keep_user)
                self._send({"modules": modules, "config": config})
                answer = self._receive()
            except (OSError, ValueError) as error:
                self._kill()
                errors.seek(0)
                stderr = errors.read(2000).decode("utf-8", "replace").strip()
                raise ToolFault(f"{isolation.name} did not start: {stderr or error}") from error
        if "fault" in answer:
            self._kill()
            raise ToolFault(f"{isolation.name} did not start: {answer['fault']}")
        self.landlock = bool(answer.get("landlock"))
        self._scratch: str = answer["scratch"]
        self.alive = True
        _handles.add(self)

    # ---- messages
    def _send(self, message: dict[str, Any], *handles: int) -> None:
        socket.send_fds(self._control, [json.dumps(message).encode()], handles)

    def _receive(self) -> dict[str, Any]:
        data = self._control.recv(65536)
        if not data:
            raise ConnectionResetError("it exited at once")
        answer = json.loads(data)
        assert isinstance(answer, dict)  # the zygote runs trusted code only
        return answer

    # ---- sessions
    def spawn(self) -> SandboxWorker:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                with self._lock:
                    number = next(_session_numbers)
                    self._send({"spawn": number}, theirs.fileno())
            except OSError as error:
                ours.close()
                self.close()
                raise ToolFault(f"the zygote process has ended ({error})") from error
        return SandboxWorker(self, number, ours)

    def end(self, number: int, *, wait: bool, grace: bool = False) -> WorkerExit | None:
        """Kill a session and all its processes. With ``wait``, return how it ended, once all of them have exited."""
        if not self.alive:
            return None
        try:
            with self._lock:
                self._send({"end": number, "answer": wait, "grace": grace})
                answer = self._receive() if wait else None
        except (OSError, ValueError):
            self.close()  # it does not reply: end all sessions; the next one starts a new zygote
            return None
        return WorkerExit(answer["status"], answer["cpu"], answer["reason"]) if answer else None

    def check(self) -> bool:
        """Whether the process still runs."""
        if self.alive and self._process.poll() is not None:
            self.close()
        return self.alive

    def close(self) -> None:
        """End the zygote and every session. Safe to call twice."""
        self.alive = False
        with contextlib.suppress(OSError):
            self._control.close()  # it exits when it reads the end of this socket
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._kill()
        if self._scratch:  # exists only if the zygote was killed before it could clean up
            remove_tree(self._scratch)

    def _kill(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()


_handles: weakref.WeakSet[ZygoteHandle] = weakref.WeakSet()


def _detach_all() -> None:
    """In a forked child of the host: close our descriptors without touching what belongs to the parent."""
    for zygote in list(_handles):
        zygote.alive = False
        zygote._lock = threading.Lock()  # the parent may have held it at the fork
        zygote._control.close()
        zygote._process.returncode = 0
        zygote._scratch = ""  # the parent still uses it
    _handles.clear()


# a forked child that kept the control socket would keep the zygote alive after the host is killed
os.register_at_fork(after_in_child=_detach_all)


class SandboxWorker:
    """The host's end of one session's channel. A frame is a 4-byte length and a JSON object."""

    def __init__(self, zygote: ZygoteHandle, number: int, channel: socket.socket) -> None:
        self.zygote, self.number, self.channel, self.ready = zygote, number, channel, False
        self.used = False  # whether code was sent to it
        self._buffer = bytearray()
        self._max_frame_bytes = zygote.limits.output_bytes * 6 + 1024  # JSON escapes a character in at most six bytes

    @staticmethod
    def frame(message: dict[str, Any]) -> bytes:
        data = json.dumps(message).encode()
        return struct.pack(">I", len(data)) + data

    def feed(self, data: bytes) -> None:
        if not data:
            raise Gone
        self._buffer += data

    def next_message(self) -> dict[str, Any] | None:
        """The next complete frame, or None if it has not arrived."""
        if len(self._buffer) < 4:
            return None
        size = int.from_bytes(self._buffer[:4], "big")
        if size > self._max_frame_bytes:
            raise Garbled(f"a frame of {size} bytes")
        if len(self._buffer) < 4 + size:
            return None
        data = bytes(self._buffer[4 : 4 + size])
        del self._buffer[: 4 + size]
        try:
            message = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise Garbled("a frame that is not JSON") from error
        if not isinstance(message, dict):
            raise Garbled("a frame that is not an object")
        return message

    def interrupt(self) -> None:
        """Wake a thread that waits for a reply; no reply will come."""
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)

    def end(self, *, wait: bool = False, grace: bool = False) -> WorkerExit | None:
        self.channel.close()
        return self.zygote.end(self.number, wait=wait, grace=grace)


RESTARTED = "the interpreter was restarted, its names are gone"
# Runs once in every new isolation: a mechanism that allows any of this does not isolate and is not used.
ISOLATION_TEST = """
import decimal, json, os, subprocess, socket
def refused(act, *a):
    try: act(*a)
    except OSError: return True
    return False
open("probe", "w").close()
os.remove("probe")
[refused(open, "/etc/passwd"), refused(open, "/proc/self/maps"), refused(open, "/usr/lib/probe", "w"),
 refused(lambda: socket.socket().connect(("127.0.0.1", 9)))]
"""


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """The result of one call. ``ok`` is False when the code raised or was stopped."""

    output: str
    ok: bool
    seconds: float


class PythonTool(contextlib.AbstractContextManager["PythonTool"]):
    """A pool of isolated interpreters. Safe to share between threads; starts on first use."""

    def __init__(self, limits: SandboxLimits | None = None, *, isolation: str = "auto", spare: int = 2) -> None:
        self.limits = limits or SandboxLimits()
        self._candidates = mechanisms(isolation)
        self._spare = spare
        self._lock = threading.RLock()
        self._zygote: ZygoteHandle | None = None
        self._isolation: Isolation | None = None
        self._idle_workers: deque[SandboxWorker] = deque()
        # of sessions garbage-collected without close(); ended at the next open()
        self._workers_to_end: deque[SandboxWorker] = deque()
        self._in_use = self._most_in_use = 0
        self._starting = False  # whether a thread starts interpreters
        self._owner = os.getpid()
        _pools.add(self)

    def open(self) -> SandboxSession:
        """A new session for one episode."""
        return SandboxSession(self, self.take_worker())

    def take_worker(self) -> SandboxWorker:
        """An unused worker. Refills the pool first, so that the next worker forks in the background."""
        with self._lock:
            while self._workers_to_end:
                self._workers_to_end.popleft().end()
                self._in_use -= 1
            for attempt in range(2):
                try:
                    zygote = self._running_zygote()
                    while len(self._idle_workers) <= self._spare:
                        self._idle_workers.append(zygote.spawn())
                    break
                except ToolFault:  # the zygote died since the last call; a second failure propagates
                    if attempt:
                        raise
            self._in_use += 1
            self._most_in_use = max(self._most_in_use, self._in_use)
            return self._idle_workers.popleft()

    def ended(self) -> None:
        """A worker that was taken has ended. Others take the places of such in the background, as many as were ever in use at the
        same time: the next batch then need not wait for its interpreters, which start while the learner computes."""
        with self._lock:
            self._in_use -= 1
            begin = not self._starting and self._missing() > 0
            self._starting |= begin
        if begin:
            threading.Thread(target=self._start_waiting, name="turnwise-interpreters", daemon=True).start()

    def _missing(self) -> int:
        alive = self._zygote is not None and self._zygote.alive and self._owner == os.getpid()
        return min(READY, self._most_in_use - self._in_use) - len(self._idle_workers) if alive and self._spare else 0

    def _start_waiting(self) -> None:
        while True:
            with self._lock:
                zygote, count = self._zygote, min(STARTED_AT_ONCE, self._missing())
                self._starting = count > 0
                if zygote is None or not self._starting:
                    return
            try:
                workers = [zygote.spawn() for _ in range(count)]
                for worker in workers:
                    _wait_ready(worker)
            except (Hung, Gone, Garbled, ToolFault):  # whoever opens the next session meets it, and is told
                with self._lock:
                    self._starting = False
                return
            with self._lock:
                if zygote is self._zygote:
                    self._idle_workers.extend(workers)

    def describe(self) -> str:
        """The isolation in use, what it blocks and what it does not block, in one sentence."""
        with self._lock:
            zygote = self._running_zygote()
            assert self._isolation is not None
            filters = f" (with seccomp{' and Landlock' if zygote.landlock else ''})" if self._isolation.seccomp else ""
            return self._isolation.describe() + filters

    @property
    def isolation(self) -> str:
        with self._lock:
            self._running_zygote()
            assert self._isolation is not None
            return self._isolation.name

    def close(self) -> None:
        """End every session and the pool; a later ``open`` starts a new one."""
        with self._lock:
            self._discard_idle_workers()
            self._in_use -= len(self._workers_to_end)
            self._workers_to_end.clear()
            if self._zygote is not None:
                self._zygote.close()
            self._zygote = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def _running_zygote(self) -> ZygoteHandle:
        if self._zygote is None or not self._zygote.check():
            self._discard_idle_workers()
            self._zygote, self._isolation = _start(self._candidates, self.limits)
        return self._zygote

    def _discard_idle_workers(self) -> None:
        """Close the idle workers: their parent process has ended, or is about to."""
        while self._idle_workers:
            self._idle_workers.popleft().channel.close()

    def end_later(self, worker: SandboxWorker) -> None:
        """End a worker at the next ``open``. Called by the garbage collector, where taking a lock could deadlock."""
        worker.channel.close()
        self._workers_to_end.append(worker)


_pools: weakref.WeakSet[PythonTool] = weakref.WeakSet()


@atexit.register
def _close_pools_at_exit() -> None:
    for pool in list(_pools):
        # a forked child only closes its own descriptors: the lock may have been held at the fork
        pool.close() if os.getpid() == pool._owner else pool._discard_idle_workers()


def _start(candidates: tuple[Isolation, ...], limits: SandboxLimits) -> tuple[ZygoteHandle, Isolation]:
    """The first mechanism that starts and passes the isolation test."""
    allow_many_files()  # each session has a socket
    faults = []
    for isolation in candidates:
        if reason := isolation.unavailable():
            faults.append(f"{isolation.name}: {reason}")
            continue
        attempts = [(interpreter, False) for interpreter in interpreters()]
        if not isolation.seccomp:  # a session may stay root only without isolation, and then only as the last attempt
            attempts.append((attempts[0][0], True))
        for interpreter, keep_user in attempts:
            try:
                zygote = ZygoteHandle(isolation, interpreter, limits, keep_user=keep_user)
                worker = zygote.spawn()
                try:
                    result = execute(worker, ISOLATION_TEST, START_SECONDS)
                except (Hung, Gone, Garbled, ToolFault) as error:
                    worker.channel.close()
                    zygote.close()
                    raise ToolFault(f"a first session did not answer: {error!r}") from error
                worker.end()
                # a session that can do what it must not; without seccomp only that it runs is asked
                if not result.ok or (isolation.seccomp and "False" in result.output):
                    zygote.close()
                    raise ToolFault(f"it does not isolate: {result.output}")
            except ToolFault as fault:
                faults.append(f"{isolation.name}: {fault}")
                continue
            if not isolation.seccomp:
                why = f" ({'; '.join(faults)})" if faults else ""
                warnings.warn(f"untrusted code is NOT isolated. {isolation.describe()}{why}", stacklevel=4)
            return zygote, isolation
    raise ToolFault(f"no isolation for untrusted Python could be started: {'; '.join(faults)}")


@functools.cache
def python_tool(limits: SandboxLimits | None = None, isolation: str = "auto") -> PythonTool:
    """The pool that all environments of this process share for these settings."""
    return PythonTool(limits, isolation=isolation)


# ------------------------------------------------------------------ one episode's session


class SandboxSession(contextlib.AbstractContextManager["SandboxSession"]):
    """One episode's interpreter. Calls from several threads run one after another."""

    def __init__(self, pool: PythonTool, worker: SandboxWorker) -> None:
        self._pool = pool
        self._worker: SandboxWorker | None = worker
        self._lock = threading.Lock()
        self._closed = False

    def run(self, code: str) -> ExecutionResult:
        """Execute ``code``; the output is what it printed and the value of a final expression statement."""
        began = time.perf_counter()
        if refusal := self._refusal(code):
            return ExecutionResult(refusal, False, 0.0)
        self._lock.acquire()
        try:
            return execute(self._ready(), code, self._pool.limits.wall_seconds)
        except (Hung, Gone, Garbled) as failure:
            return ExecutionResult(self._stop(failure), False, time.perf_counter() - began)
        except BaseException:  # interrupted mid-call: a late result would be taken for that of the next call
            self._drop()
            raise
        finally:
            self._release()

    async def arun(self, code: str) -> ExecutionResult:
        """Like :meth:`run`, without blocking the event loop."""
        began = time.perf_counter()
        if refusal := self._refusal(code):
            return ExecutionResult(refusal, False, 0.0)
        while not self._lock.acquire(blocking=False):
            await asyncio.sleep(0.001)
        try:
            worker = self._live()
            if worker is None:
                worker = await asyncio.to_thread(self._ready)
            return await aexecute(worker, code, self._pool.limits.wall_seconds)
        except (Hung, Gone, Garbled) as failure:
            text = await asyncio.to_thread(self._stop, failure)
            return ExecutionResult(text, False, time.perf_counter() - began)
        except BaseException:
            self._drop()
            raise
        finally:
            self._release()

    def close(self) -> None:
        """Kill the interpreter and everything it started. Safe to call twice, and while a call is running."""
        self._closed = True
        if (worker := self._worker) is not None:
            worker.interrupt()  # a running call ends now and cleans up by itself
        if self._lock.acquire(blocking=False):
            self._release()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        worker = getattr(self, "_worker", None)
        if worker is not None:
            self._pool.end_later(worker)

    # ---- the worker
    def _live(self) -> SandboxWorker | None:
        worker = self._worker
        if worker is None or not worker.ready or not (worker.used or worker.zygote.alive):
            return None
        if not worker.zygote.alive:  # report it: the model must learn that its names are lost
            raise Gone
        return worker

    def _ready(self) -> SandboxWorker:
        """A worker that has reported ready; a new one if the last was killed."""
        if worker := self._live():
            return worker
        fault = ""
        for _ in range(3):  # one attempt may fail with a dead pool, one because the machine is out of processes
            if self._closed:
                raise ToolFault("this Python session is closed")
            if self._worker is not None and not self._worker.zygote.check():
                self._drop()  # with its socket
            worker = self._worker = self._worker or self._pool.take_worker()
            try:
                _wait_ready(worker)
                return worker
            except (Hung, Gone, Garbled, ToolFault) as error:
                fault = str(error) or type(error).__name__
                self._drop()
        raise ToolFault(f"no Python session could be started: {fault}")

    def _release(self) -> None:
        self._lock.release()
        if self._closed:
            self._drop()

    def _drop(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()
            self._pool.ended()

    def _refusal(self, code: str) -> str:
        if self._closed:
            raise ToolFault("this Python session is closed")
        size, limit = len(code.encode("utf-8", "surrogatepass")), self._pool.limits.source_bytes
        return f"error: the code has {size} bytes, the limit is {limit}" if size > limit else ""

    def _stop(self, failure: Exception) -> str:
        """End the worker and return the reason as text for the model."""
        if self._worker is None or self._closed:
            self._drop()
            raise ToolFault("this Python session was closed during a call") from failure
        worker, self._worker = self._worker, None
        status, limits = worker.end(wait=True, grace=isinstance(failure, Gone)), self._pool.limits
        self._pool.ended()
        if status is None:  # not by what its code did: no code of a session reaches the zygote
            raise ToolFault("the process that runs Python sessions has ended") from failure
        if status.cpu_seconds >= limits.cpu_seconds or status.code == -signal.SIGXCPU:
            reason = f"CPU time limit of {limits.cpu_seconds} s"
        elif status.limit:
            reason = status.limit
        elif isinstance(failure, Hung):
            reason = f"time limit of {limits.wall_seconds:g} s"
        elif isinstance(failure, Garbled):
            reason = "the answer could not be read"
        elif status.code is None:
            reason = "the interpreter stopped answering"
        elif status.code >= 0:
            reason = f"the interpreter exited with code {status.code}"
        else:
            names = {number.value: number.name for number in signal.Signals}
            reason = f"the interpreter was killed by {names.get(-status.code, f'signal {-status.code}')}"
        return f"error: {reason} ({RESTARTED})"


# --------------------------------------------------------------- the protocol


def _result(message: dict[str, Any], request_id: str, began: float) -> ExecutionResult:
    """Validate a message from the untrusted side: take two fields of the right type, or raise."""
    output, ok = message.get("output"), message.get("ok")
    if message.get("id") != request_id or not isinstance(output, str) or not isinstance(ok, bool):
        raise Garbled("not the answer to this call")
    return ExecutionResult(clean(output), ok, time.perf_counter() - began)


def _receive(worker: SandboxWorker, deadline: float) -> dict[str, Any]:
    while (message := worker.next_message()) is None:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise Hung
        worker.channel.settimeout(remaining)
        worker.feed(worker.channel.recv(65536))
    return message


def _wait_ready(worker: SandboxWorker) -> None:
    """Wait for the worker's first frame, sent before any untrusted code ran."""
    if worker.ready:
        return
    try:
        message = _receive(worker, time.monotonic() + START_SECONDS)
    except OSError as error:
        raise Gone(str(error)) from error
    if "fault" in message:
        raise ToolFault(f"a session could not be confined: {message['fault']}")
    worker.ready = True


def execute(worker: SandboxWorker, code: str, seconds: float) -> ExecutionResult:
    """One call, blocking; raises Hung, Gone or Garbled."""
    _wait_ready(worker)
    worker.used = True
    request_id, began = secrets.token_hex(8), time.perf_counter()
    deadline = time.monotonic() + seconds
    try:
        worker.channel.settimeout(seconds)
        worker.channel.sendall(worker.frame({"id": request_id, "code": code}))
        message = _receive(worker, deadline)
    except TimeoutError as error:
        raise Hung from error
    except OSError as error:
        raise Gone from error
    return _result(message, request_id, began)


async def aexecute(worker: SandboxWorker, code: str, seconds: float) -> ExecutionResult:
    """One call on the running event loop, with a worker that is ready."""
    worker.used = True
    request_id, began = secrets.token_hex(8), time.perf_counter()
    loop = asyncio.get_running_loop()
    worker.channel.setblocking(False)
    try:
        async with asyncio.timeout(seconds):
            await loop.sock_sendall(worker.channel, worker.frame({"id": request_id, "code": code}))
            while (message := worker.next_message()) is None:
                worker.feed(await loop.sock_recv(worker.channel, 65536))
    except TimeoutError as error:
        raise Hung from error
    except OSError as error:
        raise Gone from error
    return _result(message, request_id, began)
