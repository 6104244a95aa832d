"""How the worker gives up its powers: mounts, namespaces, identity, capabilities, resource limits.

Runs before any untrusted code and is not undone. Knows the kernel; does not know what will run afterwards.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Sequence
from typing import Any

from turnwise.tools.guest import landlock, seccomp

NEWNS, NEWIPC, NEWUSER, NEWPID = 0x20000, 0x08000000, 0x10000000, 0x20000000
NOSUID, NODEV, READ_ONLY, REMOUNT, BIND, REC, PRIVATE, DETACH = 2, 4, 1, 32, 4096, 16384, 1 << 18, 2
PR_SET_PDEATHSIG, SIGKILL = 1, 9
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
SCRATCH = "/tmp"

libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    _check(libc.unshare(flags), "unshare")


def enter_pids(namespace: int) -> None:
    """Children forked from now on are born in this process namespace."""
    _check(libc.setns(namespace, NEWPID), "setns")


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    coded = kind.encode() if kind else None
    _check(libc.mount(source.encode(), target.encode(), coded, ctypes.c_ulong(flags), data.encode()), f"mount {target}")


def die_with_parent() -> None:
    _check(libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0), "prctl")


# ------------------------------------------------------------ the file system


def build_root(trees: Sequence[str], links: Sequence[tuple[str, str]]) -> None:
    """A root holding only these trees, read-only, four devices and an empty scratch directory; then move into it."""
    base = SCRATCH  # whatever was there disappears under the new root
    mount("none", "/", None, REC | PRIVATE)
    mount("tmpfs", base, "tmpfs", NOSUID | NODEV, "size=1m,mode=0755")
    for path in trees:
        _bind(path, base + path, NOSUID | NODEV | READ_ONLY)
    for path in DEVICES:
        _bind(path, base + path, NOSUID)
    for target, path in links:
        os.symlink(target, base + path)
    for name in ("/proc", SCRATCH):
        os.makedirs(base + name, exist_ok=True)
    mount("proc", base + "/proc", "proc", NOSUID | NODEV)
    os.chdir(base)
    _check(libc.syscall({0: 155, 1: 41}[seccomp.MACHINES[os.uname().machine][0]], b".", b"."), "pivot_root")
    _check(libc.umount2(b".", DETACH), "umount")
    os.chdir("/")
    # a single mount cannot be left writable by accident: the root itself is the last to be closed
    mount("none", "/", None, REMOUNT | BIND | READ_ONLY | NOSUID | NODEV)


def _bind(source: str, target: str, flags: int) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    mount(source, target, None, BIND | REC)
    mount("none", target, None, REMOUNT | BIND | flags)


def own_scratch(size: int) -> None:
    """A scratch directory that only this session sees and that vanishes with it; /proc is covered."""
    unshare(NEWNS | NEWIPC)
    mount("none", "/", None, REC | PRIVATE)
    mount("tmpfs", SCRATCH, "tmpfs", NOSUID | NODEV, f"size={size},nr_inodes=4096,mode=0777")
    mount("tmpfs", "/proc", "tmpfs", NOSUID | NODEV | READ_ONLY, "size=4k,mode=0555")


# ----------------------------------------------------------- who and how much


def become_nobody(uid: int) -> bool:
    """Another user, if we are root and may. One of its own, so that the process limit counts this session alone."""
    if os.getuid() != 0:
        return False
    for number in (uid, 65534):
        try:
            os.setgroups([])
            os.setresgid(number, number, number)
            os.setresuid(number, number, number)
            return True
        except OSError:
            continue
    return False


def drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    nothing = (ctypes.c_uint32 * 6)()
    _check(libc.capset(header, nothing), "capset")


def limit(limits: dict[str, Any]) -> None:
    """Everything but the number of processes, whose meaning depends on the user (``limit_processes``)."""
    cpu = limits["cpu_seconds"]
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))  # the hard one kills whoever ignores the soft one's signal
    for which, amount in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["scratch_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        hard = resource.getrlimit(which)[1]
        amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
        resource.setrlimit(which, (amount, amount))


def limit_processes(count: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    count = count if hard == resource.RLIM_INFINITY else min(count, hard)
    resource.setrlimit(resource.RLIMIT_NPROC, (count, count))


def threads_of_user() -> int:
    """How many threads this user runs already: a shared user's process limit has to start from there."""
    total = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == os.getuid():
                total += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue  # gone meanwhile
    return total


def confine(orders: dict[str, Any], uid: int, scratch: str) -> None:
    """All of it, for one session, in the only order that works: mounts need the powers dropped next."""
    limits = orders["limits"]
    if orders["namespaces"]:
        own_scratch(limits["scratch_bytes"])
    limit(limits)
    changed = orders["change_user"] and become_nobody(uid)
    if orders["namespaces"] and not changed:
        unshare(NEWUSER)  # processes are counted per user *and* user namespace
    if orders["namespaces"] or changed:
        limit_processes(limits["processes"])
    elif not orders["seccomp"]:
        limit_processes(orders["busy"] + limits["processes"])
    if not orders["namespaces"]:
        die_with_parent()  # after the change of user, which clears it
    if orders["seccomp"]:
        drop_capabilities()
    if orders["landlock"]:
        landlock.apply([*orders["trees"], *DEVICES], [scratch, os.devnull])
    if orders["seccomp"]:
        forks = orders["namespaces"] and limits["processes"] > 1
        seccomp.apply(forks=forks, own_processes=orders["namespaces"])
