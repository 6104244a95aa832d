"""Landlock: restricts a process permanently to the files it needs. Knows kernel structures, not sessions."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

CREATE, ADD, RESTRICT = 444, 445, 446  # system-call numbers, equal on all architectures
READ_FILE, READ_DIR, EXECUTE, WRITE_FILE, TRUNCATE, IOCTL = 1 << 2, 1 << 3, 1 << 0, 1 << 1, 1 << 14, 1 << 15
RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}  # by ABI version
PR_SET_NO_NEW_PRIVS = 38


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """The ABI version of the kernel's Landlock; 0 without Landlock."""
    return max(0, _libc().syscall(CREATE, None, ctypes.c_size_t(0), 1))


def apply(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Allow only these trees to be opened; deny TCP and, where the kernel can, signals and abstract sockets outward."""
    libc, abi = _libc(), version()
    rights = RIGHTS[min(abi, 5)]
    attributes = struct.pack("QQQ", rights, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = libc.syscall(CREATE, attributes, ctypes.c_size_t(size), 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock")
    for path in readable:
        _allow(libc, ruleset, path, READ_FILE | READ_DIR | EXECUTE)
    for path in writable:
        _allow(libc, ruleset, path, rights)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.syscall(RESTRICT, ruleset, 0):
        raise OSError(ctypes.get_errno(), "landlock")
    os.close(ruleset)


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, rights: int) -> None:
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # it does not exist: nothing to allow
    if not stat.S_ISDIR(os.fstat(handle).st_mode):
        rights &= READ_FILE | EXECUTE | WRITE_FILE | TRUNCATE | IOCTL
    if libc.syscall(ADD, ruleset, 1, struct.pack("=Qi", rights & RIGHTS[min(version(), 5)], handle), 0):
        raise OSError(ctypes.get_errno(), f"landlock: {path}")
    os.close(handle)
