"""The parent of all sessions inside the isolation: forks one confined child per session, and buries it.

Never runs untrusted code. It is the first process of its namespace where there is one, so that its end is everybody's
end; it ends when the host's side of its control socket closes, however the host died.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import socket
import tempfile
import time
from typing import Any

from turnwise.tools.guest import confine, landlock, repl

PRELOAD = ("collections", "datetime", "decimal", "fractions", "functools", "heapq", "itertools", "math", "operator",
           "random", "re", "statistics", "string", "textwrap", "typing")  # fmt: skip
GRACE = 0.1  # seconds a session that hung up is given to finish dying by itself


class Zygote:
    """Holds the children by session id."""

    def __init__(self, control: socket.socket, orders: dict[str, Any]) -> None:
        self.control = control
        self.orders = orders
        self.children: dict[int, int] = {}
        self.pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC) if orders["namespaces"] else -1
        self.base = confine.SCRATCH if orders["namespaces"] else tempfile.mkdtemp(prefix="turnwise-")
        if not orders["namespaces"]:
            os.chmod(self.base, 0o711)  # a session's user must pass through, and see no neighbour

    def serve(self) -> None:
        while True:
            data, handles, _, _ = socket.recv_fds(self.control, 4096, 1)
            if not data:
                break
            message = json.loads(data)
            if "spawn" in message:
                self.spawn(message["spawn"], handles[0])
            else:
                self.end(message)
        self.close()

    # ---- birth
    def spawn(self, session: int, handle: int) -> None:
        try:
            if self.orders["namespaces"]:
                confine.unshare(confine.NEWPID)
            pid = os.fork()
            if pid == 0:
                self._child(session, handle)
            self.children[session] = pid
        except OSError:
            pass  # the host reads the end of the channel and asks again
        finally:
            os.close(handle)
            if self.orders["namespaces"]:
                confine.enter_pids(self.pids)

    def _child(self, session: int, handle: int) -> None:
        """Confine this process and serve; never returns."""
        try:
            signal.set_wakeup_fd(-1)
            os.setsid()
            channel = socket.socket(fileno=_isolate_descriptor(handle))
            scratch = self._scratch(session)
            uid = self.orders["first_uid"] + session % 1024
            if not self.orders["namespaces"]:
                os.mkdir(scratch, 0o700)
                if os.getuid() == 0 and self.orders["change_user"]:
                    _give(scratch, uid)
            confine.confine(self.orders, uid, scratch)
            os.chdir(scratch)
            os.environ.update(HOME=scratch, TMPDIR=scratch)
            spool = os.open(".output", os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o600)
            os.unlink(".output")
            os.dup2(spool, 1)
            os.dup2(spool, 2)
            repl.serve(channel, spool, self.orders["limits"]["output_bytes"])
        except BaseException as error:
            with contextlib.suppress(OSError):
                repl.send(channel, {"fault": f"{type(error).__name__}: {error}"})
        finally:
            os._exit(70)

    def _scratch(self, session: int) -> str:
        return self.base if self.orders["namespaces"] else os.path.join(self.base, str(session))

    # ---- death
    def end(self, message: dict[str, Any]) -> None:
        session = message["end"]
        status, cpu = self._bury(session, GRACE if message["grace"] else 0.0)
        if message["answer"]:
            self.control.send(json.dumps({"ended": session, "status": status, "cpu": cpu}).encode())

    def _bury(self, session: int, grace: float) -> tuple[int | None, float]:
        """Exit code (None: it had to be killed) and CPU seconds. All that the session started is dead afterwards."""
        pid = self.children.pop(session, None)
        if pid is None:
            return 0, 0.0
        deadline = time.monotonic() + grace
        found, status, usage = os.wait4(pid, os.WNOHANG)
        while not found and time.monotonic() < deadline:
            time.sleep(0.001)
            found, status, usage = os.wait4(pid, os.WNOHANG)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        if not found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            usage = os.wait4(pid, 0)[2]
        if not self.orders["namespaces"]:
            shutil.rmtree(self._scratch(session), ignore_errors=True)
        return (os.waitstatus_to_exitcode(status) if found else None), usage.ru_utime + usage.ru_stime

    def close(self) -> None:
        for session in list(self.children):
            self._bury(session, 0.0)
        if not self.orders["namespaces"]:
            shutil.rmtree(self.base, ignore_errors=True)


def _isolate_descriptor(handle: int) -> int:
    """Keep standard input, output, error and this one; nothing else survives, least of all the control socket."""
    os.dup2(handle, 3, inheritable=False)
    os.closerange(4, min(os.sysconf("SC_OPEN_MAX"), 1 << 16))  # the zygote itself never holds more than a handful
    return 3


def _give(path: str, uid: int) -> None:
    try:
        os.chown(path, uid, uid)
    except OSError:  # a container that knows few users: the session will be one of them
        os.chmod(path, 0o777)


def _world_readable(path: str) -> bool:
    """Whether any user can read this file: every folder on the way passes."""
    while path != "/":
        if not os.stat(path).st_mode & (0o001 if os.path.isdir(path) else 0o004):
            return False
        path = os.path.dirname(path)
    return True


def main(control: socket.socket, orders: dict[str, Any]) -> None:
    control.setblocking(True)
    kept = socket.socket(fileno=os.dup(control.fileno()))
    null = os.open(os.devnull, os.O_RDWR)
    try:
        if orders["wrapped"]:
            confine.die_with_parent()  # the parent is the wrapper, one single thread, not a thread of the host
        if orders["build_root"]:
            confine.build_root(orders["trees"], orders["links"])
        orders["landlock"] = orders["landlock"] and landlock.version() > 0
        orders["busy"] = confine.threads_of_user()
        if orders["change_user"] and os.getuid() == 0 and not _world_readable(os.path.realpath(os.__file__)):
            raise PermissionError("another user could not read this interpreter's library")
        for name in PRELOAD:
            importlib.import_module(name)
        zygote = Zygote(kept, orders)
    except Exception as error:
        kept.send(json.dumps({"fault": f"{type(error).__name__}: {error}"}).encode())
        os._exit(70)
    scratch = "" if orders["namespaces"] else zygote.base
    kept.send(json.dumps({"ready": True, "landlock": bool(orders["landlock"]), "scratch": scratch}).encode())
    for number in (0, 1, 2):
        os.dup2(null, number)
    control.detach()
    with contextlib.suppress(OSError):
        zygote.serve()
    os._exit(0)
