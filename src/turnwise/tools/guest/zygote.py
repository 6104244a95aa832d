"""The parent process of all sessions inside the isolation: forks one confined child per session, and reaps it.

Never runs untrusted code. Where there is a PID namespace it is process 1 of it, so the kernel ends all others with it.
It exits when the host's end of its control socket closes, however the host ended.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import select
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

from turnwise.tools.guest import confine, landlock, repl, scratch
from turnwise.tools.guest.meter import Meter

PRELOAD = ("collections", "datetime", "decimal", "fractions", "functools", "heapq", "itertools", "math", "operator",
           "random", "re", "statistics", "string", "textwrap", "typing")  # fmt: skip
GRACE = 0.1  # seconds a session that closed its channel has to exit by itself
SLICE, CLOSE_SECONDS = 0.02, 1.5  # of removing scratch directories: between two requests, and at the end
MEMORY_SECONDS, SCRATCH_SECONDS = 0.05, 0.25  # between two measurements


class Zygote:
    """The child processes by session id, and the loop that serves the host's requests."""

    def __init__(self, control: socket.socket, config: dict[str, Any]) -> None:
        self.control, self.config = control, config
        self.children: dict[int, int] = {}
        self.stopped: dict[int, str] = {}  # sessions killed for exceeding a limit, and which
        self.monitor = Monitor(config)
        self.meters: dict[int, Meter] = {}
        # a session sends its number and its descriptor, before any untrusted code runs
        self.inbox, self.outbox = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC) if config["namespaces"] else -1
        self.base = confine.SCRATCH if config["namespaces"] else tempfile.mkdtemp(prefix="turnwise-")
        if not config["namespaces"]:
            os.chmod(self.base, 0o711)  # a session's user may traverse it but not list it
        self.trash = scratch.Trash(self.base)

    def serve(self) -> None:
        while True:
            ready = self.wait()
            running = {session: pid for session, pid in self.children.items() if session not in self.stopped}
            folders = {} if self.config["namespaces"] else {session: self._scratch(session) for session in running}
            for session, reason in self.monitor.violations(running, folders):
                self.stopped.setdefault(session, reason)  # the host reads why when it ends the session
                self._kill(running[session])
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

    def wait(self) -> bool:
        """Answer the sessions' questions for space; True when the host has a request."""
        now = time.monotonic()
        waiting, pause = select.poll(), 0.0 if self.trash.pending else self.monitor.pause
        asking = {meter.listener: session for session, meter in self.meters.items() if meter.ready_at <= now}
        for meter in self.meters.values():
            pause = min(pause, meter.ready_at - now) if meter.ready_at > now else pause
        for handle in (self.control.fileno(), self.inbox.fileno(), *asking):
            waiting.register(handle, select.POLLIN)
        events = dict(waiting.poll(math.ceil(pause * 1000)))
        for handle, session in asking.items():
            if events.get(handle, 0) & select.POLLIN:
                self.meters[session].answer()
            elif handle in events:  # all its threads have ended
                self.meters.pop(session).close()
        if self.inbox.fileno() in events:
            data, handles, _, _ = socket.recv_fds(self.inbox, 64, 1)
            session = int(data)
            if session in self.children:
                limit = self.config["limits"]["scratch_bytes"]
                self.meters[session] = Meter(handles[0], self.children[session], self._scratch(session), limit)
            else:
                os.close(handles[0])
        return self.control.fileno() in events

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
            # every descriptor but 0, 1, 2 and this one is closed, above all the control socket
            outbox = os.dup(self.outbox.fileno())
            os.dup2(handle, 3, inheritable=False)
            os.dup2(outbox, 4, inheritable=False)
            os.closerange(5, min(os.sysconf("SC_OPEN_MAX"), 1 << 16))  # the zygote never opens more than a handful
            channel, supervisor = socket.socket(fileno=3), socket.socket(fileno=4)
            scratch = self._scratch(session)
            uid = self.config["first_uid"] + session % 1024
            if not self.config["namespaces"]:
                os.mkdir(scratch, 0o700)
                if os.getuid() == 0 and self.config["change_user"]:
                    try:
                        os.chown(scratch, uid, uid, follow_symlinks=False)
                    except OSError:  # a container that maps few users: the session will run as one of those
                        os.chmod(scratch, 0o777)  # no session can write in the directory above it

            def hand_over(listener: int) -> None:
                socket.send_fds(supervisor, [str(session).encode()], [listener])
                os.close(listener)

            confine.confine(self.config, uid, scratch, hand_over)
            supervisor.close()
            os.chdir(scratch)
            os.environ.update(HOME=scratch, TMPDIR=scratch)
            tempfile.tempdir = None  # the zygote's answer to where temporary files go
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

    def _kill(self, pid: int) -> None:
        """Kill a session's processes. In a PID namespace the kernel ends all of them with the first."""
        below = [] if self.config["namespaces"] or self.config["seccomp"] else descendants(pid)
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
        if meter := self.meters.pop(session, None):
            meter.close()
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


# ------------------------------------------------------------------ measured limits


class Monitor:
    """Watches what a process limit cannot bound: the memory of all processes of a session together, and its scratch directory.

    Reads ``/proc`` and directories a few times a second; kills nothing itself."""

    def __init__(self, config: dict[str, Any]) -> None:
        limits = config["limits"]
        self.memory_bytes, self.scratch_bytes = limits["memory_bytes"], limits["scratch_bytes"]
        # without child processes the limit of one process is that of the session
        self.measures_memory = limits["processes"] > 1 and (config["namespaces"] or not config["seccomp"])
        # elsewhere a private file system has its own size, or the kernel asks before each call that takes space
        self.measures_scratch = not config["namespaces"] and not config["metered"]
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
            if len(tree) == 1:  # its own limit holds it
                continue
            if (
                sum(_kilobytes(f"/proc/{n}/status", (b"RssAnon:", b"RssShmem:")) or 0 for n in tree) * 1024
                <= self.memory_bytes
            ):
                continue
            # pages that they share count once, where the kernel tells us
            shares = [_kilobytes(f"/proc/{n}/smaps_rollup", (b"Pss:",)) for n in tree]
            if None in shares or sum(share or 0 for share in shares) * 1024 > self.memory_bytes:
                yield session, f"memory limit of {self.memory_bytes >> 20} MiB for all processes together"

    def _scratch(self, pids: Mapping[int, int], folders: Mapping[int, str]) -> Iterator[tuple[int, str]]:
        for session, folder in folders.items():
            size, entries = scratch.usage(folder, self.scratch_bytes)
            held = scratch.held_by(pids[session])  # infinite: it cannot be seen, and this rung promises little
            if size + (held if held < math.inf else 0) > self.scratch_bytes or entries > scratch.MAX_ENTRIES:
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
    below: list[int] = []
    waiting = list(children.get(pid, ()))
    while waiting:
        below.append(waiting.pop())
        waiting += children.get(below[-1], ())
    return below


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


def main(control: socket.socket, config: dict[str, Any]) -> None:
    control.setblocking(True)
    channel = socket.socket(fileno=os.dup(control.fileno()))
    null = os.open(os.devnull, os.O_RDWR)
    try:
        if config["namespaces"]:
            # the parent is the wrapper, which has one thread; with the host as parent, the end of a thread would kill us
            confine.die_with_parent()
        if config["build_root"]:
            confine.build_root(config["trees"], config["links"])
        config["landlock"] = config["landlock"] and landlock.version() > 0
        config["busy"] = confine.threads_of_user()
        # any user must be able to read this file and traverse every directory above it
        path = os.path.realpath(os.__file__)
        while path != "/" and config["change_user"] and os.getuid() == 0:
            if not os.stat(path).st_mode & (0o001 if os.path.isdir(path) else 0o004):
                raise PermissionError("other users cannot read this interpreter's library")
            path = os.path.dirname(path)
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
