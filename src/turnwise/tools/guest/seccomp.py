"""The system calls allowed to untrusted code, as seccomp BPF filters for this process.

An allow list: what it does not name is refused, in this kernel and in any later one. A second filter, for sessions that share
a file system with the host, asks a supervisor before each call that can take space (``meter`` answers). Knows system-call
numbers and nothing about files, limits or Python sessions.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

Numbers = dict[str, tuple[int | None, int | None]]  # on x86_64, on aarch64 (None: that architecture lacks the call)

ALLOWED: Numbers = {
    # files and folders
    "read": (0, 63), "pread64": (17, 67), "readv": (19, 65), "preadv": (295, 69), "preadv2": (327, 286),
    "close": (3, 57), "fstat": (5, 80), "newfstatat": (262, 79), "statx": (332, 291), "stat": (4, None),
    "lstat": (6, None), "lseek": (8, 62), "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439),
    "readlink": (89, None), "readlinkat": (267, 78), "getdents": (78, None), "getdents64": (217, 61),
    "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "rename": (82, None), "renameat": (264, 38),
    "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35), "statfs": (137, 43),
    "fstatfs": (138, 44), "ftruncate": (77, 46), "umask": (95, 166), "fsync": (74, 82), "fdatasync": (75, 83),
    "fadvise64": (221, 223), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24),
    # waiting, pipes and pairs
    "pipe": (22, None), "pipe2": (293, 59), "poll": (7, None), "ppoll": (271, 73), "select": (23, None),
    "pselect6": (270, 72), "epoll_create": (213, None), "epoll_create1": (291, 20), "epoll_ctl": (233, 21),
    "epoll_wait": (232, None), "epoll_pwait": (281, 22), "epoll_pwait2": (441, 441), "eventfd": (284, None),
    "eventfd2": (290, 19), "timerfd_create": (283, 85), "timerfd_settime": (286, 86), "timerfd_gettime": (287, 87),
    "sendto": (44, 206), "recvfrom": (45, 207), "recvmsg": (47, 212), "shutdown": (48, 210), "getsockname": (51, 204),
    "getpeername": (52, 205), "getsockopt": (55, 209),
    # memory
    "brk": (12, 214), "munmap": (11, 215), "mremap": (25, 216), "mprotect": (10, 226), "madvise": (28, 233),
    "msync": (26, 227), "membarrier": (324, 283),
    # threads and signals
    "futex": (202, 98), "futex_waitv": (449, 449), "set_robust_list": (273, 99),
    "set_tid_address": (218, 96), "rseq": (334, 293), "gettid": (186, 178), "exit": (60, 93), "exit_group": (231, 94),
    "restart_syscall": (219, 128), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136), "rt_sigsuspend": (130, 133), "rt_sigtimedwait": (128, 137),
    "sigaltstack": (131, 132), "pause": (34, None), "alarm": (37, None), "getitimer": (36, 102),
    "setitimer": (38, 103), "sched_yield": (24, 124), "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126), "arch_prctl": (158, None), "wait4": (61, 260), "waitid": (247, 95),
    # what a process may know
    "getpid": (39, 172), "getppid": (110, 173), "getpgrp": (111, None), "getuid": (102, 174), "geteuid": (107, 175),
    "getgid": (104, 176), "getegid": (108, 177), "getresuid": (118, 148), "getresgid": (120, 150),
    "getgroups": (115, 158), "uname": (63, 160), "sysinfo": (99, 179), "getrlimit": (97, 163),
    "setrlimit": (160, 164), "getrusage": (98, 165), "times": (100, 153), "time": (201, None),
    "gettimeofday": (96, 169), "clock_gettime": (228, 113), "clock_getres": (229, 114), "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115), "getcpu": (309, 168), "getrandom": (318, 278), "setsid": (112, 157),
}  # fmt: skip
FORKS: Numbers = {
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
}  # fmt: skip
# the first argument is a process: outside a PID namespace only 0 and itself, or a session could look for others
PROCESSES: Numbers = {
    "setpgid": (109, 154), "getpgid": (121, 155), "getsid": (124, 156), "sched_getaffinity": (204, 123),
    "sched_setaffinity": (203, 122), "sched_getparam": (143, 121), "sched_getscheduler": (145, 120),
    "prlimit64": (302, 261), "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "get_robust_list": (274, 100),
}  # fmt: skip
# in a PID namespace only: the process that these name is in memory, or a descriptor
PRIVATE: Numbers = {"pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "capget": (125, 90)}
# take space in a file system: a supervisor is asked for the first, whose sizes are arguments, and the others are refused where
# there is one. Their sizes are in memory, where another thread can change them, or are no bound; a descriptor that travels
# in a message holds a file that nobody can see
METERED: Numbers = {
    "write": (1, 64), "pwrite64": (18, 68), "mkdir": (83, None), "mkdirat": (258, 34), "symlink": (88, None),
    "symlinkat": (266, 36), "link": (86, None), "linkat": (265, 37),
}  # fmt: skip
UNMETERED: Numbers = {
    "writev": (20, 66), "pwritev": (296, 70), "pwritev2": (328, 287), "sendfile": (40, 71), "splice": (275, 76),
    "tee": (276, 77), "copy_file_range": (326, 285), "fallocate": (285, 47), "sendmsg": (46, 211),
}  # fmt: skip
# answered "not supported": ls and shutil go on without them
ATTRIBUTES: Numbers = {
    "getxattr": (191, 8), "lgetxattr": (192, 9), "fgetxattr": (193, 10), "listxattr": (194, 11), "llistxattr": (195, 12),
    "flistxattr": (196, 13), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16),
}  # fmt: skip
CLONE, CLONE3, PRCTL, MMAP, RENAMEAT2, CLOSE_RANGE = (56, 220), (435, 435), (157, 167), (9, 222), (316, 276), (436, 436)
FCNTL, FLOCK, IOCTL, SOCKETPAIR, SETSOCKOPT, SECCOMP = (72, 25), (73, 32), (16, 29), (53, 199), (54, 208), (317, 277)
OPEN, OPENAT, OPENAT2 = (2, None), (257, 56), (437, 437)
NEWEST_SYSCALL = (
    462  # higher numbers were added after these lists were written: "not implemented", so that libc falls back
)

NEW_NAMESPACE, THREAD, SHARED_FILES = 0x7E020000, 0x10000, 0x400
FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030, 1032)  # duplicate, flags of descriptor and file, size of a pipe
LOCK_COMMANDS = (5, 6, 7, 36, 37, 38)  # of a process and of an open file: see, set, wait
IOCTLS = (
    0x5401,
    0x5413,
    0x541B,
    0x5421,
    0x5450,
    0x5451,
)  # is it a terminal, bytes that wait, non-blocking, close on exec
# name, a mapping's name, no new privileges, which capabilities and filter there are
PRCTLS = (15, 16, 0x53564D41, 38, 39, 21, 23)
SOCKET_OPTIONS = (2, 7, 8, 9, 13, 20, 21)  # reuse, buffers, keep alive, linger, time-outs: no filter can be attached
AF_UNIX, CONNECTIONLESS = 1, 2  # the bit that datagram and raw sockets have, and streams and sequenced packets have not
SHARED, ANONYMOUS, WHITEOUT = 1, 0x20, 4
ACCESS_AND_TRUNCATE, TRUNCATE = 0o1003, 0o1000  # O_ACCMODE | O_TRUNC, and opened for reading only
CREATE = 0o20000100  # O_CREAT, and the bit of O_TMPFILE
PR_SET_NO_NEW_PRIVS, SET_FILTER, NEW_LISTENER = 38, 1, 8
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH

ALLOW, KILL, ERRNO, NOTIFY = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
LOAD, EQUAL, GREATER, AT_LEAST, ANY_BIT, AND, RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x54, 0x06

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


def supported() -> bool:
    return platform.machine() in MACHINES


def _rule(number: int | None, *body: Instruction) -> list[Instruction]:
    """What happens at one call; nothing where the architecture lacks it."""
    return [] if number is None else [(EQUAL, 0, len(body), number), *body]


def _argument(
    number: int | None, index: int, tests: list[tuple[int, int, int]], otherwise: int, mask: int = 0xFFFFFFFF
) -> list[Instruction]:
    """Filter one call by an argument: the first test ``(code, constant, verdict)`` that holds on its low word decides."""
    body: list[Instruction] = [(LOAD, 0, 0, 16 + 8 * index), (AND, 0, 0, mask)]
    for code, constant, verdict in tests:
        body += [(code, 0, 1, constant), (RETURN, 0, 0, verdict)]
    return _rule(number, *body, (RETURN, 0, 0, otherwise))


def _numbers(column: int, *tables: Numbers) -> list[int]:
    return sorted({number for table in tables for row in table.values() if (number := row[column]) is not None})


def _allow(numbers: list[int]) -> list[Instruction]:
    """Neighbouring numbers in one test."""
    out: list[Instruction] = []
    for first in (n for n in numbers if n - 1 not in numbers):
        last = next(n for n in range(first, first + len(numbers)) if n + 1 not in numbers)
        out += [(AT_LEAST, 0, 2, first), (GREATER, 1, 0, last), (RETURN, 0, 0, ALLOW)]
    return out


def _header(arch: int) -> list[Instruction]:
    """The number of the call, after another machine's calls (32 bits) have ended the process."""
    return [(LOAD, 0, 0, 4), (EQUAL, 1, 0, arch), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]


def program(*, forks: bool, private_pids: bool, metered: bool) -> list[Instruction]:
    """``forks``: allow new processes. ``private_pids``: in a PID namespace, where numbers of processes need no check.
    ``metered``: the other filter is there, and what it cannot measure is refused."""
    column, arch = MACHINES[platform.machine()]
    deny, absent = ERRNO | errno.EPERM, ERRNO | errno.ENOSYS
    out = [*_header(arch), (GREATER, 0, 1, NEWEST_SYSCALL), (RETURN, 0, 0, absent)]
    # a filter cannot read the flags of these, which are in memory: libc falls back to clone and openat
    out += _rule(CLONE3[column], (RETURN, 0, 0, absent)) + _rule(OPENAT2[column], (RETURN, 0, 0, absent))
    if forks:
        out += _argument(CLONE[column], 0, [(ANY_BIT, NEW_NAMESPACE, deny)], ALLOW)
    else:  # a thread with descriptors of its own would hold files that the supervisor does not see
        thread = THREAD | SHARED_FILES
        out += _argument(CLONE[column], 0, [(EQUAL, thread, ALLOW)], deny, mask=NEW_NAMESPACE | thread)
    out += _argument(CLOSE_RANGE[column], 2, [(EQUAL, 0, ALLOW), (EQUAL, 4, ALLOW)], deny)
    # opening for reading with O_TRUNC empties the file, and older versions of Landlock allow it
    for number, index in ((OPEN[column], 1), (OPENAT[column], 2)):
        out += _argument(number, index, [(EQUAL, TRUNCATE, deny)], ALLOW, mask=ACCESS_AND_TRUNCATE)
    # locks of files do nothing and succeed: a session has nobody to lock out, and one that others see is a sign to them
    locks = [(EQUAL, command, ERRNO) for command in LOCK_COMMANDS]
    out += _rule(FLOCK[column], (RETURN, 0, 0, ERRNO))
    out += _argument(FCNTL[column], 1, [*((EQUAL, command, ALLOW) for command in FCNTL_COMMANDS), *locks], deny)
    out += _argument(IOCTL[column], 1, [(EQUAL, command, ALLOW) for command in IOCTLS], ERRNO | errno.ENOTTY)
    out += _argument(PRCTL[column], 0, [(EQUAL, command, ALLOW) for command in PRCTLS], deny)
    out += _argument(SETSOCKOPT[column], 2, [(EQUAL, name, ALLOW) for name in SOCKET_OPTIONS], deny)
    # only connected pairs of local sockets: a datagram socket can send to any socket path or abstract name
    pair = [(LOAD, 0, 0, 16), (EQUAL, 1, 0, AF_UNIX), (RETURN, 0, 0, deny)]
    pair += [(LOAD, 0, 0, 24), (ANY_BIT, 0, 1, CONNECTIONLESS), (RETURN, 0, 0, deny), (RETURN, 0, 0, ALLOW)]
    out += _rule(SOCKETPAIR[column], *pair)
    out += _argument(RENAMEAT2[column], 4, [(AT_LEAST, WHITEOUT, deny)], ALLOW)  # it would leave a device behind
    # a mapping that is shared with its file fills it without a call
    mapping = [(EQUAL, SHARED, ERRNO | errno.ENODEV)] if metered else []
    out += _argument(MMAP[column], 3, mapping, ALLOW, mask=SHARED | ANONYMOUS)
    for number in _numbers(column, ATTRIBUTES):
        out += _rule(number, (RETURN, 0, 0, ERRNO | errno.ENOTSUP))
    tables = [ALLOWED, METERED, *([] if metered else [UNMETERED]), *([FORKS] if forks else [])]
    if private_pids:
        tables += [PROCESSES, PRIVATE]
    else:
        for number in _numbers(column, PROCESSES):
            out += _argument(number, 0, [(EQUAL, 0, ALLOW), (EQUAL, os.getpid(), ALLOW)], deny)
    return [*out, *_allow(_numbers(column, *tables)), (RETURN, 0, 0, deny)]


def questions() -> list[Instruction]:
    """The second filter: whoever holds its listener is asked before a call that takes space."""
    column, arch = MACHINES[platform.machine()]
    out = _header(arch)
    for number in _numbers(column, METERED):
        out += _rule(number, (RETURN, 0, 0, NOTIFY))
    for row, index in ((OPEN, 1), (OPENAT, 2)):
        out += _argument(row[column], index, [(ANY_BIT, CREATE, NOTIFY)], ALLOW)
    return [*out, (RETURN, 0, 0, ALLOW)]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def apply(*, forks: bool, private_pids: bool, metered: bool) -> None:
    """Install the allow list on this process permanently."""
    _install(program(forks=forks, private_pids=private_pids, metered=metered), listen=False)


def listen() -> int:
    """Install the second filter permanently; the descriptor that asks. While nobody reads it, such a call waits."""
    return _install(questions(), listen=True)


def _install(code: list[Instruction], *, listen: bool) -> int:
    packed = b"".join(struct.pack("HBBI", *instruction) for instruction in code)
    libc = ctypes.CDLL(None, use_errno=True)
    filters = ctypes.byref(_Program(len(code), packed))
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    number = SECCOMP[MACHINES[platform.machine()][0]]
    handle: int = libc.syscall(number, SET_FILTER, NEW_LISTENER if listen else 0, filters)
    if handle < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return handle
