"""The host's handle on the isolated parent of sessions, and on one session's worker. Every wait has a deadline.

Only ever sends source text and reads JSON whose size and types it checks: what comes back is data, never an object.
Knows processes and sockets; does not know REPL semantics or which isolation is good enough.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
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
from turnwise.tools.isolation import ENVIRONMENT, Interpreter, Isolation
from turnwise.tools.limits import Limits

START_SECONDS = 20.0  # for an interpreter to come up or bury a session on a machine under load
MODULES = ("landlock", "seccomp", "confine", "repl", "zygote")
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
module.main(control, boot["orders"])
"""


class Hung(Exception):
    """The deadline passed."""


class Gone(Exception):
    """The worker's end of the channel is closed."""


class Garbled(Exception):
    """What came is not an answer."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How a worker ended: its exit code (negative: a signal), or None when it had to be killed."""

    code: int | None
    cpu_seconds: float


def _modules() -> list[tuple[str, str]]:
    package = "turnwise.tools.guest"
    parents = [("turnwise", ""), ("turnwise.tools", ""), (package, "")]
    folder = Path(__file__).with_name("guest")
    return [*parents, *((f"{package}.{name}", (folder / f"{name}.py").read_text()) for name in MODULES)]


class Zygote:
    """A running isolated parent. ``spawn`` costs a message; the fork happens on its side, while we go on."""

    def __init__(
        self, isolation: Isolation, interpreter: Interpreter, limits: Limits, *, keep_user: bool = False
    ) -> None:
        self.limits = limits
        self.alive = False
        self.landlock = False
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(START_SECONDS)
        with theirs, tempfile.TemporaryFile() as errors:
            self._process = subprocess.Popen(
                isolation.command(interpreter, BOOT), stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=errors,
                env=ENVIRONMENT, cwd="/", start_new_session=True,
            )  # fmt: skip
            theirs.close()
            try:
                orders = isolation.orders(interpreter, limits, keep_user=keep_user)
                self._send({"modules": _modules(), "orders": orders})
                answer = self._receive()
            except (OSError, ValueError) as error:
                self._kill()
                errors.seek(0)
                words = errors.read(2000).decode("utf-8", "replace").strip()
                raise ToolFault(f"{isolation.name} did not start: {words or error}") from error
        if "fault" in answer:
            self._kill()
            raise ToolFault(f"{isolation.name} did not start: {answer['fault']}")
        self.landlock = bool(answer.get("landlock"))
        self._scratch: str = answer["scratch"]
        self.alive = True
        _living.add(self)

    # ---- messages
    def _send(self, message: dict[str, Any], *handles: int) -> None:
        socket.send_fds(self._control, [json.dumps(message).encode()], handles)

    def _receive(self) -> dict[str, Any]:
        data = self._control.recv(65536)
        if not data:
            raise ConnectionResetError("it ended at once")
        answer = json.loads(data)
        assert isinstance(answer, dict)  # our own code speaks on that side
        return answer

    # ---- sessions
    def spawn(self) -> Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                with self._lock:
                    number = next(self._ids)
                    self._send({"spawn": number}, theirs.fileno())
            except OSError as error:
                ours.close()
                self.close()
                raise ToolFault(f"the isolated parent of sessions is gone ({error})") from error
        return Worker(self, number, ours)

    def end(self, number: int, *, wait: bool, grace: bool = False) -> Exit | None:
        """Kill a session and all it started. With ``wait``, return how it ended, once everything is dead."""
        if not self.alive:
            return None
        try:
            with self._lock:
                self._send({"end": number, "answer": wait, "grace": grace})
                answer = self._receive() if wait else None
        except (OSError, ValueError):
            self.close()  # it does not answer: take everything down, the next session starts a new one
            return None
        return Exit(answer["status"], answer["cpu"]) if answer else None

    def check(self) -> bool:
        """Whether it still runs."""
        if self.alive and self._process.poll() is not None:
            self.close()
        return self.alive

    def close(self) -> None:
        """End it and every session; safe to call twice."""
        self.alive = False
        with contextlib.suppress(OSError):
            self._control.close()  # it ends by itself when it reads this
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._kill()
        if self._scratch:  # only still there if it was killed before it could tidy up
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _kill(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()

    def forget(self) -> None:
        """In a forked copy of the host: let go without touching what belongs to the original."""
        self.alive = False
        self._lock = threading.Lock()  # the original may have held it while forking
        self._control.close()
        self._process.returncode = 0
        self._scratch = ""  # still in use


_living: weakref.WeakSet[Zygote] = weakref.WeakSet()


def _forget_all() -> None:
    for zygote in list(_living):
        zygote.forget()
    _living.clear()


# a forked copy that kept the control socket would keep the worker alive after the host is killed
os.register_at_fork(after_in_child=_forget_all)


class Worker:
    """The host's end of one session's channel. Frames: four bytes of length, then a JSON object."""

    def __init__(self, zygote: Zygote, number: int, channel: socket.socket) -> None:
        self.zygote = zygote
        self.number = number
        self.channel = channel
        self.ready = False
        self._buffer = bytearray()
        self._largest = zygote.limits.output_bytes * 6 + 1024  # six bytes is JSON's dearest character

    @staticmethod
    def frame(message: dict[str, Any]) -> bytes:
        data = json.dumps(message).encode()
        return struct.pack(">I", len(data)) + data

    def feed(self, data: bytes) -> None:
        if not data:
            raise Gone
        self._buffer += data

    def answer(self) -> dict[str, Any] | None:
        """The next whole frame, if it has arrived."""
        if len(self._buffer) < 4:
            return None
        size = int.from_bytes(self._buffer[:4], "big")
        if size > self._largest:
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
        """Wake whoever waits for an answer: there will be none."""
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)

    def end(self, *, wait: bool = False, grace: bool = False) -> Exit | None:
        self.channel.close()
        return self.zygote.end(self.number, wait=wait, grace=grace)
