"""The system calls denied to untrusted code, as a seccomp BPF filter for this process.

A deny list over the calls known when it was written; newer call numbers return ENOSYS, so a future kernel cannot widen
what is allowed. Knows system-call numbers and nothing about files, limits or Python sessions.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable

# name: number on x86_64, number on aarch64 (None: that architecture lacks the call)
DENIED_SYSCALLS: dict[str, tuple[int | None, int | None]] = {
    # inspecting or controlling other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "move_pages": (279, 239), "migrate_pages": (256, 238), "process_madvise": (440, 440),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "process_mrelease": (448, 448),
    # new namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "move_mount": (429, 429), "open_tree": (428, 428), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    # sockets of any family; a connected pair stays allowed, because asyncio needs it (see SOCKETPAIR)
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    # large kernel attack surfaces
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "fanotify_init": (300, 262), "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264), "personality": (135, 92), "modify_ldt": (154, None), "io_setup": (206, 0),
    # memory outside the address-space limit, or shared with others: System V objects have guessable numbers
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "shmctl": (31, 195), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187),
    "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192), "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    # signs between sessions, and notice of what others do with files: neither is covered by Landlock
    "flock": (73, 32), "inotify_init": (253, None), "inotify_init1": (294, 26), "inotify_add_watch": (254, 27),
    # Landlock does not cover these, and without a separate user they would affect the host user's files
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "utimensat": (280, 88), "utime": (132, None), "utimes": (235, None), "futimesat": (261, None),
    "mknod": (133, None), "mknodat": (259, 33), "truncate": (76, 45),
    # the whole machine
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443), "syslog": (103, 116),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "sethostname": (170, 161), "setdomainname": (171, 162), "vhangup": (153, 58), "iopl": (172, None),
    "ioperm": (173, None), "sync": (162, 81), "syncfs": (306, 267), "lookup_dcookie": (212, 18),
}  # fmt: skip
FORKS: dict[str, tuple[int | None, int | None]] = {"fork": (57, None), "vfork": (58, None)}
SIGNALS: dict[str, tuple[int | None, int | None]] = {
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}  # fmt: skip
PIDFDS: dict[str, tuple[int | None, int | None]] = {"pidfd_open": (434, 434), "pidfd_send_signal": (424, 424)}
CLONE, CLONE3, PRLIMIT, PRCTL = (56, 220), (435, 435), (302, 261), (157, 167)
FCNTL, IOCTL, SOCKETPAIR, AFFINITY = (72, 25), (16, 29), (53, 199), (203, 122)
OPEN, OPENAT, OPENAT2 = (2, None), (257, 56), (437, 437)
NEWEST_SYSCALL = 462  # higher numbers were added after this list was written

NEW_NAMESPACE, THREAD = 0x7E020000, 0x10000
F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY, FIOSETOWN, SIOCSPGRP = 8, 10, 15, 1024, 1026, 0x8901, 0x8902
AF_UNIX, CONNECTIONLESS = 1, 2  # the bit that datagram and raw sockets have, and streams and sequenced packets have not
ACCESS_AND_TRUNCATE, TRUNCATE = 0o1003, 0o1000  # O_ACCMODE | O_TRUNC, and opened for reading only
FORBIDDEN_FCNTL = (F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY)
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, MODE_FILTER = 1, 38, 22, 2
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, EQUAL, GREATER, ANY_BIT, AND, RETURN = 0x20, 0x15, 0x25, 0x45, 0x54, 0x06

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


def supported() -> bool:
    return platform.machine() in MACHINES


def _rule(number: int | None, *body: Instruction) -> list[Instruction]:
    """What happens at one call; nothing where the architecture lacks it."""
    return [] if number is None else [(EQUAL, 0, len(body), number), *body]


def _deny(number: int, error: int = errno.EPERM) -> list[Instruction]:
    return _rule(number, (RETURN, 0, 0, ERRNO | error))


def _by_argument(number: int, index: int, tests: list[tuple[int, int, int]], otherwise: int) -> list[Instruction]:
    """Filter one call by an argument: the first test ``(code, constant, verdict)`` that holds on its low word decides."""
    body: list[Instruction] = [(LOAD, 0, 0, 16 + 8 * index)]
    for code, constant, verdict in tests:
        body += [(code, 0, 1, constant), (RETURN, 0, 0, verdict)]
    return _rule(number, *body, (RETURN, 0, 0, otherwise))


def _truncating_reads(number: int | None, index: int, deny: int) -> list[Instruction]:
    """Opening for reading with O_TRUNC empties the file, and older versions of Landlock allow it."""
    return _rule(
        number,
        (LOAD, 0, 0, 16 + 8 * index), (AND, 0, 0, ACCESS_AND_TRUNCATE),
        (EQUAL, 0, 1, TRUNCATE), (RETURN, 0, 0, deny), (RETURN, 0, 0, ALLOW),
    )  # fmt: skip


def _numbers(table: dict[str, tuple[int | None, int | None]], column: int) -> Iterable[int]:
    return (number for row in table.values() if (number := row[column]) is not None)


def program(*, forks: bool, private_pids: bool) -> list[Instruction]:
    """``forks``: allow new processes. ``private_pids``: in a PID namespace, where signals need no check."""
    column, arch = MACHINES[platform.machine()]
    deny = ERRNO | errno.EPERM
    out: list[Instruction] = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, arch), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    out += [(GREATER, 0, 1, NEWEST_SYSCALL), (RETURN, 0, 0, ERRNO | errno.ENOSYS)]
    # a filter cannot read the flags of these, which are in memory: libc falls back to clone and openat
    out += _deny(CLONE3[column], errno.ENOSYS) + _deny(OPENAT2[column], errno.ENOSYS)
    for number in _numbers(DENIED_SYSCALLS, column):
        out += _deny(number)
    clone = [(ANY_BIT, NEW_NAMESPACE, deny)] + ([] if forks else [(ANY_BIT, THREAD, ALLOW)])
    out += _by_argument(CLONE[column], 0, clone, ALLOW if forks else deny)
    out += _by_argument(PRLIMIT[column], 0, [(EQUAL, 0, ALLOW), (EQUAL, os.getpid(), ALLOW)], deny)
    out += _by_argument(PRCTL[column], 0, [(EQUAL, PR_SET_PDEATHSIG, deny)], ALLOW)
    # these calls make another process receive signals from a descriptor
    out += _by_argument(FCNTL[column], 1, [(EQUAL, cmd, deny) for cmd in FORBIDDEN_FCNTL], ALLOW)
    out += _by_argument(IOCTL[column], 1, [(EQUAL, cmd, deny) for cmd in (FIOSETOWN, SIOCSPGRP)], ALLOW)
    # only connected pairs of local sockets: a datagram socket can send to any socket path or abstract name
    pair = [(LOAD, 0, 0, 16), (EQUAL, 1, 0, AF_UNIX), (RETURN, 0, 0, deny)]
    pair += [(LOAD, 0, 0, 24), (ANY_BIT, 0, 1, CONNECTIONLESS), (RETURN, 0, 0, deny), (RETURN, 0, 0, ALLOW)]
    out += _rule(SOCKETPAIR[column], *pair)
    out += _by_argument(AFFINITY[column], 0, [(EQUAL, 0, ALLOW), (EQUAL, os.getpid(), ALLOW)], deny)
    out += _truncating_reads(OPEN[column], 1, deny) + _truncating_reads(OPENAT[column], 2, deny)
    if not forks:
        for number in _numbers(FORKS, column):
            out += _deny(number)
    if not private_pids:
        for number in _numbers(SIGNALS, column):
            out += _by_argument(number, 0, [(EQUAL, os.getpid(), ALLOW)], deny)
        for number in _numbers(PIDFDS, column):
            out += _deny(number)
    return [*out, (RETURN, 0, 0, ALLOW)]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def apply(*, forks: bool, private_pids: bool) -> None:
    """Install the filter on this process permanently."""
    code = program(forks=forks, private_pids=private_pids)
    packed = b"".join(struct.pack("HBBI", *instruction) for instruction in code)
    libc = ctypes.CDLL(None, use_errno=True)
    filters = _Program(len(code), packed)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(filters)):
        raise OSError(ctypes.get_errno(), "seccomp")
