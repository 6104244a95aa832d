"""Host-side handles on the isolated zygote process and on one session's worker. Every wait has a deadline.

Sends only source text and reads only JSON whose size and types it checks: replies are data, never pickled objects.
Knows processes and sockets; does not know REPL semantics or which isolation is sufficient.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import struct
import subprocess
import tempfile
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.errors import ToolFault
from turnwise.tools.guest.scratch import remove_tree
from turnwise.tools.isolation import ENVIRONMENT, Interpreter, Isolation, SandboxLimits

START_SECONDS = 20.0  # for an interpreter to start or to end a session on a loaded machine
MODULES = ("landlock", "seccomp", "confine", "scratch", "repl", "zygote")
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


def _modules() -> list[tuple[str, str]]:
    package = "turnwise.tools.guest"
    parents = [("turnwise", ""), ("turnwise.tools", ""), (package, "")]
    folder = Path(__file__).with_name("guest")
    return [*parents, *((f"{package}.{name}", (folder / f"{name}.py").read_text()) for name in MODULES)]


class ZygoteHandle:
    """A running zygote process. ``spawn`` only sends a message; the fork happens in the zygote, concurrently."""

    def __init__(
        self, isolation: Isolation, interpreter: Interpreter, limits: SandboxLimits, *, keep_user: bool = False
    ) -> None:
        self.limits = limits
        self.alive = False
        self.landlock = False
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
                config = isolation.config(interpreter, limits, keep_user=keep_user)
                self._send({"modules": _modules(), "config": config})
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

    def detach(self) -> None:
        """In a forked child of the host: close our descriptors without touching what belongs to the parent."""
        self.alive = False
        self._lock = threading.Lock()  # the parent may have held it at the fork
        self._control.close()
        self._process.returncode = 0
        self._scratch = ""  # the parent still uses it


_handles: weakref.WeakSet[ZygoteHandle] = weakref.WeakSet()


def _detach_all() -> None:
    for zygote in list(_handles):
        zygote.detach()
    _handles.clear()


# a forked child that kept the control socket would keep the zygote alive after the host is killed
os.register_at_fork(after_in_child=_detach_all)


class SandboxWorker:
    """The host's end of one session's channel. A frame is a 4-byte length and a JSON object."""

    def __init__(self, zygote: ZygoteHandle, number: int, channel: socket.socket) -> None:
        self.zygote = zygote
        self.number = number
        self.channel = channel
        self.ready = False
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
