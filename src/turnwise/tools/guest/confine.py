"""Drops the worker's privileges: mounts, namespaces, user, capabilities, resource limits.

Runs before any untrusted code and cannot be undone. Knows the kernel; does not know what will run afterwards.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable, Sequence
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
    result = libc.mount(source.encode(), target.encode(), filesystem, ctypes.c_ulong(flags), data.encode())
    _check(result, f"mount {target}")


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


def limit(which: int, amount: int) -> None:
    """Lower a limit of this process, soft and hard, for good."""
    hard = resource.getrlimit(which)[1]
    amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
    resource.setrlimit(which, (amount, amount))


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


def confine(config: dict[str, Any], uid: int, scratch: str, hand_over: Callable[[int], None]) -> None:
    """Apply all of it to one session. The order matters: mounts need the privileges that are dropped next.

    ``hand_over`` sends the supervisor the descriptor on which the kernel will ask for space."""
    limits = config["limits"]
    if config["namespaces"]:
        # a scratch directory that only this session sees and that ends with it; /proc is hidden
        unshare(NEWNS | NEWIPC)
        mount("none", "/", None, REC | PRIVATE)
        size = f"size={limits['scratch_bytes']},nr_inodes=4096,mode=0777"
        mount("tmpfs", SCRATCH, "tmpfs", NOSUID | NODEV, size)
        mount("tmpfs", "/proc", "tmpfs", NOSUID | NODEV | READ_ONLY, "size=4k,mode=0555")
    # the hard limit kills a process that ignores the soft limit's signal
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_seconds"], limits["cpu_seconds"] + 1))
    limit(resource.RLIMIT_AS, limits["memory_bytes"])
    limit(resource.RLIMIT_FSIZE, limits["scratch_bytes"])
    limit(resource.RLIMIT_NOFILE, limits["open_files"])
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_MEMLOCK, 0)
    changed_user = config["change_user"] and drop_user(uid)
    if config["namespaces"] and not changed_user:
        unshare(NEWUSER)  # the kernel counts processes per user *and* user namespace
    if config["namespaces"] or changed_user:
        limit(resource.RLIMIT_NPROC, limits["processes"])
    elif not config["seccomp"]:
        limit(resource.RLIMIT_NPROC, config["busy"] + limits["processes"])
    if not config["namespaces"]:
        die_with_parent()  # after the change of user, which clears the setting
    if config["seccomp"]:  # no capability is left: version 3 of the header, three empty sets of 64 bits
        _check(libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()), "capset")
    if config["landlock"]:
        landlock.apply([*config["trees"], *DEVICES], [scratch, os.devnull])
    if config["metered"]:
        hand_over(seccomp.listen())
    if config["seccomp"]:
        forks = config["namespaces"] and limits["processes"] > 1
        seccomp.apply(forks=forks, private_pids=config["namespaces"], metered=config["metered"])
