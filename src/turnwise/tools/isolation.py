"""The ladder of isolations, best first, and which interpreter runs inside.

    bubblewrap   namespaces made by ``bwrap``, plus seccomp, plus Landlock where the kernel has it
    namespaces   the same namespaces made by ``unshare``, the file system built by the worker itself
    landlock     no namespaces (common in containers): Landlock and seccomp alone; no child processes at all
    limits       resource limits only: against accidents, not against malice

A rung is taken whole or not at all: whoever starts it checks that it holds and otherwise tries the next one down.
This file writes command lines and orders for the worker; it knows neither the protocol nor what will be run.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

from turnwise.errors import SettingError, nearest
from turnwise.tools.guest import landlock, seccomp
from turnwise.tools.guest.confine import DEVICES
from turnwise.tools.limits import Limits

SYSTEM = ("/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/share/zoneinfo", "/nix/store")
FLAGS = ("-s", "-S", "-B")  # with an emptied environment: no user site, no site-packages, no bytecode written
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python and the trees that must be readable for it to run."""

    path: str
    trees: tuple[str, ...]
    links: tuple[tuple[str, str], ...]  # (target, path): /lib -> usr/lib


@dataclass(frozen=True, slots=True)
class Isolation:
    """One rung. ``missing`` says in words why it cannot be used here, or returns an empty string."""

    name: str
    stops: str
    leaves: str
    missing: Callable[[], str]
    wrap: Callable[[Interpreter], list[str]]
    namespaces: bool = False
    build_root: bool = False
    landlock: bool = True
    seccomp: bool = True

    def describe(self) -> str:
        """One sentence: what is used, what it stops, what it does not."""
        return f"{self.name}: stops {self.stops}; does not stop {self.leaves}"

    def command(self, interpreter: Interpreter, boot: str) -> list[str]:
        return [*self.wrap(interpreter), interpreter.path, *FLAGS, "-c", boot]

    def orders(self, interpreter: Interpreter, limits: Limits, *, keep_user: bool) -> dict[str, Any]:
        """What the worker is told, and all it is ever told. ``keep_user``: a session of root's stays root."""
        return {
            "namespaces": self.namespaces,
            "wrapped": self.namespaces,
            "build_root": self.build_root,
            "landlock": self.landlock,
            "seccomp": self.seccomp,
            "change_user": not keep_user,
            "trees": interpreter.trees,
            "links": interpreter.links,
            "limits": asdict(limits),
            # users nobody has, a thousand per host process, so that two hosts never count each other's processes
            "first_uid": (1 << 30) + os.getpid() % (1 << 20) * 1024,
        }


# ----------------------------------------------------------------- the rungs


def _root() -> bool:
    return os.geteuid() == 0


def _no_bubblewrap() -> str:
    if not shutil.which("bwrap"):
        return "bubblewrap (the command bwrap) is not installed"
    return _no_seccomp()


def _no_unshare() -> str:
    return _no_seccomp() if shutil.which("unshare") else "the command unshare (util-linux) is not installed"


def _no_landlock() -> str:
    if sys.platform != "linux" or not landlock.version():
        return "this kernel has no Landlock"
    return _no_seccomp()


def _no_seccomp() -> str:
    known = sys.platform == "linux" and seccomp.supported()
    return "" if known else f"no system-call filter was written for {sys.platform} on {os.uname().machine}"


def _found(command: str) -> str:
    return shutil.which(command) or command


def _bubblewrap(interpreter: Interpreter) -> list[str]:
    out = [_found("bwrap"), "--unshare-net", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    # root keeps its user until a session takes one of its own; anybody else needs a user namespace to have any power
    out += [] if _root() else ["--unshare-user"]
    for power in ("CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID"):  # of the zygote; a session drops all of them
        out += ["--cap-add", power]
    # folders on the way are named, or bwrap makes them for its own user only
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


def _unshare(interpreter: Interpreter) -> list[str]:
    out = [_found("unshare"), "--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child"]
    return [*out, *([] if _root() else ["--user", "--map-root-user"]), "--"]


def _bare(interpreter: Interpreter) -> list[str]:
    return []


_STOPS = "network, files outside system libraries and a private scratch directory, other processes"
_COUNTED = "more than the allowed processes, memory and CPU time"
_LEAVES = "bugs in the kernel itself, timing side channels"
LADDER: tuple[Isolation, ...] = (
    Isolation("bubblewrap", f"{_STOPS}, {_COUNTED}", _LEAVES, _no_bubblewrap, _bubblewrap, namespaces=True),
    Isolation("namespaces", f"{_STOPS}, {_COUNTED}", _LEAVES, _no_unshare, _unshare, namespaces=True, build_root=True),
    Isolation(
        "landlock",
        f"{_STOPS}, any child process, more than the allowed memory and CPU time",
        f"{_LEAVES}, asking whether a file exists, filling the disk of the scratch directory with many files",
        _no_landlock,
        _bare,
    ),
    Isolation(
        "limits",
        "runaway CPU time, memory, output and (roughly) processes",
        "network access, reading or writing whatever its user may, signals to that user's other processes",
        lambda: "" if sys.platform == "linux" else f"the worker needs Linux, this is {sys.platform}",
        _bare,
        landlock=False,
        seccomp=False,
    ),
)


def rungs(name: str = "auto") -> tuple[Isolation, ...]:
    """The rungs to try, in order: all of them, or the one forced."""
    if name == "auto":
        return LADDER
    for rung in LADDER:
        if rung.name == name:
            return (rung,)
    raise SettingError(f"no isolation {name!r}; {nearest(name, ['auto', *(r.name for r in LADDER)])}")


# ----------------------------------------------------------- the interpreter


def interpreters() -> tuple[Interpreter, ...]:
    """Candidates, best first: the Python we run on, freed of its virtual environment, then the system's."""
    own = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    system = os.path.realpath("/usr/bin/python3")
    prefixes = [sys.base_prefix, sys.base_exec_prefix]
    found = [_interpreter(own, prefixes)]
    if os.path.exists(system) and system != own:
        found.append(_interpreter(system, ["/usr"]))
    return tuple(found)


def _interpreter(path: str, prefixes: Sequence[str]) -> Interpreter:
    wanted = [*SYSTEM, "/etc/ld.so.cache", os.path.dirname(path)]
    wanted += [os.path.join(prefix, part) for prefix in prefixes for part in ("bin", "lib", "lib64")]
    links = []
    for name in ("/bin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(name):
            links.append((os.readlink(name), name))
        else:
            wanted.append(name)
    trees = sorted({os.path.realpath(tree) for tree in wanted if os.path.exists(tree)})
    outer = [tree for tree in trees if not any(tree.startswith(other + "/") for other in trees)]
    return Interpreter(path, tuple(outer), tuple(links))
