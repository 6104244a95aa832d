"""Attacks drawn from grammars: who does what to which resource, and at which moment. ``drawn(seed, count)`` names the draw.

supervisor  what the host side will walk, measure and remove: odd trees, swapped while that happens
space       a way to make a file, a way to fill it, a way to hide it: what is held must not exceed the limit
signs       a mark on something that other sessions or the host can see, or a look at theirs
"""

# ruff: noqa: E501 (lines of attacks are data)
from __future__ import annotations

import random
from collections.abc import Callable

from attacks import COLUMN, Attack

NAMES = ("'a'", "b'\\xff\\xfe'", "'a\\nb'", "'-rf'", "' (deleted)'", "'.output'", "'.removing-1-1'", "'x' * 255", "'\\u202e'", "'%s{}'")
PLACES = {
    "closed folder": "os.mkdir(p(n), 0)",
    "folder without listing": "os.mkdir(p(n), 0o300); open(p(n) + b'/f', 'w').close()",
    "link to a folder of the host": "os.symlink('{folder}/empty', p(n))",
    "link to the root": "os.symlink('/', p(n))",
    "link to itself": "os.symlink(p(n), p(n))",
    "link to a descriptor": "os.symlink('/proc/self/fd/3', p(n))",
    "deep folders": "for _ in range({depth}): os.mkdir('d'); os.chdir('d')\nos.chdir(os.environ['HOME'])",
    "comb": "for _ in range({depth} // 4): os.mkdir('e'); os.mkdir('d'); os.chdir('d')\nos.chdir(os.environ['HOME'])",
    "many files": "for i in range({depth}): open(f'f{i}', 'w').close()",
    "second name": "open('h', 'w').close(); os.link('h', p(n))",
    "second name of a file of the host": "os.link('{secret}', p(n))",
    "sparse file": "f = os.open(p(n), os.O_CREAT | os.O_RDWR); os.ftruncate(f, 1 << 21)",
    "pipe": "os.mkfifo(p(n))",
    "device": "os.mknod(p(n), 0o60666, os.makedev(7, 0))",
    "socket": "socket.socket(socket.AF_UNIX).bind(p(n))",
    "immutable file": "import fcntl; f = os.open(p(n), os.O_CREAT | os.O_RDWR); fcntl.ioctl(f, 0x40086602, (0x10).to_bytes(8, 'little'))",
    "mount": "os.mkdir(p(n)); libc.mount(b'{folder}', p(n), None, 4096, None)",
    "whiteout": "open('w', 'w').close(); libc.renameat2(-100, b'w', -100, p(n), 4)",
}  # fmt: skip
RACES = {
    "nothing": "",
    "exchange with a link": "libc.renameat2(-100, b'd0', -100, b'l0', 2)",
    "exchange below": "libc.renameat2(-100, b'd0/d1', -100, b'l0', 2)",
    "remove and make": "os.rmdir(b'd0/d1'); os.symlink('{folder}/empty', b'd0/d1'); os.unlink(b'd0/d1'); os.mkdir(b'd0/d1', 0)",
    "move away": "os.rename('d0', 'd2'); os.rename('d2', 'd0')",
    "move up": "os.rename('d0/d1', '../d1')",
}
MOMENTS = {
    "measured": "for i in range(40):\n  try: open(f'm{i}', 'wb').write(bytes(1 << 19))\n  except OSError: pass",
    "at the limit of entries": "for i in range(5000):\n  try: os.symlink('x', f's{i}')\n  except OSError: break",
    "watched": "import time; time.sleep(0.3)",
    "closed": "pass",
    "exits": "os._exit(0)",
    "killed": "os.kill(os.getpid(), 9)",
    "crashes": "ctypes.string_at(0)",
}


def _supervisor(draw: random.Random) -> tuple[str, str]:
    places, race, moment = draw.sample(sorted(PLACES), draw.randint(1, 3)), draw.choice(sorted(RACES)), draw.choice(sorted(MOMENTS))
    depth, name = draw.choice((20, 90, 400)), draw.choice(NAMES)
    lines = [f"name = {name}\ndef p(n): return os.fsencode(name)[:250] + b'%d' % n"]
    lines += ["os.mkdir('d0'); os.mkdir('d0/d1', 0); os.symlink('{folder}/empty', 'l0')"]
    for n, place in enumerate(places):
        code = PLACES[place].replace("{depth}", str(depth)).replace("\n", "\n  ")
        lines.append(f"n = {n}\ntry:\n  {code}\nexcept OSError: os.chdir(os.environ['HOME'])")
    if RACES[race]:
        lines.append(
            "import threading\ndef race():\n  while True:\n    try: " + RACES[race] + "\n    except OSError: pass\n"
            "for _ in range(2): threading.Thread(target=race, daemon=True).start()"
        )
    return f"{' + '.join(places)}, named {name}, depth {depth}; {race}; {moment}", "\n".join([*lines, MOMENTS[moment]])


MAKES = {
    "a file": "os.open(f'f{n}', os.O_CREAT | os.O_RDWR)",
    "a file in a folder": "(os.mkdir(f'd{n}'), os.open(f'd{n}/f', os.O_CREAT | os.O_RDWR))[1]",
    "a file without a name": "os.open('.', os.O_TMPFILE | os.O_RDWR)",
    "a file for adding": "os.open(f'f{n}', os.O_CREAT | os.O_WRONLY | os.O_APPEND)",
    "the output": "1",
}
FILLS = {
    "write": "os.write(f, bytes(SIZE))",
    "pieces": "sum(os.write(f, bytes(4096)) for _ in range(SIZE >> 12))",
    "far away": "sum(os.pwrite(f, b'x', i) for i in range(0, SIZE, 4096)) * 4096",
    "vectors": "os.writev(f, [bytes(SIZE >> 1)] * 2)",
    "far vectors": "os.pwritev(f, [bytes(SIZE)], 0)",
    "reserve": "(os.posix_fallocate(f, 0, SIZE), SIZE)[1]",
    "reserve beyond the end": f"SIZE if call({(285, 47)[COLUMN]}, f, 1, 0, SIZE)[0] == 0 else 1 / 0",
    "mapping": "(os.ftruncate(f, SIZE), mmap.mmap(f, SIZE).write(b'x' * SIZE))[1]",
    "send": "os.sendfile(f, os.open(os.__file__, 0), 0, 1 << 15)",
    "copy": "os.copy_file_range(os.open(os.__file__, 0), f, 1 << 15)",
    "splice": "os.splice(source(), f, 1 << 15)",
    "two threads": "threads(f)",
}
HIDES = {
    "named": "",
    "deleted": "os.unlink(name)",
    "deleted and closed": "held.append(os.dup(f)); os.unlink(name); os.close(f)",
    "deleted and mapped": "held.append(mmap.mmap(f, 4096, access=mmap.ACCESS_COPY)); os.unlink(name); os.close(f)",
    "deleted and shared": "held.append(mmap.mmap(f, 4096)); os.unlink(name); os.close(f)",
    "deleted and sent": "held.append(socket.socketpair()); socket.send_fds(held[-1][0], [b'x'], [f]); os.unlink(name); os.close(f)",
    "deleted and sent to the host": "socket.send_fds(socket.socket(fileno=os.dup(3)), [b'x'], [f]); os.unlink(name); os.close(f)",
    "in descriptors of its own": "apart(f); os.unlink(name); os.close(f)",
    "moved": "os.rename(name, f'g{n}'); os.close(f)",
    "with a second name": "os.link(name, f'g{n}'); os.close(f)",
}
SPACE = """
import mmap, threading, time
held, total, SIZE = [], 0, {size}
def source():
    r, w = os.pipe(); os.write(w, bytes(1 << 15)); return r
def threads(f):
    sizes = []
    ts = [threading.Thread(target=lambda i=i: sizes.append(os.pwrite(f, bytes(SIZE >> 1), i * SIZE >> 1))) for i in (0, 1)]
    [t.start() for t in ts]; [t.join() for t in ts]
    return sum(sizes)
def apart(f):
    ok = threading.Event()
    def hold():
        assert libc.close_range(900, 901, 2) == 0  # a table of its own
        ok.set(); time.sleep(9)
    t = threading.Thread(target=hold, daemon=True); t.start()
    if not ok.wait(0.1): raise OSError
started = time.monotonic()
try:
    for n in range(400):
        if time.monotonic() > started + 0.7: break
        f = {make}
        name = next((s for s in (f'f{n}', f'd{n}/f') if os.path.exists(s)), 'none')
        {fill}
        total += os.fstat(f).st_blocks * 512 * (f != 1)
        {hide}
except (OSError, ZeroDivisionError): pass
got = total > LIMIT
"""


def _space(draw: random.Random) -> tuple[str, str]:
    make, fill, hide = draw.choice(sorted(MAKES)), draw.choice(sorted(FILLS)), draw.choice(sorted(HIDES))
    size = draw.choice((1 << 14, 1 << 17, 1 << 19, 1 << 20, 3 << 20))
    if make == "a file without a name" and hide != "in descriptors of its own":
        hide = "named"  # it stays open
    code = SPACE.replace("{size}", str(size)).replace("{make}", MAKES[make]).replace("{fill}", FILLS[fill])
    keep = HIDES[hide] or ("held.append(f)" if make == "a file without a name" else "f != 1 and os.close(f)")
    return f"{make}, {size} bytes by {fill}, {hide}", code.replace("{hide}", keep).replace("LIMIT", "{limit}")


FILES = ("os.__file__", "'{locked}'", "'{secret}'", "'/usr/lib'", "'/dev/null'", "'{folder}'", "'{neighbour_home}'", "'/usr/bin/env'")
SIGNS = {
    "flock": "import fcntl; fcntl.flock(os.open(F, 0), fcntl.{kind} | fcntl.LOCK_NB)",
    "lockf": "import fcntl; fcntl.lockf(os.open(F, os.{mode}), fcntl.{kind} | fcntl.LOCK_NB)",
    "lock of an open file": "import fcntl, struct; fcntl.fcntl(os.open(F, 0), 37, struct.pack('hhqqi4x', 0, 0, {number}, 1, 0))",
    "who holds a lock": "import fcntl, struct\ngot = struct.unpack('hhqqi4x', fcntl.fcntl(os.open(F, 0), {getlk}, struct.pack('hhqqi4x', 1, 0, 0, 0, 0)))[4]",
    "lease": "import fcntl; fcntl.fcntl(os.open(F, 0), 1024, {number} % 2); got = True",
    "notice": "import fcntl; fcntl.fcntl(os.open(F, 0), 1026, {number} | 1); got = True",
    "time": "os.utime(F, ({number}, {number})); got = True",
    "attribute": "os.setxattr(F, 'user.{number}', b'1'); got = True",
    "look at attributes": "got = os.listxattr(F) + [os.getxattr(F, 'security.capability')]",
    "mode": "os.chmod(F, 0o700 | {number}); got = True",
    "watch": "got = libc.inotify_add_watch(libc.inotify_init1(0), os.fsencode(F), 0xfff) >= 0",
    "semaphore": "got = libc.semget({number}, 1, 0o1666) >= 0",
    "shared memory": "got = libc.shmget({number}, 4096, 0o1666) >= 0",
    "messages": "got = libc.msgget({number}, 0o1666) >= 0",
    "key": f"got = call({(248, 217)[COLUMN]}, b'user', b'{{number}}', b'x', 1, -3)[0] > 0",
    "name of a socket": "s = socket.socketpair()[0]; s.bind('\\0tw{number}'); got = True",
    "priority": "os.nice({number} % 19 + 1); os.setpriority(0, 0, 19); got = os.getpriority(0, {victim})",
    "process": "got = os.{ask}({victim}) is not None",
    "cached pages": f"import mmap; m = mmap.mmap(os.open(F, 0), 4096, prot=1, flags=2); v = ctypes.create_string_buffer(1)\ngot = call({(27, 232)[COLUMN]}, ctypes.addressof(ctypes.c_char.from_buffer_copy(m)) & ~4095, 4096, v)[0] == 0",
    "kernel log": "got = libc.klogctl(10, None, 0) >= 0",
}  # fmt: skip


def _signs(draw: random.Random) -> tuple[str, str]:
    sign, file = draw.choice(sorted(SIGNS)), draw.choice(FILES)
    choices = {
        "kind": draw.choice(("LOCK_EX", "LOCK_SH")), "mode": draw.choice(("O_RDONLY", "O_RDWR")), "getlk": draw.choice((5, 36)),
        "number": draw.randrange(1, 64), "ask": draw.choice(("getpgid", "getsid", "sched_getaffinity", "sched_getparam", "sched_getscheduler")),
    }  # fmt: skip
    code = SIGNS[sign]
    for name, value in choices.items():
        code = code.replace("{" + name + "}", str(value))
    return f"{sign} on {file}, {', '.join(map(str, choices.values()))}", f"F = {file}\n{code}"


GRAMMARS: dict[str, Callable[[random.Random], tuple[str, str]]] = {"supervisor": _supervisor, "space": _space, "signs": _signs}


def drawn(seed: int, count: int) -> tuple[Attack, ...]:
    """``count`` different attacks, of each kind in turn."""
    draw, out = random.Random(seed), dict[tuple[str, str], Attack]()
    while len(out) < count:
        kind = list(GRAMMARS)[len(out) % len(GRAMMARS)]
        name, code = GRAMMARS[kind](draw)
        out.setdefault((kind, name), Attack(kind, name, code))
    return tuple(out.values())
