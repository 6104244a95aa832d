"""Attempts to get out. Each snippet must be refused, or find nothing, on every rung that claims to isolate."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.tool_pools import LIMITS, use

from turnwise.tools import PythonTool, SandboxSession

ROOT = str(Path(__file__).resolve().parents[2])
CTYPES = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"


def refused(session: SandboxSession, code: str) -> None:
    result = session.run(code)
    assert not result.ok, result.output
    assert "rror" in result.output, result.output  # socket.gaierror is lower case


@pytest.mark.parametrize("path", ["/etc/passwd", "/etc/shadow", "/proc/1/environ", "/proc/self/mem", "/proc/self/maps",
                                  __file__, f"{ROOT}/pyproject.toml", "/sys/kernel/notes", "/dev/mem"])  # fmt: skip
def test_files_are_unreadable(jail: SandboxSession, path: str) -> None:
    refused(jail, f"open({path!r}, 'rb').read(1)")


@pytest.mark.parametrize("path", ["/", "/root", "/home", "/etc", "/proc", "/sys", "/var", "/dev", "/tmp/..", ROOT])
def test_folders_are_unlistable(jail: SandboxSession, path: str) -> None:
    if path in ("/", "/tmp/..", "/dev", "/etc", "/root", ROOT) and not jail._pool._zygote.landlock:
        pytest.skip("without Landlock the bare folders that lead to the interpreter can be listed")
    result = jail.run(f"import os; os.listdir({path!r})")
    assert not result.ok or result.output == "[]", result.output


def test_nothing_can_be_written_outside_scratch(jail: SandboxSession) -> None:
    for path in ("/x", "/usr/x", "/usr/lib/x", "/etc/x", "/dev/x", "/dev/shm/x", "/proc/x", "/var/tmp/x", f"{ROOT}/x"):
        refused(jail, f"open({path!r}, 'w')")
    refused(jail, "import os; os.remove(os.__file__)")
    refused(jail, "import os; os.chmod(os.__file__, 0o777)")
    refused(jail, "import os; os.symlink('/etc/passwd', 'l'); open('l')")
    refused(jail, "import os; os.link(os.__file__, 'hard')")
    assert jail.run("open('mine', 'w').write('ok'); open('mine').read()").output == "'ok'"
    assert not Path(f"{ROOT}/x").exists()


def test_no_network(jail: SandboxSession) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        refused(jail, f"import socket; socket.create_connection(('127.0.0.1', {port}), 0.2)")
    for family in ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"):
        refused(jail, f"import socket; socket.socket(socket.{family})")
    refused(jail, "import socket; socket.getaddrinfo('localhost', 80)")
    assert jail.run("import asyncio; asyncio.run(asyncio.sleep(0, 5))").output == "5"


def test_no_host_process_can_be_signalled(jail: SandboxSession) -> None:
    for pid in (os.getpid(), os.getppid(), -1):
        refused(jail, f"import os; os.kill({pid}, 0)")
    refused(jail, f"import fcntl; fcntl.fcntl(3, fcntl.F_SETOWN, {os.getpid()})")
    refused(jail, f"import resource; resource.prlimit({os.getpid()}, resource.RLIMIT_CPU)")


@pytest.mark.parametrize("call", ["ptrace(16, 1, 0, 0)", "unshare(0x10000000)", "unshare(0x20000)", "setns(3, 0)",
                                  "mount(b'none', b'/tmp', b'tmpfs', 0, None)", "chroot(b'/tmp')",
                                  "umount2(b'/proc', 2)", "memfd_create(b'm', 0)", "shmget(0, 4096, 0o1600)",
                                  "setuid(0)", "sethostname(b'x', 1)", "syscall(425, 1, None)"])  # fmt: skip
def test_system_calls_are_refused(jail: SandboxSession, call: str) -> None:
    assert jail.run(f"{CTYPES}libc.{call}").output == "-1"


def test_no_new_namespace_by_clone(jail: SandboxSession) -> None:
    number = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
    assert jail.run(f"{CTYPES}libc.syscall({number}, 0x10000000 | 17, 0, 0, 0, 0)").output == "-1"
    assert jail.run(f"{CTYPES}libc.syscall(435, None, 0)").output == "-1"


def test_no_capabilities_and_no_root(jail: SandboxSession) -> None:
    assert jail.run("import os; 0 in (os.getuid(), os.geteuid(), os.getgid())").output == "False"
    if jail._pool.isolation == "landlock":  # it cannot ask: the host looks at the process
        status = Path(f"/proc/{jail.run('os.getpid()').output}/status").read_text()
        assert "CapEff:\t0000000000000000" in status and "CapPrm:\t0000000000000000" in status
        return
    header = "h = (ctypes.c_uint32 * 2)(0x20080522, 0); d = (ctypes.c_uint32 * 6)()\n"
    assert jail.run(f"{CTYPES}{header}libc.capget(h, d), sum(d)").output == "(0, 0)"
    assert jail.run(f"{CTYPES}libc.prctl(39, 0, 0, 0, 0)").output == "1"  # no new privileges


def test_the_environment_is_empty_of_the_host(jail: SandboxSession, monkeypatch: pytest.MonkeyPatch) -> None:
    names = set(eval(jail.run("import os; sorted(os.environ)").output))
    assert names <= {"PATH", "LANG", "PYTHONHASHSEED", "PYTHONUTF8", "PWD", "HOME", "TMPDIR"}
    assert ROOT not in jail.run("import sys; sys.path, sys.argv, sys.executable, os.environ.values()").output


def test_no_inherited_descriptor(session: SandboxSession) -> None:
    handle = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(handle, True)
    code = (
        "import os\ndef there(n):\n  try: return bool(os.fstat(n))\n  except OSError: return False\n"
        "[n for n in range(4096) if there(n)]"
    )
    found = eval(session.run(code).output)
    os.close(handle)
    assert found == [0, 1, 2, 3, 4]  # null, output twice, the channel, the output again


def test_limits_cannot_be_raised(session: SandboxSession) -> None:
    code = "import resource as r\nr.setrlimit(r.RLIMIT_{0}, (r.RLIM_INFINITY, r.RLIM_INFINITY))"
    for which in ("AS", "NOFILE", "FSIZE", "CPU"):
        refused(session, code.format(which))


@pytest.mark.parametrize("name", ["bubblewrap", "namespaces"])
def test_namespaces_hold_on_a_kernel_without_landlock(name: str) -> None:
    own = PythonTool(LIMITS, isolation=use(name).isolation)
    own._candidates = (replace(own._candidates[0], landlock=False),)
    with own, own.open() as session:
        for path in ("/etc/passwd", "/proc/1/environ", __file__):
            refused(session, f"open({path!r})")
        for path in ("/x", "/usr/lib/x", "/dev/x", "/etc/x", "/proc/x"):
            refused(session, f"open({path!r}, 'w')")
        assert "Landlock" not in own.describe()


def test_neighbours_are_invisible(jail: SandboxSession) -> None:
    with jail._pool.open() as other:
        other.run("secret = 'abc'; open('secret', 'w').write('abc')")
        refused(jail, "import os; [open(f'{os.getcwd()}/../{n}/secret').read() for n in range(500)]")
        pid = other.run("import os; os.getpid()").output
        if pid != "1":  # a shared process namespace: the neighbour's number is known, and useless
            refused(jail, f"import os; os.kill({pid}, 9)")
        assert other.run("secret").output == "'abc'"


def test_the_interpreter_is_no_virtual_environment(jail: SandboxSession) -> None:
    assert not jail.run("import torch").ok
    assert sys.prefix not in jail.run("import sys; sys.prefix").output or sys.prefix == sys.base_prefix
