"""Attacks on a Python session, as data. ``attack_run.run_attacks(rung)`` tries them and says what came out.

The code of an attack sets ``got`` to something true when it has reached what it must not reach. Whatever it does, the host
also checks its own side: files, sockets, shared memory, a process, the neighbours. Words in braces are replaced by what the
host prepared (``attack_run.Target``). No attack harms the machine where the isolation fails: signals have number 0, calls
that change the machine get arguments that the kernel refuses after the permission check.

Kinds: files, writes, network, processes, calls, privileges, neighbours, exhaustion, hang, protocol, escapes.
"""

# ruff: noqa: E501 (lines of attacks are data)
from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.filters import verdict, word

from turnwise.tools.guest import seccomp

COLUMN = {"x86_64": 0, "aarch64": 1}.get(platform.machine(), 0)


@dataclass(frozen=True)
class Attack:
    """``Attack("files", "symbolic link", "os.symlink('/etc/shadow', 'l'); got = open('l').read()")``"""

    kind: str
    name: str
    code: str
    slow: bool = False  # it runs until a limit ends it


def all_attacks() -> tuple[Attack, ...]:
    makers = (_reads, _tricks, _writes, _network, _processes, _calls, _denied_calls, _privileges, _neighbours, _exhaustion,
              _hangs, _protocol, _escapes)  # fmt: skip
    return tuple(attack for make in makers for attack in make())


# ------------------------------------------------------------------------- files

READABLE = (
    "{secret}", "{root}/pyproject.toml", "/etc/passwd", "/etc/shadow", "/etc/hosts", "/etc/hostname", "/etc/ssl/private",
    "/root/.bashrc", "/root/.ssh/id_rsa", "/root/.netrc", "/proc/1/environ", "/proc/1/cmdline", "/proc/{host}/environ",
    "/proc/{host}/maps", "/proc/{host}/mem", "/proc/{host}/cmdline", "/proc/{host}/status", "/proc/self/mem",
    "/proc/self/maps", "/proc/self/environ", "/proc/self/mountinfo", "/proc/self/cgroup", "/proc/version",
    "/proc/cpuinfo", "/proc/net/tcp", "/proc/sys/kernel/hostname", "/proc/kallsyms", "/proc/kcore", "/proc/mounts",
    "/sys/kernel/notes", "/sys/class/net", "/sys/fs/cgroup", "/dev/mem", "/dev/kmsg", "/dev/sda", "/dev/vda", "/dev/tty",
    "/dev/ptmx", "/dev/fuse", "/dev/kvm", "/dev/net/tun", "/dev/shm/{name}", "/var/log/syslog", "/var/run/docker.sock",
    "/run/systemd", "/var/run/secrets/kubernetes.io/serviceaccount/token", "/home",
)  # fmt: skip


def _reads() -> Iterator[Attack]:
    for path in READABLE:
        code = f"p = {path!r}\ngot = os.listdir(p) if os.path.isdir(p) else open(p, 'rb').read(64)"
        yield Attack("files", f"read {path}", code)


TRICKS = {
    "symbolic link": "os.symlink('{secret}', 'l'); got = open('l').read()",
    "link to the root": "os.symlink('/', 'r'); got = open('r{secret}').read()",
    "hard link": "os.link('{secret}', 'h'); got = open('h').read()",
    "hard link of a readable file": "os.link(os.__file__, 'h'); got = os.stat('h').st_nlink > 1",
    "dot dot": "got = open('../' * 40 + '{secret}').read()",
    "proc root": "got = open('/proc/self/root{secret}').read()",
    "proc root of 1": "got = open('/proc/1/root{secret}').read()",
    "proc cwd of the host": "got = os.listdir('/proc/{host}/cwd')",
    "proc fd of the host": "got = os.listdir('/proc/{host}/fd')",
    "path descriptor": "d = os.open('/', os.O_PATH); got = open(os.open('{secret}'[1:], os.O_RDONLY, dir_fd=d)).read()",
    "path descriptor opened again": "d = os.open('{secret}', os.O_PATH); got = open(f'/proc/self/fd/{d}').read()",
    "change directory": "os.chdir('{folder}'); got = open('secret').read()",
    "raw open": "f = libc.open(b'{secret}', 0); got = f >= 0 and os.read(f, 9)",
    "openat2": "how = (ctypes.c_uint64 * 3)(); got = call(437, -100, b'{secret}', how, 24)[0] >= 0",
    "open by handle": "h = ctypes.create_string_buffer(136); m = ctypes.c_int(); ctypes.memset(h, 128, 1)\n"
    "got = libc.name_to_handle_at(-100, b'{secret}', h, ctypes.byref(m), 0) == 0",
    "cat": "import subprocess; got = subprocess.run(['cat', '{secret}'], capture_output=True).stdout",
    "shell": "got = os.popen('cat {secret} 2>/dev/null').read()",
    "import": "sys.path.insert(0, '{folder}'); import secret; got = secret",
    "run": "import runpy; got = runpy.run_path('{secret}')",
    "exec as script": "os.environ['PYTHONSTARTUP'] = '{secret}'; got = os.popen(f'{sys.executable} {secret}').read()",
    "map": "import mmap; got = mmap.mmap(os.open('{secret}', 0), 0, prot=1)[:]",
    "copy": "import shutil; shutil.copy('{secret}', 'c'); got = open('c').read()",
    "rename": "os.rename('{secret}', 'c'); got = open('c').read()",
    "exchange": "open('x', 'w').write('mine'); got = libc.renameat2(-100, b'x', -100, b'{secret}', 2) == 0",
    "change mode": "os.chmod('{secret}', 0o600); got = True",
    "change owner": "os.chown('{secret}', os.getuid(), os.getgid()); got = True",
    "change time": "os.utime('{secret}', (0, 0)); got = True",
    "attribute": "os.setxattr('{secret}', 'user.x', b'1'); got = True",
    "truncate": "os.truncate('{secret}', 0); got = True",
    "open to empty": "got = os.open('{secret}', os.O_RDONLY | os.O_TRUNC) >= 0",
    "empty a readable file": "got = os.open(os.__file__, os.O_RDONLY | os.O_TRUNC) >= 0",
    "watch": "got = libc.inotify_add_watch(libc.inotify_init1(0), b'{folder}', 0xfff) >= 0",
    "directory notice": "import fcntl; fcntl.fcntl(os.open('/usr/lib', 0), 1026, 0xff); got = True",
    "lease": "import fcntl; fcntl.fcntl(os.open(os.__file__, 0), 1024, 0); got = True",
    "pipe of the host": "f = os.open('{fifo}', os.O_WRONLY | os.O_NONBLOCK); got = os.write(f, b'x')",
    "device": "os.mknod('d', 0o60666, os.makedev(8, 0)); got = True",
    "pipe file": "os.mkfifo('{folder}/f'); got = True",
    "link race": "import threading\ndef swap():\n  for _ in range(200):\n    try: os.symlink('{secret}', 's')\n"
    "    except OSError: pass\n    try: os.remove('s')\n    except OSError: pass\n"
    "t = threading.Thread(target=swap); t.start()\nfor _ in range(200):\n  try: got = got or open('s').read()\n"
    "  except OSError: pass\nt.join()",
    "host package": "import turnwise; got = turnwise.__path__",
    "file of the host package": "import importlib.util; got = importlib.util.find_spec('torch')",
}  # fmt: skip


def _tricks() -> Iterator[Attack]:
    for name, code in TRICKS.items():
        yield Attack("files", name, code)


WRITABLE = (
    "{folder}/new", "{root}/new", "/x", "/etc/x", "/usr/x", "/usr/lib/x", "/usr/bin/x", "/bin/x", "/lib/x", "/dev/x",
    "/dev/shm/x", "/proc/x", "/proc/self/oom_score_adj", "/proc/self/uid_map", "/proc/sys/kernel/core_pattern", "/sys/x",
    "/var/tmp/x", "/var/x", "/run/x", "/root/x", "/home/x", "/opt/x", "/boot/x", "/srv/x", "/mnt/x",
)  # fmt: skip


def _writes() -> Iterator[Attack]:
    for path in WRITABLE:
        yield Attack("writes", f"write {path}", f"got = os.open({path!r}, os.O_WRONLY | os.O_CREAT) >= 0")
    for name, code in {
        "directory": "os.mkdir('{folder}/d'); got = True",
        "link": "os.symlink('/', '{folder}/l'); got = True",
        "remove": "os.remove('{secret}'); got = True",
        "remove directory": "os.rmdir('{folder}/empty'); got = True",
        "remove the library": "os.remove(os.__file__); got = True",
        "overwrite the library": "got = open(os.__file__, 'r+')",
        "overwrite the interpreter": "got = open(sys.executable, 'r+b')",
        "remove the scratch directory": "os.chdir('/'); os.rmdir(os.environ['HOME']); got = True",
        "rename the scratch directory": "os.rename(os.environ['HOME'], '{folder}/mine'); got = True",
        "bytecode": "import py_compile; py_compile.compile(os.__file__, doraise=True); got = True",
    }.items():
        yield Attack("writes", name, code)


# ----------------------------------------------------------------------- network

FAMILIES = ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK", "AF_PACKET", "AF_VSOCK", "AF_ALG", "AF_BLUETOOTH", "AF_CAN",
            "AF_TIPC", "AF_QIPCRTR", "AF_RDS")  # fmt: skip
PAIR = "a, b = socket.socketpair(socket.AF_UNIX, {kind})\n"


def _network() -> Iterator[Attack]:
    for family in FAMILIES:
        for kind in ("SOCK_STREAM", "SOCK_DGRAM"):
            yield Attack("network", f"{family} {kind}", f"got = socket.socket(socket.{family}, socket.{kind})")
    for name, code in {
        "raw socket": "got = socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
        "connect": "got = socket.create_connection(('127.0.0.1', {port}), 0.3)",
        "web": "import urllib.request; got = urllib.request.urlopen('http://127.0.0.1:{port}', timeout=0.3)",
        "metadata service": "got = socket.create_connection(('169.254.169.254', 80), 0.3)",
        "names": "got = socket.getaddrinfo('localhost', 80)",
        "listen": "got = socket.create_server(('127.0.0.1', 0))",
        "shell redirection": "got = os.system('exec 2>/dev/null; echo x > /dev/tcp/127.0.0.1/{port}') == 0",
        "datagram pair": "got = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
        "datagram pair to a path": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', '{datagrams}')\ngot = 1",
        "datagram pair to a name": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', '\\0{name}')\ngot = 1",
        "raw pair": "got = socket.socketpair(socket.AF_UNIX, 3)",
        "datagram pair with flags": "v = (ctypes.c_int * 2)(); got = libc.socketpair(1, 2 | 0o2004000, 0, v) == 0",
        "datagram pair, high word": f"v = (ctypes.c_int * 2)(); n = {(53, 199)[COLUMN]}\n"
        "got = call(n, ctypes.c_long(1 | 1 << 32), ctypes.c_long(2 | 1 << 32), ctypes.c_long(0), v)[0] == 0",
        "TIPC pair": "v = (ctypes.c_int * 2)(); got = libc.socketpair(30, 4, 0, v) == 0",
        "stream pair to a path": "a, b = socket.socketpair(); a.sendto(b'x', '{datagrams}'); got = 1",
        "packet pair to a path": "a, b = socket.socketpair(socket.AF_UNIX, 5); a.sendto(b'x', '{datagrams}')\ngot = b.recv(1) != b'x'",
        "pair connected again": "a, b = socket.socketpair(); a.connect('{stream}'); got = 1",
        "pair bound": "a, b = socket.socketpair(); a.bind('\\0{name}-mine'); got = 1",
        "channel connected again": "socket.socket(fileno=3).connect('{stream}'); got = 1",
        "channel to a path": "socket.socket(fileno=3).sendto(b'', '{datagrams}'); got = 1",
        "asyncio server": "import asyncio; got = asyncio.run(asyncio.start_unix_server(print, 's'))",
        "old socketcall": "got = call(102, 1, None)[0] == 3",
    }.items():
        yield Attack("network", name, code)


# --------------------------------------------------------------------- processes


def _processes() -> Iterator[Attack]:
    for who in ("{host}", "{parent}", "{victim}", "-1"):
        yield Attack("processes", f"signal {who}", f"os.kill({who}, 0); got = True")
    for name, code in {
        "signal a group": "os.killpg(os.getpgid({host}), 0); got = True",
        "signal a thread": "got = libc.tgkill({victim}, {victim}, 0) == 0",
        "queue a signal": "got = libc.sigqueue({victim}, 0, None) == 0",
        "open a process": "got = os.pidfd_open({victim}) >= 0",
        "attach": "got = libc.ptrace(16, {victim}, 0, 0) == 0",
        "seize": "got = libc.ptrace(0x4206, {victim}, 0, 0) == 0",
        "read memory": "b = ctypes.create_string_buffer(64)\n"
        "got = libc.process_vm_readv({victim}, None, 0, None, 0, 0) == 0",
        "write memory": "got = libc.process_vm_writev({victim}, None, 0, None, 0, 0) == 0",
        "limits of another": "import resource; got = resource.prlimit({victim}, resource.RLIMIT_NOFILE)",
        "cores of another": "os.sched_setaffinity({victim}, os.sched_getaffinity(0)); got = True",
        "priority of another": "os.setpriority(0, {victim}, 19); got = True",
        "scheduler of another": "os.sched_setscheduler({victim}, 3, os.sched_param(0)); got = True",
        "owner of a descriptor": "import fcntl; fcntl.fcntl(3, fcntl.F_SETOWN, {victim}); got = True",
        "owner by ioctl": "import fcntl; fcntl.ioctl(3, 0x8901, ({victim}).to_bytes(4, 'little')); got = True",
        "compare": f"got = call({(312, 272)[COLUMN]}, {{victim}}, os.getpid(), 0, 0, 0)[0] >= 0",
        "move pages": f"got = call({(279, 239)[COLUMN]}, {{victim}}, 0, None, None, None, 0)[0] == 0",
        "parent death signal": "got = libc.prctl(1, 9, 0, 0, 0) == 0",
        "set the group of another": "os.setpgid({victim}, 0); got = True",
        "list processes": "got = [n for n in os.listdir('/proc') if n.isdigit()]",
        "link of another": "got = os.readlink('/proc/{victim}/exe')",
    }.items():
        yield Attack("processes", name, code)


def _neighbours() -> Iterator[Attack]:
    for name, code in {
        "signal": "n = {neighbour}; got = n != os.getpid() and os.kill(n, 0) is None",
        "file by number": "got = [open(f'{os.environ[\"HOME\"]}/../{n}/secret').read() for n in range(300)]",
        "list the sessions": "h = os.path.dirname(os.environ['HOME']); got = [n for n in os.listdir(h) if n.isdigit()]",
        "list scratch": "got = [n for n in os.listdir('{neighbour_home}') if n == 'secret']",
        "file": "got = open('{neighbour_home}/secret').read()",
        "write": "open('{neighbour_home}/note', 'w').write('x')",
        "memory": "got = libc.process_vm_readv({neighbour} if {neighbour} != os.getpid() else 2, None, 0, None, 0, 0) == 0",
        "shared memory file": "from multiprocessing import shared_memory as s; got = s.SharedMemory('{name}')",
        "new shared memory file": "from multiprocessing import shared_memory as s; got = s.SharedMemory(create=True, size=9)",
        "System V memory": "got = libc.shmat({segment}, None, 0) not in (-1, 0xffffffffffffffff)",
        "System V memory of all": "libc.shmat.restype = ctypes.c_long\n"
        "got = [n for n in range(64) if libc.shmat(n, None, 0o10000) != -1]",
        "System V removal": "got = libc.shmctl({segment}, 0, None) == 0",
        "message queue": "got = libc.msgget(1, 0o1666) >= 0",
        "semaphore": "got = libc.semget(1, 1, 0o1666) >= 0",
        "POSIX queue": "rt = ctypes.CDLL('librt.so.1'); got = rt.mq_open(b'/q', 0o102, 0o666, None) >= 0",
        "keyring": f"got = call({(250, 219)[COLUMN]}, 0, -5, 1)[0] > 0",
        "lock as a sign": "import fcntl; f = os.open(os.__file__, 0); fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "shared lock as a sign": "import fcntl; f = os.open(os.__file__, 0); fcntl.lockf(f, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        "lock of an open file as a sign": "import fcntl, struct; f = os.open(os.__file__, 0)\n"
        "fcntl.fcntl(f, 37, struct.pack('hhqqi4x', 0, 0, 0, 0, 0))",
        "see the host's lock": "import fcntl\ntry: fcntl.flock(os.open('{locked}', 0), fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "except BlockingIOError: got = True",
        "who holds the host's lock": "import fcntl, struct\n"
        "r = fcntl.fcntl(os.open('{locked}', 0), 5, struct.pack('hhqqi4x', 1, 0, 0, 0, 0))\ngot = struct.unpack('hhqqi4x', r)[4]",
        "attributes of a file of the host": "got = os.listxattr(os.__file__) or os.getxattr(os.__file__, 'user.x')",
        "group of a process": "got = os.getpgid({victim})",
        "session of a process": "got = os.getsid({victim})",
        "cores of a process": "got = os.sched_getaffinity({victim})",
        "policy of a process": "got = os.sched_getscheduler({victim}) >= 0",
        "capabilities of a process": f"h = (ctypes.c_uint32 * 2)(0x20080522, {{victim}}); d = (ctypes.c_uint32 * 6)()\n"
        f"got = call({(125, 90)[COLUMN]}, h, d)[0] == 0",
        "priority of a process": "got = os.getpriority(os.PRIO_PROCESS, {victim}) is not None",
        "terminal": "got = os.open('/dev/tty', os.O_RDWR)",
        "inherited descriptors": "import stat\nfor n in range(5, 4096):\n  try: got = stat.S_ISSOCK(os.fstat(n).st_mode) or got\n"
        "  except OSError: pass",
    }.items():
        yield Attack("neighbours", name, code)


# ------------------------------------------------------------------ system calls


def _calls() -> Iterator[Attack]:
    for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000, 0x80):
        yield Attack("calls", f"unshare {flag:#x}", f"got = libc.unshare({flag}) == 0")
        if flag != 0x80:
            number = seccomp.CLONE[COLUMN]
            yield Attack("calls", f"clone {flag:#x}", f"got = call({number}, {flag} | 17, 0, 0, 0, 0)[0] >= 0")
    for name, code in {
        "clone3": "got = call(435, None, 0)[1] != 38",
        "mount": "got = libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0",
        "bind": "got = libc.mount(b'{folder}', b'/tmp', None, 4096, None) == 0",
        "remount": "got = libc.mount(b'none', b'/', None, 32 | 4096, None) == 0",
        "unmount": "got = libc.umount2(b'/proc', 2) == 0",
        "setns": "got = libc.setns(3, 0) == 0",
        "user namespace file": "got = libc.setns(os.open('/proc/1/ns/user', 0), 0) == 0",
        "a call of the future": "got = call(463, 0, 0)[1] != 38",
        "a call far in the future": "got = call(9999, 0, 0)[1] != 38",
        "negative call": "got = call(-1)[1] != 38",
        "x32 call": "got = call(0x40000000 | 2, b'{secret}', 0)[0] >= 0",
    }.items():
        yield Attack("calls", name, code)


def _denied_calls() -> Iterator[Attack]:
    """Every call that the filter does not allow, with arguments that do nothing: the answer must be the filter's."""
    filtered = seccomp.program(forks=True, private_pids=True, metered=False)
    unfiltered = (335, 336) if platform.machine() == "x86_64" else ()  # uretprobe and uprobe: the kernel asks no filter
    for number in sorted({*range(seccomp.NEWEST_SYSCALL + 1)} - {*unfiltered}):
        if word(verdict(filtered, seccomp.MACHINES[platform.machine()][1], number, *[-1] * 6)) in (1, 38, 95):
            yield Attack("calls", f"call {number}", f"got = call({number}, -1, -1, -1, -1, -1, -1)[1] not in (1, 38, 95)")


def _privileges() -> Iterator[Attack]:
    for which in ("AS", "NOFILE", "FSIZE", "CPU", "CORE", "MEMLOCK"):
        code = f"import resource as r; r.setrlimit(r.RLIMIT_{which}, (r.RLIM_INFINITY, r.RLIM_INFINITY)); got = True"
        yield Attack("privileges", f"raise {which}", code)
    for name, code in {
        "root": "os.setuid(0); got = True",
        "group root": "os.setgid(0); got = True",
        "groups": "os.setgroups([0]); got = True",
        "is root": "got = 0 in (os.getuid(), os.geteuid(), os.getgid(), os.getegid())",
        "capabilities": "h = (ctypes.c_uint32 * 2)(0x20080522, 0); d = (ctypes.c_uint32 * 6)(); libc.capget(h, d); got = sum(d)",
        "gain capabilities": "h = (ctypes.c_uint32 * 2)(0x20080522, 0); d = (ctypes.c_uint32 * 6)(*[-1 & 0xffffffff] * 6)\n"
        "got = libc.capset(h, d) == 0",
        "ambient": "got = libc.prctl(47, 2, 21, 0, 0) == 0",
        "new privileges": "libc.prctl(38, 0, 0, 0, 0); got = libc.prctl(39, 0, 0, 0, 0) != 1",
        "leave the filter": "got = libc.prctl(22, 0, 0, 0, 0) == 0",
        "set-user program": "got = os.popen('su -c id 2>/dev/null; sudo -n id 2>/dev/null').read()",
        "environment of the host": "got = set(os.environ) - {'PATH', 'LANG', 'PYTHONHASHSEED', 'PYTHONUTF8', 'PWD', 'HOME', 'TMPDIR'}",
    }.items():
        yield Attack("privileges", name, code)


# -------------------------------------------------------------------- exhaustion

FORKED = """
for _ in range(6):
    if os.fork() == 0:
        block = []
        while True: block.append(bytearray(os.urandom(1 << 16)) * 64)
import time; time.sleep(60)
"""


def _exhaustion() -> Iterator[Attack]:
    fast = {
        "memory": "x = bytearray(1 << 40)",
        "memory in pieces": "x = [bytearray(1 << 24) for _ in range(1000)]",
        "memory map": "import mmap; x = [mmap.mmap(-1, 1 << 26) for _ in range(100)]",
        "big text": "x = 'a' * (1 << 40)",
        "big power": "x = 10 ** 10 ** 6; str(x)",
        "files open": "x = [open('/dev/null') for _ in range(5000)]",
        "pipes": "x = [os.pipe() for _ in range(5000)]",
        "socket pairs": "x = [socket.socketpair() for _ in range(5000)]",
        "one big file": "f = open('f', 'wb')\nwhile True: f.write(b'x' * (1 << 20)); f.flush()",
        "sparse file": "f = os.open('f', os.O_CREAT | os.O_RDWR); os.ftruncate(f, 1 << 40)",
        "reserved file": "f = os.open('f', os.O_CREAT | os.O_RDWR); os.posix_fallocate(f, 0, 1 << 30)",
        "lock memory": "got = libc.mlockall(3) == 0",
        "deep recursion": "sys.setrecursionlimit(10 ** 6)\ndef f(): f()\nf()",
        "nested brackets": "eval('(' * 90000)",
        "nested data": "x = []\nfor _ in range(10 ** 6): x = [x]\nprint(x)",
        "output": "print('x' * (1 << 24))",
        "output in pieces": "for _ in range(20000): print('x' * 100)",
        "raw output": "for _ in range(50): os.write(1, b'x' * 65536)",
        "errors": "for _ in range(50): os.write(2, b'x' * 65536)",
        "output of control characters": "print('\\x1b[2J\\x00\\ud800' * 999)",
        "nested folders": "for _ in range(3000): os.mkdir('d'); os.chdir('d')",
        "odd names": "for n in range(1, 256):\n  if n != 47: open(bytes([n, 255, n if n != 47 else 1]), 'w').close()",
        "closed folders": "for n in range(50): os.mkdir(f'd{n}', 0); os.mkdir(f'w{n}', 0o300); open(f'w{n}/f', 'w').close()",
        "links out": "for n in range(99): os.symlink('{folder}', f'l{n}')",
    }
    slow = {
        "many files": "n = 0\nwhile True:\n  open(str(n), 'w').close(); n += 1",
        "many folders": "n = 0\nwhile True:\n  os.makedirs(f'{n}/' + 'a/' * 9); n += 1",
        "many big files": "for n in range(999): open(str(n), 'wb').write(b'x' * (1 << 20))\nwhile True: pass",
        "files without a name": "x = []\nfor n in range(60):\n  f = open('f', 'wb'); os.remove('f'); f.write(b'x' * (1 << 20)); x.append(f); f.flush()\n"
        "while True: pass",
        "fork bomb": "while True:\n  try: os.fork()\n  except OSError: pass",
        "fork bomb with new groups": "while True:\n  try:\n    if os.fork() == 0: os.setsid()\n  except OSError: pass",
        "thread bomb": "import threading, time\nfor n in range(9999): threading.Thread(target=time.sleep, args=(60,)).start()",
        "memory of children": FORKED,
        "memory shared by children": "import mmap\nfor _ in range(6):\n  m = mmap.mmap(-1, 1 << 27)\n  if os.fork() == 0:\n"
        "    for i in range(0, 1 << 27, 4096): m[i] = 1\n    import time; time.sleep(60)\nimport time; time.sleep(60)",
        "processes that start processes": "import subprocess\nx = [subprocess.Popen(['sleep', '60']) for _ in range(999)]",
        "zombies": "while True:\n  try:\n    if os.fork() == 0: os._exit(0)\n  except OSError: pass",
        "processor": "import threading\nfor _ in range(4): threading.Thread(target=eval, args=('[0 for _ in iter(int, 1)]',)).start()\nwhile True: pass",
    }  # fmt: skip
    yield from (Attack("exhaustion", name, code) for name, code in fast.items())
    yield from (Attack("exhaustion", name, code, slow=True) for name, code in slow.items())


def _hangs() -> Iterator[Attack]:
    for name, code in {
        "loop": "while True: pass",
        "sleep": "import time; time.sleep(999)",
        "catch everything": "while True:\n  try:\n    while True: pass\n  except BaseException: pass",
        "ignore signals": "import signal\nfor s in {*range(1, 32)} - {9, 19}: signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
        "stop": "os.kill(os.getpid(), 19)\nwhile True: pass",
        "read the channel": "os.read(3, 1)\nwhile True: pass",
        "regular expression": "import re; re.match('(a*)*b', 'a' * 99)",
        "huge power": "10 ** 10 ** 10",
        "huge fraction": "import fractions; fractions.Fraction('1e30000000')",
        "deadlock": "import threading; l = threading.Lock(); l.acquire(); l.acquire()",
        "repr": "class A:\n  def __repr__(self):\n    while True: pass\nprint(A())",
        "destructor": "class A:\n  def __del__(self):\n    while True: pass\nA()",
        "exit handler": "import atexit\n@atexit.register\ndef f():\n  while True: pass\nsys.exit()",
        "trace": "sys.settrace(lambda *a: [0 for _ in iter(int, 1)]); eval('1')\ndef f(): pass\nf()",
        "without the lock": "libc.sleep(999)",
    }.items():
        yield Attack("hang", name, code, slow=name not in ("exit handler", "read the channel"))


# ---------------------------------------------------------------------- protocol

FRAME = "import struct, json\ndef frame(b): os.write(3, struct.pack('>I', len(b)) + b)\n"


def _protocol() -> Iterator[Attack]:
    for name, code in {
        "garbage": "os.write(3, b'\\xff' * 999)",
        "zeros": "os.write(3, bytes(999))",
        "nothing": "frame(b'')",
        "not JSON": "frame(b'{')",
        "list": "frame(b'[]')",
        "number": "frame(b'1e999')",
        "long number": "frame(b'9' * 20000)",
        "deep": "frame(b'[' * 20000)",
        "pickle": "import pickle; frame(pickle.dumps(print))",
        "pickle that runs": "frame(b'cos\\nsystem\\n(S\"touch {folder}/pickled\"\\ntR.')",
        "forged reply": "frame(json.dumps(dict(id='0' * 16, ok=True, output='ESCAPED')).encode())",
        "reply without id": "frame(json.dumps(dict(ok=True, output='ESCAPED')).encode())",
        "wrong types": "frame(json.dumps(dict(id='x', ok=1, output=['ESCAPED'])).encode())",
        "fault": "frame(json.dumps(dict(fault='ESCAPED')).encode())",
        "two frames": "frame(b'{}'); frame(b'{}')",
        "flood": "while True: frame(b'{}' + b' ' * 9999)",
        "huge length": "os.write(3, b'\\x7f\\xff\\xff\\xff')",
        "half a frame": "os.write(3, b'\\0\\0\\0\\x09abc'); os._exit(0)",
        "duplicate keys": 'frame(b\'{"ok": true, "ok": false, "output": "ESCAPED"}\')',
        "half a character": 'frame(b\'{"id": "\\\\ud800", "ok": true, "output": "\\\\ud800"}\')',
        "descriptors": "s = socket.socket(fileno=os.dup(3)); socket.send_fds(s, [b'x'], [0, 1, 2])",
        "credentials": "s = socket.socket(fileno=os.dup(3)); s.sendmsg([b'x'], [(1, 2, bytes(12))])",
        "close": "os.closerange(0, 64)",
        "replace the channel": "os.dup2(1, 3)",
        "shut down": "socket.socket(fileno=os.dup(3)).shutdown(2)",
        "child that answers later": "p = os.fork()\nif p == 0:\n  import time; time.sleep(0.2); frame(b'{}'); os._exit(0)",
        "exit": "os._exit(0)",
        "exit code": "os._exit(77)",
        "abort": "os.abort()",
        "crash": "ctypes.string_at(0)",
        "kill": "os.kill(os.getpid(), 9)",
        "replace json": "import json; json.dumps = json.loads = lambda *a, **k: 1 / 0",
        "replace print": "import builtins; builtins.print = builtins.len = builtins.repr = None",
        "replace sys": "sys.stdout = sys.stderr = sys.modules = None",
        "find the server": "import gc\nfor o in gc.get_objects():\n  if type(o).__name__ == 'Capture': o._limit = 1 << 40\nprint('x' * (1 << 22))",
        "call the server": "m = sys.modules['turnwise.tools.guest.repl']; m.clip = lambda *a: 'E' * 10 ** 7",
        "frames of the server": "f = sys._getframe()\nwhile f.f_back: f = f.f_back\nf.f_globals.clear()",
    }.items():
        yield Attack("protocol", name, FRAME + code, slow=name == "flood")


def _escapes() -> Iterator[Attack]:
    """Ways to run something that the filter does not see."""
    machine = {0: r"\xb8\x14\x00\x00\x00\xcd\x80\xc3", 1: r"\x00\x00\x00\xd4"}[COLUMN]
    yield Attack(
        "escapes",
        "32-bit system call",
        f"import mmap\nm = mmap.mmap(-1, 4096, prot=7); m.write(b'{machine}')\n"
        "f = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m))); got = f() > 0",
    )
    for name, code in {
        "program of our own": "open('p', 'wb').write(open('/bin/true', 'rb').read()); os.chmod('p', 0o755)\n"
        "import subprocess; got = subprocess.call(['./p']) == 0",
        "loader": "import glob, subprocess\nopen('p', 'wb').write(open('/usr/bin/id', 'rb').read())\n"
        "out = subprocess.run([glob.glob('/lib*/ld-linux*')[0], './p'], capture_output=True).stdout\ngot = b'uid=0' in out",
        "preload": "os.environ['LD_PRELOAD'] = './x.so'; got = os.popen('id -u').read().strip() == '0'",
        "new interpreter": "import subprocess\nc = \"print(open('{secret}').read())\"\n"
        "got = subprocess.run([sys.executable, '-c', c], capture_output=True).stdout",
        "new interpreter as root": "import subprocess\nc = 'import os; print(os.getuid())'\n"
        "got = subprocess.run([sys.executable, '-c', c], capture_output=True).stdout.strip() == b'0'",
        "child without limits": "import subprocess, resource\n"
        "f = lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1))\ngot = subprocess.call(['true'], preexec_fn=f) == 0",
        "subinterpreter": "import _xxsubinterpreters as s; i = s.create(); s.run_string(i, \"open('{secret}').read()\"); got = True",
    }.items():
        yield Attack("escapes", name, code)
