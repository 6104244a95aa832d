"""Drops the worker's privileges: mounts, namespaces, user, capabilities, resource limits.

Runs before any untrusted code and cannot be undone. Knows the kernel; does not know what will run afterwards.
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


def enter_pid_namespace(namespace: int) -> None:
    """Create later children in this PID namespace."""
    _check(libc.setns(namespace, NEWPID), "setns")


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    filesystem = kind.encode() if kind else None
    _check(
        libc.mount(source.encode(), target.encode(), filesystem, ctypes.c_ulong(flags), data.encode()),
        f"mount {target}",
    )


def die_with_parent() -> None:
    _check(libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0), "prctl")


# ------------------------------------------------------------ the file system


def build_root(trees: Sequence[str], links: Sequence[tuple[str, str]]) -> None:
    """Build a root with only these read-only trees, four devices and an empty scratch directory; pivot into it."""
    base = SCRATCH  # the mount hides whatever was there
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
    # remount the root read-only last, so that no mount stays writable by accident
    mount("none", "/", None, REMOUNT | BIND | READ_ONLY | NOSUID | NODEV)


def _bind(source: str, target: str, flags: int) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    mount(source, target, None, BIND | REC)
    mount("none", target, None, REMOUNT | BIND | flags)


def mount_private_scratch(size: int) -> None:
    """Mount a scratch directory that only this session sees and that ends with it; hide /proc."""
    unshare(NEWNS | NEWIPC)
    mount("none", "/", None, REC | PRIVATE)
    mount("tmpfs", SCRATCH, "tmpfs", NOSUID | NODEV, f"size={size},nr_inodes=4096,mode=0777")
    mount("tmpfs", "/proc", "tmpfs", NOSUID | NODEV | READ_ONLY, "size=4k,mode=0555")


# ------------------------------------------------------------ user and limits


def drop_user(uid: int) -> bool:
    """Switch from root to user ``uid``, which no other session has: the process limit then counts this session alone."""
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
    empty_sets = (ctypes.c_uint32 * 6)()
    _check(libc.capset(header, empty_sets), "capset")


def limit_resources(limits: dict[str, Any]) -> None:
    """Set all limits but that of processes, which counts per user (``limit_processes``)."""
    cpu = limits["cpu_seconds"]
    resource.setrlimit(
        resource.RLIMIT_CPU, (cpu, cpu + 1)
    )  # the hard limit kills a process that ignores the soft limit's signal
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
    """The number of threads this user already runs: the process limit of a shared user must include them."""
    total = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == os.getuid():
                total += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue  # it has ended meanwhile
    return total


def confine(config: dict[str, Any], uid: int, scratch: str) -> None:
    """Apply all of it to one session. The order matters: mounts need the privileges that are dropped next."""
    limits = config["limits"]
    if config["namespaces"]:
        mount_private_scratch(limits["scratch_bytes"])
    limit_resources(limits)
    changed_user = config["change_user"] and drop_user(uid)
    if config["namespaces"] and not changed_user:
        unshare(NEWUSER)  # the kernel counts processes per user *and* user namespace
    if config["namespaces"] or changed_user:
        limit_processes(limits["processes"])
    elif not config["seccomp"]:
        limit_processes(config["busy"] + limits["processes"])
    if not config["namespaces"]:
        die_with_parent()  # after the change of user, which clears the setting
    if config["seccomp"]:
        drop_capabilities()
    if config["landlock"]:
        landlock.apply([*config["trees"], *DEVICES], [scratch, os.devnull])
    if config["seccomp"]:
        forks = config["namespaces"] and limits["processes"] > 1
        seccomp.apply(forks=forks, private_pids=config["namespaces"])
