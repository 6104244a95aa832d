"""System calls by an allow list: what both filters answer, on both architectures, and what ordinary code needs of them."""

# ruff: noqa: E501 (lines of code for a session are data)
from __future__ import annotations

import errno

import pytest
from support.filters import verdict, word
from support.tool_pools import use

from turnwise.tools import SandboxSession
from turnwise.tools.guest import seccomp

MACHINES = list(seccomp.MACHINES)
# x86_64, aarch64: calls that no session may make, whichever rung it has
FORBIDDEN = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "pidfd_getfd": (438, 438), "setpriority": (141, 140),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "pivot_root": (155, 41), "chroot": (161, 51),
    "move_mount": (429, 429), "fsopen": (430, 430), "socket": (41, 198), "connect": (42, 203), "bind": (49, 200),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "keyctl": (250, 219), "open_by_handle_at": (304, 265), "personality": (135, 92), "io_setup": (206, 0),
    "memfd_create": (319, 279), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "inotify_init1": (294, 26), "fchmod": (91, 52), "fchmodat": (268, 53), "fchown": (93, 55), "utimensat": (280, 88),
    "mknodat": (259, 33), "truncate": (76, 45), "init_module": (175, 105), "kexec_load": (246, 104), "reboot": (169, 142),
    "swapon": (167, 224), "syslog": (103, 116), "clock_settime": (227, 112), "sethostname": (170, 161), "sync": (162, 81),
    "seccomp": (317, 277), "landlock_restrict_self": (446, 446), "sendmmsg": (307, 269), "setresuid": (117, 147),
    "vmsplice": (278, 75), "mlock": (149, 228), "mincore": (27, 232), "ioprio_get": (252, 31), "getpriority": (140, 141),
    "sched_getattr": (315, 275), "name_to_handle_at": (303, 264), "remap_file_pages": (216, 234), "capset": (126, 91),
}  # fmt: skip


def answers(machine: str, monkeypatch: pytest.MonkeyPatch, **settings: bool):
    monkeypatch.setattr("platform.machine", lambda: machine)
    column, arch = seccomp.MACHINES[machine]
    settings = {"forks": True, "private_pids": True, "metered": False} | settings
    program = seccomp.program(**settings)
    return lambda row, *arguments: word(
        verdict(program, arch, row if isinstance(row, int) else row[column], *arguments)
    )


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_not_named_is_refused(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a list of what is denied, a call that nobody had thought of was allowed."""
    of = answers(machine, monkeypatch)
    for name, row in FORBIDDEN.items():
        assert of(row) == errno.EPERM, name
    assert sum(of(number) == "allowed" for number in range(1 << 10)) < 180
    assert {of(number) for number in (463, 500, 9999, 1 << 30, -1)} == {errno.ENOSYS}
    assert of(seccomp.CLONE3) == of(seccomp.OPENAT2) == errno.ENOSYS
    other = next(arch for name, (_, arch) in seccomp.MACHINES.items() if name != machine)
    program = seccomp.program(forks=True, private_pids=True, metered=False)
    assert word(verdict(program, other, 0)) == "killed"


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_are_filtered_by_their_arguments(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of, session = answers(machine, monkeypatch), os_getpid(monkeypatch)
    lone = answers(machine, monkeypatch, forks=False, private_pids=False, metered=True)
    assert of(seccomp.CLONE, 17) == "allowed" and of(seccomp.CLONE, 0x10000000 | 17) == errno.EPERM
    assert lone(seccomp.CLONE, 17) == errno.EPERM and lone(seccomp.CLONE, 0x3D0F00) == "allowed"
    assert lone(seccomp.CLONE, 0x3D0F00 & ~seccomp.SHARED_FILES) == errno.EPERM  # descriptors of its own
    assert of(seccomp.CLOSE_RANGE, 3, 9, 0) == "allowed" and lone(seccomp.CLOSE_RANGE, 3, 9, 2) == errno.EPERM
    assert of(seccomp.OPENAT, -100, 0, 0o1000) == errno.EPERM and of(seccomp.OPENAT, -100, 0, 0o1101) == "allowed"
    assert of(seccomp.FCNTL, 0, 1030) == "allowed" and of(seccomp.FCNTL, 0, 8) == errno.EPERM
    assert of(seccomp.FCNTL, 0, 6) == of(seccomp.FLOCK, 0, 2) == 0  # nothing is done
    assert of(seccomp.IOCTL, 0, 0x5401) == "allowed" and of(seccomp.IOCTL, 0, 0x8901) == errno.ENOTTY
    assert of(seccomp.SOCKETPAIR, 1, 1) == "allowed" and of(seccomp.SOCKETPAIR, 1, 2) == errno.EPERM
    assert of(seccomp.SETSOCKOPT, 0, 1, 26) == errno.EPERM and of(seccomp.PRCTL, 1) == errno.EPERM
    assert of(seccomp.RENAMEAT2, 0, 0, 0, 0, 2) == "allowed" and of(seccomp.RENAMEAT2, 0, 0, 0, 0, 4) == errno.EPERM
    assert of(seccomp.MMAP, 0, 0, 3, 1) == "allowed" and lone(seccomp.MMAP, 0, 0, 3, 1) == errno.ENODEV
    assert lone(seccomp.MMAP, 0, 0, 3, 0x21) == lone(seccomp.MMAP, 0, 0, 3, 2) == "allowed"
    for row in seccomp.PROCESSES.values():
        if row[seccomp.MACHINES[machine][0]] is not None:
            assert of(row, 1) == lone(row, session) == "allowed" and lone(row, 1) == errno.EPERM
    for row in (*seccomp.UNMETERED.values(), (59, 221)):
        assert of(row) == "allowed" and lone(row) == errno.EPERM
    assert of(seccomp.ATTRIBUTES["getxattr"]) == errno.ENOTSUP


def os_getpid(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("os.getpid", lambda: 77)
    return 77


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_that_take_space_are_asked_for(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    (column, arch), program = seccomp.MACHINES[machine], seccomp.questions()
    asked = {number for number in range(500) if word(verdict(program, arch, number)) == "asked"}
    assert asked == {row[column] for row in seccomp.METERED.values()} - {None}
    number = seccomp.OPENAT[column]
    flags = {0: "allowed", 0o2: "allowed", 0o101: "asked", 0o20200002: "asked"}
    assert {flag: word(verdict(program, arch, number, -100, 0, flag)) for flag in flags} == flags


# --------------------------------------------------------------------------- ordinary code

ORDINARY = {
    "copies": "import shutil; open('a', 'w').write('x'); shutil.copy('a', 'b') if 0 else shutil.copyfile('a', 'b'); open('b').read()",
    "asyncio": "import asyncio\nasync def f():\n  await asyncio.sleep(0)\n  return await asyncio.to_thread(lambda: 'x')\nasyncio.run(f())",
    "threads": "from concurrent.futures import ThreadPoolExecutor as P\nwith P(3) as p: s = ''.join(p.map(str, 'x'))\ns",
    "temporary": "import tempfile\nwith tempfile.TemporaryDirectory() as d:\n  open(d + '/f', 'w').write('x'); s = open(d + '/f').read()\ns",
    "data base": "import sqlite3\nfor _ in range(2):\n  c = sqlite3.connect('d'); c.execute('create table if not exists t(a)')\n"
    "  c.execute('insert into t values (?)', ('x',)); c.commit(); s = c.execute('select max(a) from t').fetchone()[0]; c.close()\ns",
    "private mapping": "import mmap\nopen('m', 'w').write('x')\nwith open('m') as f: m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)\nm[:].decode()",
    "archives": "import zipfile\nwith zipfile.ZipFile('z', 'w') as z: z.writestr('f', 'x')\nzipfile.ZipFile('z').read('f').decode()",
    "locks": "import fcntl\nwith open('l', 'w') as f: fcntl.lockf(f, fcntl.LOCK_EX); fcntl.flock(f, fcntl.LOCK_EX)\n'x'",
    "folders": "import os, glob\nos.makedirs('p/q'); open('p/q/x', 'w').close(); os.rename('p/q/x', 'p/x'); os.rmdir('p/q'); os.path.basename(glob.glob('p/*')[0])",
    "time": "import signal, time\ndef f(*_): raise TimeoutError\nsignal.signal(signal.SIGALRM, f); signal.setitimer(signal.ITIMER_REAL, 0.01)\n"
    "try: time.sleep(3)\nexcept TimeoutError: s = 'x'\ns",
    "terminal": "import os; 'x' if not os.isatty(1) and os.cpu_count() and os.get_inheritable(1) else ''",
    "pairs": "import socket; a, b = socket.socketpair(); a.settimeout(1); a.sendall(b'x'); b.recv(9).decode()",
}  # fmt: skip


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_code_works_on_every_rung(session: SandboxSession, name: str) -> None:
    assert session.run(ORDINARY[name]).output == "'x'"


@pytest.mark.parametrize("name", ["bubblewrap", "namespaces"])
def test_programs_of_the_system_work(name: str) -> None:
    code = (
        "import subprocess as s\nopen('f', 'w').write('b\\na\\n')\n"
        "s.run('cp f g; ls -l g > /dev/null && sort g | head -1; mv g h; rm h; sh -c \"echo $((1 + 1))\"; sleep 0.01 & wait',"
        " shell=True, capture_output=True, text=True)"
    )
    with use(name).open() as session:
        assert "stdout='a\\n2\\n', stderr=''" in session.run(code).output
