"""The parent process of all sessions inside the isolation: forks one confined child per session, and reaps it.

Never runs untrusted code. Where there is a PID namespace it is process 1 of it, so the kernel ends all others with it.
It exits when the host's end of its control socket closes, however the host ended.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import tempfile
import time
from typing import Any

from turnwise.tools.guest import confine, landlock, monitor, repl, scratch

PRELOAD = ("collections", "datetime", "decimal", "fractions", "functools", "heapq", "itertools", "math", "operator",
           "random", "re", "statistics", "string", "textwrap", "typing")  # fmt: skip
GRACE = 0.1  # seconds a session that closed its channel has to exit by itself
SLICE, CLOSE_SECONDS = 0.02, 1.5  # of removing scratch directories: between two requests, and at the end


class Zygote:
    """The child processes by session id, and the loop that serves the host's requests."""

    def __init__(self, control: socket.socket, config: dict[str, Any]) -> None:
        self.control = control
        self.config = config
        self.children: dict[int, int] = {}
        self.stopped: dict[int, str] = {}  # sessions killed for exceeding a limit, and which
        self.monitor = monitor.Monitor(config)
        self.pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC) if config["namespaces"] else -1
        self.base = confine.SCRATCH if config["namespaces"] else tempfile.mkdtemp(prefix="turnwise-")
        if not config["namespaces"]:
            os.chmod(self.base, 0o711)  # a session's user may traverse it but not list it
        self.trash = scratch.Trash(self.base)

    def serve(self) -> None:
        while True:
            ready = select.select([self.control], [], [], 0.0 if self.trash.pending else self.monitor.pause)[0]
            self._stop_violations()
            self.trash.work(SLICE)
            if not ready:
                continue
            data, handles, _, _ = socket.recv_fds(self.control, 4096, 1)
            if not data:
                break
            message = json.loads(data)
            if "spawn" in message:
                self.spawn(message["spawn"], handles[0])
            else:
                self.end(message)
        self.close()

    # ---- start
    def spawn(self, session: int, handle: int) -> None:
        try:
            if self.config["namespaces"]:
                confine.unshare(confine.NEWPID)
            pid = os.fork()
            if pid == 0:
                self._child(session, handle)
            self.children[session] = pid
        except OSError:
            pass  # the host sees the channel close and tries again
        finally:
            os.close(handle)
            if self.config["namespaces"]:
                confine.enter_pid_namespace(self.pids)

    def _child(self, session: int, handle: int) -> None:
        """Confine this process and run the REPL; never returns."""
        try:
            signal.set_wakeup_fd(-1)
            os.setsid()
            channel = socket.socket(fileno=_isolate_descriptor(handle))
            scratch = self._scratch(session)
            uid = self.config["first_uid"] + session % 1024
            if not self.config["namespaces"]:
                os.mkdir(scratch, 0o700)
                if os.getuid() == 0 and self.config["change_user"]:
                    _make_accessible(scratch, uid)
            confine.confine(self.config, uid, scratch)
            os.chdir(scratch)
            os.environ.update(HOME=scratch, TMPDIR=scratch)
            spool = os.open(".output", os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o600)
            os.unlink(".output")
            os.dup2(spool, 1)
            os.dup2(spool, 2)
            repl.serve(channel, spool, self.config["limits"]["output_bytes"])
        except BaseException as error:
            with contextlib.suppress(OSError):
                repl.send(channel, {"fault": f"{type(error).__name__}: {error}"})
        finally:
            os._exit(70)

    def _scratch(self, session: int) -> str:
        return self.base if self.config["namespaces"] else os.path.join(self.base, str(session))

    # ---- limits
    def _stop_violations(self) -> None:
        """Kill every session that is above a limit; the host reads why when it ends the session."""
        running = {session: pid for session, pid in self.children.items() if session not in self.stopped}
        folders = {} if self.config["namespaces"] else {session: self._scratch(session) for session in running}
        for session, reason in self.monitor.violations(running, folders):
            self.stopped.setdefault(session, reason)
            self._kill(running[session])

    def _kill(self, pid: int) -> None:
        """Kill a session's processes. In a PID namespace the kernel ends all of them with the first."""
        below = [] if self.config["namespaces"] or self.config["seccomp"] else monitor.descendants(pid)
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
        for number in (pid, *below):
            with contextlib.suppress(OSError):
                os.kill(number, signal.SIGKILL)

    # ---- end
    def end(self, message: dict[str, Any]) -> None:
        session = message["end"]
        status, cpu = self._reap(session, GRACE if message["grace"] else 0.0)
        reason = self.stopped.pop(session, "")
        if message["answer"]:
            answer = {"ended": session, "status": status, "cpu": cpu, "reason": reason}
            self.control.send(json.dumps(answer).encode())

    def _reap(self, session: int, grace: float) -> tuple[int | None, float]:
        """Exit code (None: we killed it) and CPU seconds. All processes of the session have ended afterwards."""
        pid = self.children.pop(session, None)
        if pid is None:
            return 0, 0.0
        deadline = time.monotonic() + grace
        exited, status, usage = os.wait4(pid, os.WNOHANG)
        while not exited and time.monotonic() < deadline:
            time.sleep(0.001)
            exited, status, usage = os.wait4(pid, os.WNOHANG)
        self._kill(pid)
        if not exited:
            usage = os.wait4(pid, 0)[2]
        if not self.config["namespaces"]:
            self.trash.add(str(session))
        return (os.waitstatus_to_exitcode(status) if exited else None), usage.ru_utime + usage.ru_stime

    def close(self) -> None:
        for session in list(self.children):
            self._reap(session, 0.0)
        if not self.config["namespaces"]:
            self.trash.work(CLOSE_SECONDS)
            with contextlib.suppress(OSError):  # the host removes what took too long
                os.rmdir(self.base)


def _isolate_descriptor(handle: int) -> int:
    """Close every descriptor but 0, 1, 2 and this one, above all the control socket."""
    os.dup2(handle, 3, inheritable=False)
    os.closerange(4, min(os.sysconf("SC_OPEN_MAX"), 1 << 16))  # the zygote itself never opens more than a handful
    return 3


def _make_accessible(path: str, uid: int) -> None:
    try:
        os.chown(path, uid, uid)
    except OSError:  # a container that maps few users: the session will run as one of those
        os.chmod(path, 0o777)


def _world_readable(path: str) -> bool:
    """Whether any user can read this file and traverse every directory above it."""
    while path != "/":
        if not os.stat(path).st_mode & (0o001 if os.path.isdir(path) else 0o004):
            return False
        path = os.path.dirname(path)
    return True


def main(control: socket.socket, config: dict[str, Any]) -> None:
    control.setblocking(True)
    channel = socket.socket(fileno=os.dup(control.fileno()))
    null = os.open(os.devnull, os.O_RDWR)
    try:
        if config["wrapped"]:
            # the parent is the wrapper, which has one thread; with the host as parent, the end of a thread would kill us
            confine.die_with_parent()
        if config["build_root"]:
            confine.build_root(config["trees"], config["links"])
        config["landlock"] = config["landlock"] and landlock.version() > 0
        config["busy"] = confine.threads_of_user()
        if config["change_user"] and os.getuid() == 0 and not _world_readable(os.path.realpath(os.__file__)):
            raise PermissionError("other users cannot read this interpreter's library")
        for name in PRELOAD:
            importlib.import_module(name)
        zygote = Zygote(channel, config)
    except Exception as error:
        channel.send(json.dumps({"fault": f"{type(error).__name__}: {error}"}).encode())
        os._exit(70)
    scratch = "" if config["namespaces"] else zygote.base
    channel.send(json.dumps({"ready": True, "landlock": bool(config["landlock"]), "scratch": scratch}).encode())
    for number in (0, 1, 2):
        os.dup2(null, number)
    control.detach()
    with contextlib.suppress(OSError):
        zygote.serve()
    os._exit(0)
