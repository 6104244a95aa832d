"""Attacks drawn from grammars: who does what to which resource, and at which moment. ``drawn(seed, count)`` names the draw.

supervisor  what the host side will walk, measure and remove: odd trees, swapped while that happens
space       a way to make a file, a way to fill it, a way to hide it: what is held must not exceed the limit
signs       a mark on something that other sessions or the host can see, or a look at theirs
protocol    what is sent in place of a reply: its header, its content, its form, by whom and when
exhaustion  which resource, in which portions, by whom, and what happens to it at the limit
hang        what never ends, where it is called from, and how it is shielded
"""

# ruff: noqa: E501 (lines of attacks are data)
from __future__ import annotations

import random
from collections.abc import Callable, Sequence

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


HEADERS = {
    "its length": "len(b)", "one less": "max(len(b) - 1, 0)", "one more": "len(b) + 1", "nothing": "0", "too long": "1 << 20",
    "negative": "0xffffffff", "half": "len(b) // 2", "most": "0x7fffffff",
}  # fmt: skip
IDS = {
    "the request's": "request_id()", "none": "None", "another": "'0' * 16", "a number": "7", "a list": "['x']", "a long one": "'9' * 9999",
    "half a character": "'\\ud800'", "true": "True", "nested": "{'id': request_id()}",
}  # fmt: skip
OUTPUTS = {
    "a text": "'4'", "a long text": "'x' * (1 << 16)", "longer than a frame": "'x' * (1 << 22)", "a list": "['4']", "nothing": "None",
    "half characters": "'\\ud800' * 999", "escapes": "'\\x1b]0;x\\x07\\x1b[2J\\x9b' * 99", "deep": "deep(9000)", "infinite": "1e999", "not a number": "0 * 1e999",
    "a number": "10 ** 4000", "direction": "'\\u202e\\u2066' * 99", "zeros": "'\\0' * 999",
}  # fmt: skip
FORMS = {
    "JSON": "json.dumps(m).encode()", "UTF-16": "json.dumps(m).encode('utf-16')", "with a mark": "b'\\xef\\xbb\\xbf' + json.dumps(m).encode()",
    "twice the keys": "json.dumps(m).encode()[:-1] + b',' + json.dumps(m).encode()[1:]", "with a tail": "json.dumps(m).encode() + b'{}'",
    "a list": "json.dumps([m]).encode()", "blanks": "json.dumps(m).encode() + b' ' * 5000", "Latin": "json.dumps(m, ensure_ascii=False).encode('utf-8', 'surrogatepass')",
    "pickle": "__import__('pickle').dumps(m)", "a text": "json.dumps(json.dumps(m)).encode()", "random": "os.urandom(99)",
}  # fmt: skip
WRITERS = {
    "the call": "act()",
    "a thread": "import threading; threading.Thread(target=act, daemon=True).start()",
    "a later thread": "import threading; threading.Timer(0.02, act).start()",
    "a child": "if os.fork() == 0: act(); os._exit(0)",
    "a later child": "if os.fork() == 0: __import__('time').sleep(0.05); act(); os._exit(0)",
    "an exit handler": "import atexit; atexit.register(act); sys.exit()",
    "a finalizer": "class F:\n  def __del__(self): act()\nF()",
    "a trace": "sys.settrace(lambda *a: (sys.settrace(None), act())[0])\n(lambda: 0)()",
    "the printing of a value": "class R:\n  def __repr__(self): act(); return 'R'\nprint(R())",
}  # fmt: skip
WAYS = {
    "at once": "os.write(3, frame)",
    "in single bytes": "[os.write(3, frame[i:i + 1]) for i in range(min(len(frame), 500))]",
    "many times": "[os.write(3, frame) for _ in range(200)]",
    "and again and again": "import time\n  for _ in range(60): os.write(3, frame); time.sleep(0.005)",
    "with descriptors": "socket.send_fds(socket.socket(fileno=os.dup(3)), [frame], [0, 1, 2])",
    "and closes": "os.write(3, frame); os.close(3)",
    "and stops sending": "os.write(3, frame); socket.socket(fileno=os.dup(3)).shutdown(socket.SHUT_WR)",
    "and dies": "os.write(3, frame); os._exit(0)",
    "and reads the next request": "os.write(3, frame); socket.socket(fileno=os.dup(3)).setblocking(False); os.read(3, 1 << 20)",
    "half of it": "os.write(3, frame[:len(frame) // 2])",
    "out of band": "socket.socket(fileno=os.dup(3)).send(frame, socket.MSG_OOB)",
}  # fmt: skip
REPLY = """
import json
def request_id():
    f = sys._getframe()
    while f:
        if 'request' in f.f_locals: return f.f_locals['request']['id']
        f = f.f_back
    return ''
def deep(n):
    x = []
    for _ in range(n): x = [x]
    return x
def act():
  sys.setrecursionlimit(20000)
  m = {"id": ID, "ok": OK, "output": OUTPUT}
  EXTRA
  try: b = FORM
  except (ValueError, RecursionError): b = b'[' * 9000
  frame = (HEADER).to_bytes(4, 'big') + b
  WAY
"""
EXTRAS = ("", "m['fault'] = 'x'", "m['ready'] = True", "m['ended'] = 1; m['status'] = 0", "del m['ok']", "m['reason'] = 'x' * 9999", "m.clear()")


def _protocol(draw: random.Random) -> tuple[str, str]:
    names = [draw.choice(sorted(words)) for words in (HEADERS, IDS, OUTPUTS, FORMS, WAYS, WRITERS)]
    header, number, output, form, way, writer = names
    ok, extra = draw.choice(("True", "False", "1", "None", "'true'")), draw.choice(EXTRAS)
    parts = {"ID": IDS[number], "OK": ok, "OUTPUT": OUTPUTS[output], "EXTRA": extra or "pass", "FORM": FORMS[form]}
    code = REPLY
    for word, value in (*parts.items(), ("HEADER", HEADERS[header]), ("WAY", WAYS[way])):
        code = code.replace(word, value, 1)
    name = f"length {header}, id {number}, ok {ok}, output {output}, as {form}, {extra or 'no more'}; {writer}, {way}"
    return name, code + WRITERS[writer]


RESOURCES = {
    "memory": "bytearray(SIZE)", "zeroed memory": "bytes(SIZE)", "text": "'\\U0001f600' * (SIZE // 4)", "objects": "[{} for _ in range(SIZE // 64)]",
    "a mapping": "fill(mmap.mmap(-1, SIZE))", "a private mapping": "fill(mmap.mmap(-1, SIZE, flags=2))", "a file in memory": "mapped(libc.memfd_create(b'm', 0))",
    "a pipe": "full(os.pipe()[1])", "a pair of sockets": "full(pair())", "a number": "1 << SIZE * 8", "a stack": "threading.stack_size(min(max(SIZE, 1 << 15), 1 << 28)) or started()",
    "a child": "child()", "a descriptor": "os.dup(0)", "a thread": "started()", "a group of children": "os.setpgid(child(), 0)", "a new session": "child(os.setsid)",
    "output": "print('x' * SIZE)", "output of children": "child(lambda: os.write(1, bytes(1 << 16)))", "errors": "os.write(2, bytes(min(SIZE, 1 << 16)))",
    "attributes": "[setattr(sys, f'a{len(held)}_{i}', i) for i in range(SIZE >> 10)]", "compiled code": "compile('x = 1\\n' * (SIZE >> 6), 'c', 'exec')",
    "timers": "threading.Timer(99, print).start()", "a pattern": "__import__('re').compile('(a|b|' * 99 + 'x' + ')' * 99 + 'y' * (len(held) + 1))",
}  # fmt: skip
ENDS = {
    "keeps it": "held.append(x)", "gives it back": "pass", "keeps it twice": "held.append((x, bytes(SIZE)))",
    "catches the error and asks again": "held.append(x); again = True", "in a ring": "held.append([x, held])",
}  # fmt: skip
EXHAUST = """
import mmap, threading, time
held, again, SIZE, until = [], False, {size}, time.monotonic() + 0.6
def fill(m):
    for i in range(0, len(m), 4096): m[i] = 1
    return m
def mapped(f):
    os.ftruncate(f, SIZE); return fill(mmap.mmap(f, SIZE))
def pair():
    p = socket.socketpair(); held.append(p); return p[0].fileno()
def full(f):
    os.set_blocking(f, False)
    try:
        while True: os.write(f, bytes(1 << 16))
    except BlockingIOError: return f
def started():
    t = threading.Thread(target=time.sleep, args=(5,), daemon=True); t.start(); return t
def child(act=lambda: 0):
    pid = os.fork()
    if pid == 0:
        try: act(); x = bytearray(SIZE); time.sleep(5)
        finally: os._exit(0)
    return pid
def take():
    global again
    for n in range(3000):
        if time.monotonic() > until: return
        try:
            x = WHAT
            END
        except (OSError, MemoryError, OverflowError, RuntimeError, ValueError, SyntaxError, RecursionError):
            if not again: return
"""
TAKERS = {
    "the call": "take()",
    "four threads": "ts = [threading.Thread(target=take) for _ in range(4)]; [t.start() for t in ts]; [t.join() for t in ts]",
    "three children": "for _ in range(3):\n  if os.fork() == 0: take(); os._exit(0)\ntake()",
    "after the call": "threading.Thread(target=take, daemon=True).start()",
    "and dies": "take(); os.kill(os.getpid(), 9)",
    "and never ends": "take()\nwhile True: time.sleep(1)",
    "the printing of a value": "class R:\n  def __repr__(self): take(); return 'R'\nprint(R())",
}  # fmt: skip
KEPT = "\nimport resource\ngot = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > {memory}"


def _exhaustion(draw: random.Random) -> tuple[str, str]:
    resource, end, taker = (draw.choice(sorted(words)) for words in (RESOURCES, ENDS, TAKERS))
    size = draw.choice((1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 27))
    code = EXHAUST.replace("{size}", str(size)).replace("WHAT", RESOURCES[resource]).replace("END", ENDS[end])
    return f"{resource} of {size}, {end}; {taker}", code + TAKERS[taker] + KEPT


LOOPS = {
    "a loop": "while True: pass", "sleep": "time.sleep(999)", "sleep in C": "libc.sleep(999)", "a lock": "threading.Lock().acquire() and l.acquire() and l.acquire()",
    "the channel": "[os.read(3, 1) for _ in iter(int, 1)]", "a pipe": "os.read(os.pipe()[0], 1)", "a signal": "signal.sigwait([10])", "a pattern": "re.match('(a*)*b', 'a' * 99)",
    "a power": "10 ** 10 ** 10", "a pause": "signal.pause()", "a poll": "select.poll().poll()", "a child": "os.waitpid(child(), 0)", "a sort": "sorted(iter(int, 1))",
    "a regular file": "[os.pread(0, 1, 0) for _ in iter(int, 1)]", "a digit": "str(7 ** 10 ** 7)", "a hash": "len({H() for _ in range(10 ** 5)})",
    "a stop": "os.kill(os.getpid(), 19)", "an import": "__import__('m')", "a generator": "sum(1 for _ in iter(int, 1))",
}  # fmt: skip
SHIELDS = {
    "nothing": "", "catches everything": "", "ignores signals": "for s in {*range(1, 65)} - {9, 19, 32, 33}: signal.signal(s, signal.SIG_IGN)",
    "blocks signals": "signal.pthread_sigmask(0, range(1, 65))", "no recursion limit": "sys.setrecursionlimit(10 ** 9)", "no switch of threads": "sys.setswitchinterval(99)",
    "no collector": "import gc; gc.disable(); gc.set_threshold(0)", "its own group": "os.setpgid(0, 0)", "low priority": "os.nice(19)", "a new session": "os.setsid()",
    "no exit": "os._exit = sys.exit = lambda *a: None", "a name": "libc.prctl(15, b'sleep', 0, 0, 0)", "no death signal": "libc.prctl(1, 0, 0, 0, 0)",
    "an alarm": "signal.signal(14, lambda *a: forever()); signal.setitimer(0, 0.01, 0.01)",
}  # fmt: skip
PLACES_OF_CALLS = {
    "the call": "forever()",
    "a thread that is waited for": "t = threading.Thread(target=forever); t.start(); t.join()",
    "every thread": "[threading.Thread(target=forever).start() for _ in range(4)]; forever()",
    "a child and the call": "child(forever); forever()",
    "a finalizer": "class F:\n  def __del__(self): forever()\nF()",
    "a printed value": "class R:\n  def __repr__(self): forever()\nR()",
    "the text of an error": "class E(Exception):\n  def __str__(self): forever()\nraise E",
    "an exit handler": "import atexit; atexit.register(forever); sys.exit()",
    "a trace": "sys.settrace(lambda *a: forever())\n(lambda: 0)()",
    "a collection": "import gc; gc.callbacks.append(lambda *a: forever()); gc.collect()",
    "an import": "sys.meta_path.insert(0, type('I', (), {'find_spec': lambda *a: forever()})()); import nothing_there",
    "standard output": "sys.stdout = type('O', (), {'write': lambda *a: forever(), 'take': lambda *a: forever()})(); print(1)",
    "a comparison": "class C:\n  def __eq__(self, o): forever()\n  __hash__ = lambda s: 1\n{C(), C()}",
    "a codec": "__import__('codecs').register(lambda n: forever()); b''.decode('no-such-codec')",
}  # fmt: skip
HANG = """
import re, select, signal, threading, time
l = threading.Lock()
class H:
  __hash__ = lambda s: 1
  __eq__ = lambda s, o: False
def child(act=signal.pause):
  pid = os.fork()
  if pid == 0: act(); os._exit(0)
  return pid
def forever():
  try: exec({shield}, globals())
  except (OSError, ValueError): pass
  while True:
    try: exec({loop}, globals())
    except BaseException:
      if not {catches}: raise
"""


def _hang(draw: random.Random) -> tuple[str, str]:
    loop, shield, place = (draw.choice(sorted(words)) for words in (LOOPS, SHIELDS, PLACES_OF_CALLS))
    values = {"{shield}": repr(SHIELDS[shield]), "{loop}": repr(LOOPS[loop]), "{catches}": str(shield == "catches everything")}
    code = HANG
    for word, value in values.items():
        code = code.replace(word, value)
    return f"{loop}, {shield}, {place}", code + PLACES_OF_CALLS[place]


GRAMMARS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "supervisor": _supervisor, "space": _space, "signs": _signs, "protocol": _protocol, "exhaustion": _exhaustion, "hang": _hang,
}  # fmt: skip


def drawn(seed: int, count: int, kinds: Sequence[str] = tuple(GRAMMARS)) -> tuple[Attack, ...]:
    """``count`` different attacks, of each kind in turn."""
    draw, out = random.Random(seed), dict[tuple[str, str], Attack]()
    while len(out) < count:
        kind = kinds[len(out) % len(kinds)]
        name, code = GRAMMARS[kind](draw)
        out.setdefault((kind, name), Attack(kind, name, code, slow=kind == "hang"))
    return tuple(out.values())
