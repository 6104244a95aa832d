"""Tries attacks on one rung of isolation and says what came out. ``python tests/tools/attack_run.py landlock`` prints the table.

An attack is *held* when it reached nothing, the host's own things are as they were, and a neighbour still works.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import secrets
import select
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from attacks import Attack, all_attacks

from turnwise.tools import PythonTool, SandboxLimits, SandboxSession

LIMITS = SandboxLimits(wall_seconds=1.0, cpu_seconds=20, memory_bytes=256 << 20, processes=8, scratch_bytes=4 << 20)
PRINTING = 10.0  # seconds for which a thread that an attack left behind may print into later answers of its own session
PATIENCE = 30.0  # seconds until an attack has hung, on a busy machine
PROMISED = {"limits": ("exhaustion", "hang", "protocol")}  # other rungs promise everything
PRELUDE = """
import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    ctypes.set_errno(0)
    return libc.syscall(number, *arguments), ctypes.get_errno()
"""


@dataclass(frozen=True)
class AttackOutcome:
    """``fault`` is empty when the attack was held."""

    attack: Attack
    fault: str
    answer: str
    seconds: float


class Target:
    """What attacks aim at: files, sockets, shared memory and a process that any user could reach without a sandbox."""

    def __init__(self, tool: PythonTool) -> None:
        self.tool, self.token, self._stack = tool, secrets.token_hex(16), contextlib.ExitStack()
        self.used = False

    def __enter__(self) -> Target:
        stack = self._stack
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.name = f"tw-{secrets.token_hex(4)}"
        (self.folder / "empty").mkdir()
        (self.folder / "secret").write_text(self.token)
        os.mkfifo(self.folder / "fifo")
        self._reader = os.open(self.folder / "fifo", os.O_RDONLY | os.O_NONBLOCK)
        stack.callback(os.close, self._reader)
        Path(f"/dev/shm/{self.name}").write_text(self.token)
        stack.callback(Path(f"/dev/shm/{self.name}").unlink)
        self._tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self._sockets = [self._tcp, self._bound(socket.SOCK_STREAM, str(self.folder / "stream"))]
        self._sockets += [
            self._bound(socket.SOCK_DGRAM, where) for where in (str(self.folder / "datagrams"), f"\0{self.name}")
        ]
        self._segment = ctypes.CDLL(None).shmget(0, 4096, 0o1666)
        stack.callback(ctypes.CDLL(None).shmctl, self._segment, 0, None)
        self._victim = stack.enter_context(subprocess.Popen(["sleep", "3600"]))
        stack.callback(self._victim.kill)
        self._cores = os.sched_getaffinity(self._victim.pid)
        for path in (self.folder, *self.folder.iterdir()):
            path.chmod(0o777)
        self.neighbour = stack.enter_context(self.tool.open())
        self.neighbour.run(f"import os; secret = {self.token!r}; open('secret', 'w').write(secret)")
        # files that any session may read: one that the host locks, and one that it does not
        library, locked = self.neighbour.run("import json; print(os.__file__, json.__file__)").output.split()
        self._library, self._locked = (stack.enter_context(Path(path).open()) for path in (library, locked))  # noqa: SIM115
        fcntl.flock(self._locked, fcntl.LOCK_SH)
        fcntl.lockf(self._locked, fcntl.LOCK_SH)
        self.facts = self._facts()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _bound(self, kind: int, where: str) -> socket.socket:
        out = self._stack.enter_context(socket.socket(socket.AF_UNIX, kind))
        out.bind(where)
        if kind == socket.SOCK_STREAM:
            out.listen()
        return out

    def _facts(self) -> dict[str, Any]:
        pid, home = self.neighbour.run("print(os.getpid(), os.environ['HOME'])").output.split()
        folder = self.folder
        return {
            "folder": folder, "secret": folder / "secret", "fifo": folder / "fifo", "stream": folder / "stream",
            "datagrams": folder / "datagrams", "name": self.name, "port": self._tcp.getsockname()[1], "host": os.getpid(),
            # an orphan's parent is 1, which is also the number of a session in its own namespace
            "parent": os.getppid() if os.getppid() > 1 else os.getpid(),
            "victim": self._victim.pid, "segment": self._segment, "neighbour": pid, "neighbour_home": home,
            "locked": self._locked.name, "limit": LIMITS.scratch_bytes, "memory": LIMITS.memory_bytes,
            "root": Path(__file__).resolve().parents[2],
        }  # fmt: skip

    def code(self, attack: Attack) -> str:
        text = attack.code
        for name, value in self.facts.items():
            text = text.replace("{" + name + "}", str(value))
        return f"got = None\n{text}\nprint('ESCAPED' if got else 'held')"

    def damage(self) -> Iterator[str]:
        """What an attack has changed on the host."""
        try:
            if (self.folder / "secret").read_text() != self.token:
                yield "a file was changed"
        except OSError as error:
            yield f"a file is gone: {error}"
        # of all of them: the supervisor's own calls have changed modes of what a link named
        if modes := {oct(path.stat().st_mode & 0o7777) for path in (self.folder, *self.folder.iterdir())} - {"0o777"}:
            yield f"modes were changed: {modes}"
        if names := {path.name for path in self.folder.iterdir()} - {"empty", "secret", "fifo", "stream", "datagrams"}:
            yield f"there are new files: {sorted(names)}"
        if ready := select.select([*self._sockets, self._reader], [], [], 0)[0]:
            ready = [one for one in ready if one is not self._reader or os.read(self._reader, 9)]
            if ready:
                yield f"{len(ready)} sockets or pipes were reached"
        if self._victim.poll() is not None or os.sched_getaffinity(self._victim.pid) != self._cores:
            yield "a process was changed"
        try:
            fcntl.flock(self._library, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(self._library, fcntl.LOCK_UN)
            # type of a lock that would stand against ours: F_UNLCK where there is none
            other = fcntl.fcntl(self._library, fcntl.F_GETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
            if struct.unpack("hhqqi4x", other)[0] != fcntl.F_UNLCK:
                yield "a file of the host is locked"
        except BlockingIOError:
            yield "a file of the host is locked"
        answer = self.neighbour.run("secret, open('secret').read(), os.listdir()").output
        if answer != f"('{self.token}', '{self.token}', ['secret'])":
            yield f"a neighbour was disturbed: {answer}"


def attempt(target: Target, session: SandboxSession, attack: Attack) -> AttackOutcome:
    began = time.monotonic()
    try:
        session.run(PRELUDE)
        result = session.run(target.code(attack))
        answer, fault = result.output, ""
        if attack.kind != "protocol" and "ESCAPED" in answer:
            fault = "it reached what it must not reach"
        if target.token in answer:
            fault = "it read a secret"
        patience = time.monotonic() + PRINTING
        while (last := session.run("2 + 2").output) != "4" and time.monotonic() < patience:
            time.sleep(0.1)
        if last != "4":
            fault = fault or "the session does not answer any more"
    except Exception as error:
        answer, fault = "", f"the host raised {error!r}"
    seconds = time.monotonic() - began
    fault = fault or next(target.damage(), "") or (f"it took {seconds:.0f} s" if seconds > PATIENCE else "")
    return AttackOutcome(attack, fault, textwrap.shorten(answer, 120), seconds)


def run_attacks(rung: str, attacks: Sequence[Attack] | None = None) -> list[AttackOutcome]:
    """Every attack against which this rung promises something, each in a session of its own."""
    kinds = PROMISED.get(rung)
    chosen = [attack for attack in (attacks or all_attacks()) if kinds is None or attack.kind in kinds]
    out = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with PythonTool(LIMITS, isolation=rung) as tool:
            while chosen:
                with Target(tool) as target:  # a new one after a fault, so that damage is reported once
                    while chosen and not (out and out[-1].fault and target.used):
                        with tool.open() as session:
                            out.append(attempt(target, session, chosen.pop(0)))
                        target.used = True
    return out


def table(outcomes: Sequence[AttackOutcome]) -> str:
    tried, failed = Counter(o.attack.kind for o in outcomes), Counter(o.attack.kind for o in outcomes if o.fault)
    lines = ["| kind | tried | held | slowest |", "|---|---:|---:|---:|"]
    for kind, count in tried.items():
        slowest = max(o.seconds for o in outcomes if o.attack.kind == kind)
        lines.append(f"| {kind} | {count} | {count - failed[kind]} | {slowest:.1f} s |")
    lines += [f"- {o.attack.kind}, {o.attack.name}: {o.fault} ({o.answer})" for o in outcomes if o.fault]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(run_attacks(sys.argv[1])))
