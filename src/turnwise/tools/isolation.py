"""The isolation mechanisms, strongest first, the limits of a session, and the interpreter that runs inside.

    bubblewrap   namespaces created by ``bwrap``, plus seccomp, plus Landlock where the kernel has it
    namespaces   the same namespaces created by ``unshare``; the worker builds the file system itself
    landlock     no namespaces (common in containers): Landlock and seccomp alone; no child processes at all
    limits       resource limits only: against accidents, not against malice

A mechanism is used completely or not at all: the caller starts it, tests that it isolates, and otherwise tries the next
weaker one. This module writes command lines and the worker's configuration; it knows neither the protocol nor what will
be run.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

from turnwise.core.limits import check_limits, number
from turnwise.errors import SettingError, nearest
from turnwise.tools.guest import landlock, seccomp
from turnwise.tools.guest.confine import DEVICES

SYSTEM_TREES = ("/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/share/zoneinfo", "/nix/store")
FLAGS = ("-s", "-S", "-B")  # the environment is empty too: no user site, no site-packages, no bytecode written
KIB, MIB = 1 << 10, 1 << 20
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of one session: ``SandboxLimits(wall_seconds=2.0)`` keeps the default of every other one."""

    wall_seconds: float = number(5.0, above=0)  # of one call
    cpu_seconds: int = number(60, above=0)  # of one process, over the whole session
    memory_bytes: int = number(
        512 * MIB, least=64 * MIB, why="the interpreter itself needs as much"
    )  # address space of one process, and resident memory of all processes together
    output_bytes: int = number(4 * KIB, above=0)  # of one result; the remainder is cut, with a note
    source_bytes: int = number(64 * KIB, above=0)  # of one call
    scratch_bytes: int = number(
        32 * MIB, above=0
    )  # of the private scratch directory (at most 4,096 files), and of one file in it
    processes: int = number(16, above=0)  # processes and threads together; 1: the code may start none
    open_files: int = number(64, least=16, why="the interpreter itself needs as many")

    def __post_init__(self) -> None:
        check_limits(self, SettingError)


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python executable and the directory trees it must be able to read."""

    path: str
    trees: tuple[str, ...]
    links: tuple[tuple[str, str], ...]  # (target, path): /lib -> usr/lib


@dataclass(frozen=True, slots=True)
class Isolation:
    """One mechanism."""

    name: str
    blocks: str
    does_not_block: str
    program: str = ""  # that wraps the interpreter
    arguments: Callable[[Interpreter], list[str]] = lambda _: []  # of the program
    build_root: bool = False
    landlock: bool = True  # where the kernel has it
    seccomp: bool = True

    @property
    def namespaces(self) -> bool:
        """Both programs make them."""
        return bool(self.program)

    def unavailable(self) -> str:
        """The reason why it cannot be used here, or an empty string."""
        if sys.platform != "linux":
            return f"the worker needs Linux, this is {sys.platform}"
        if self.program and not shutil.which(self.program):
            return f"the command {self.program} is not installed"
        if self.landlock and not self.namespaces and not landlock.version():
            return "this kernel has no Landlock"
        if self.seccomp and not seccomp.supported():
            return f"there is no system-call filter for {os.uname().machine}"
        return ""

    def describe(self) -> str:
        """One sentence: the mechanism, what it blocks, what it does not block."""
        return f"{self.name}: stops {self.blocks}; does not stop {self.does_not_block}"

    def command(self, interpreter: Interpreter, boot: str) -> list[str]:
        wrapper = [shutil.which(self.program) or self.program, *self.arguments(interpreter)] if self.program else []
        return [*wrapper, interpreter.path, *FLAGS, "-c", boot]

    def config(self, interpreter: Interpreter, limits: SandboxLimits, *, keep_user: bool) -> dict[str, Any]:
        """The worker's complete configuration. ``keep_user``: a session started by root keeps running as root."""
        return {
            "namespaces": self.namespaces,
            "build_root": self.build_root,
            "landlock": self.landlock,
            "seccomp": self.seccomp,
            "metered": self.seccomp and not self.namespaces,  # scratch is a directory of the host's file system
            "change_user": not keep_user,
            "trees": interpreter.trees,
            "links": interpreter.links,
            "limits": asdict(limits),
            # unused user ids, 1024 per host process: the process limit counts per user, so two hosts must not share one
            "first_uid": (1 << 30) + os.getpid() % (1 << 20) * 1024,
        }


# ------------------------------------------------------------- mechanisms


def _unshare(_: Interpreter) -> list[str]:
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child", *user, "--"]


def _bubblewrap(interpreter: Interpreter) -> list[str]:
    out = ["--unshare-net", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    # root stays root until a session changes its user; any other user needs a user namespace to get capabilities
    out += [] if os.geteuid() == 0 else ["--unshare-user"]
    # of the zygote, which must also end and measure processes of other users; a session drops all of them
    for capability in ("CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID", "CAP_KILL", "CAP_SYS_PTRACE"):
        out += ["--cap-add", capability]
    # name the parent directories, or bwrap creates them accessible to its own user only
    for folder in sorted({str(parent) for path in (*interpreter.trees, *DEVICES) for parent in PurePath(path).parents}):
        out += ["--dir", folder]
    for tree in interpreter.trees:
        out += ["--ro-bind", tree, tree]
    for target, path in interpreter.links:
        out += ["--symlink", target, path]
    for device in DEVICES:
        out += ["--dev-bind", device, device]
    out += ["--proc", "/proc", "--dir", "/tmp", "--remount-ro", "/", "--chdir", "/"]
    return [*out, "--as-pid-1", "--new-session", "--"]


_BLOCKS = "network, files outside system libraries and a private scratch directory, other processes"
_LIMITED = "more than the allowed processes, memory, scratch space and CPU time"
_DOES_NOT_BLOCK = "bugs in the kernel itself, timing side channels"
ISOLATIONS: tuple[Isolation, ...] = (
    Isolation("bubblewrap", f"{_BLOCKS}, {_LIMITED}", _DOES_NOT_BLOCK, "bwrap", _bubblewrap),
    Isolation("namespaces", f"{_BLOCKS}, {_LIMITED}", _DOES_NOT_BLOCK, "unshare", _unshare, build_root=True),
    Isolation(
        "landlock",
        f"{_BLOCKS}, any child process, more than the allowed memory, scratch space and CPU time",
        f"{_DOES_NOT_BLOCK}, asking whether a file exists, how large it is and where a link points",
    ),
    Isolation(
        "limits",
        "runaway CPU time, memory, output and (roughly) processes",
        "network access, reading or writing whatever its user may, signals to that user's other processes",
        landlock=False,
        seccomp=False,
    ),
)


def mechanisms(name: str = "auto") -> tuple[Isolation, ...]:
    """The mechanisms to try, in order: all of them for ``auto``, or the one named."""
    if name == "auto":
        return ISOLATIONS
    named = {isolation.name: isolation for isolation in ISOLATIONS}
    if name not in named:
        raise SettingError(f"no isolation {name!r}; {nearest(name, ['auto', *named])}")
    return (named[name],)


# ----------------------------------------------------------- the interpreter


def interpreters() -> tuple[Interpreter, ...]:
    """Candidates, best first: the Python we run on, outside its virtual environment, then the system's."""
    current = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    system = os.path.realpath("/usr/bin/python3")
    prefixes = {current: [sys.base_prefix, sys.base_exec_prefix]}
    if os.path.exists(system):
        prefixes.setdefault(system, ["/usr"])
    candidates = []
    for path, roots in prefixes.items():
        paths, links = [*SYSTEM_TREES, "/etc/ld.so.cache", os.path.dirname(path)], []
        paths += [os.path.join(root, part) for root in roots for part in ("bin", "lib", "lib64")]
        for name in ("/bin", "/lib", "/lib32", "/lib64"):
            if os.path.islink(name):
                links.append((os.readlink(name), name))
            else:
                paths.append(name)
        trees = sorted({os.path.realpath(tree) for tree in paths if os.path.exists(tree)})
        # only the outermost: a tree inside another comes with it
        outermost = [tree for tree in trees if not any(tree.startswith(other + "/") for other in trees)]
        candidates.append(Interpreter(path, tuple(outermost), tuple(links)))
    return tuple(candidates)
