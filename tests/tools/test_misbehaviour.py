"""Code that breaks things: each misdeed ends in an answer, a fresh interpreter and no leftover process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.tool_pools import LIMITS, eventually, use

from turnwise.tools import PythonTool, SandboxLimits, SandboxSession

pytestmark = pytest.mark.filterwarnings("ignore:untrusted code is NOT isolated")
RESTARTED = "(the interpreter was restarted, its names are gone)"


def descendants(root: int) -> set[int]:
    """Every living process below this one."""
    parents: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, parent = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            parents[int(name)] = int(parent)
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {root}


ENDLESS = (
    "while True: pass",
    "import time; time.sleep(60)",
    "while True:\n  try:\n    while True: pass\n  except BaseException: pass",
    "import signal\nfor s in {*range(1, 32)} - {9, 19}: signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
    "while True: print('x' * 1000)",
    "import os; os.read(3, 1)",
    "import os; os.kill(os.getpid(), 19); os.read(3, 1)",
)


def test_the_time_limit_stops_whatever_runs(tool: PythonTool) -> None:
    def scene(code: str) -> str:
        with tool.open() as session:
            session.run("x = 1")
            result = session.run(code)
            assert not result.ok
            assert session.run("x").output == "NameError: name 'x' is not defined"
            return result.output

    with ThreadPoolExecutor(len(ENDLESS)) as pool:  # together, since each takes the whole limit
        assert set(pool.map(scene, ENDLESS)) == {f"error: time limit of 4 s {RESTARTED}"}


CRASH = "import sys; sys.setrecursionlimit(10**9)\nclass A:\n  def __repr__(self): return repr(self)\nrepr(A())"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os._exit(3)", "the interpreter exited with code 3"),
        ("import os; os.abort()", "the interpreter was killed by SIG"),
        ("import ctypes; ctypes.string_at(0)", "the interpreter was killed by SIGSEGV"),
        ("import os; os.closerange(3, 64)", "the interpreter"),
        ("import os; os.write(3, b'\\xff' * 100)", "the answer could not be read"),
        ("import os; os.write(3, b'\\0\\0\\0\\2{}')", "the answer could not be read"),
        ("import os; os.write(3, b'\\0\\0\\0\\2[]')", "the answer could not be read"),
        ("import os; os.write(3, b'\\0\\0\\x40\\0' + b'[' * 0x4000)", "the answer could not be read"),
        ("import os; os.write(3, b'\\0\\0\\0\\x09' + b'[' * 3); os._exit(0)", "the interpreter exited with code 0"),
    ],
)
def test_a_broken_interpreter_is_replaced(session: SandboxSession, code: str, words: str) -> None:
    session.run("x = 1")
    result = session.run(code)
    assert not result.ok
    assert result.output.startswith(f"error: {words}"), result.output
    assert result.output.endswith(RESTARTED)
    assert session.run("x").output == "NameError: name 'x' is not defined"
    assert session.run("2 + 2").output == "4"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def f(): return f()\nf()", "RecursionError: maximum recursion depth exceeded"),
        ("x = 'a' * (1 << 30)", "MemoryError"),
        ("[bytearray(1 << 24) for _ in range(100)]", "MemoryError"),
        ("x = 1\0", "SyntaxError: source code string cannot contain null bytes"),
        ("(" * 5000, "SyntaxError: too many nested parentheses"),
        ("10 ** 100000", "ValueError: Exceeds the limit"),
        ("x = '\udc80'", "UnicodeEncodeError"),
        ("open('big', 'wb').write(b'x' * (8 << 20))", "OSError: [Errno 27] File too large"),
        ("import sys; sys.stdout.write(5)", "TypeError"),
        ("import ast, json; ast.parse = json.dumps = json.loads = None; raise KeyError(1)", "KeyError: 1"),
        ("files = [open('/dev/null') for _ in range(500)]", "OSError: [Errno 24] Too many open files"),
    ],
)
def test_a_mistake_is_answered_and_names_stay(session: SandboxSession, code: str, words: str) -> None:
    session.run("kept = 1")
    result = session.run(code)
    assert not result.ok
    output = result.output.replace("ValueError: source code", "SyntaxError: source code")
    # a write above the limit of the whole directory is refused before that of one file is reached
    assert words in output.replace("[Errno 28] No space left on device", "[Errno 27] File too large"), output
    assert session.run("kept").output == "1"


def test_recursion_without_a_limit(session: SandboxSession) -> None:
    assert not session.run(CRASH).ok  # a signal or a RecursionError, depending on the version of Python
    assert session.run("2 + 2").output == "4"


def test_output_is_cut_with_a_note(session: SandboxSession) -> None:
    for code in ("print('é' * 100_000)", "'é' * 100_000", "import os; os.write(1, b'x' * 50_000) and None"):
        result = session.run(code)
        assert result.ok
        assert result.output.endswith(f"\n[output cut at {LIMITS.output_bytes} bytes]")
        assert len(result.output.encode()) < LIMITS.output_bytes + 100
    assert session.run("1").output == "1"


def test_huge_source_is_refused_unsent(session: SandboxSession) -> None:
    session.run("x = 1")
    assert session.run("#" * 100_000).output == "error: the code has 100000 bytes, the limit is 65536"
    assert session.run("x").output == "1"


def test_an_answer_cannot_be_left_for_the_next_call(session: SandboxSession) -> None:
    forged = 'b\'{"id": "0", "ok": true, "output": "forged"}\''
    session.run(f"import os, struct; m = {forged}; os.write(3, struct.pack('>I', len(m)) + m)")
    assert session.run("'honest'").output == "'honest'"


@pytest.mark.thorough
def test_cpu_time_of_a_session_is_limited(tool: PythonTool) -> None:
    with PythonTool(SandboxLimits(wall_seconds=120, cpu_seconds=1), isolation=tool.isolation, spare=0) as own:
        result = own.open().run("while True: pass")
        assert result.output == f"error: CPU time limit of 1 s {RESTARTED}"


BOMB = """
import os, time
made = 0
try:
    for _ in range(300):
        if os.fork() == 0:
            os.setsid()
            time.sleep(60)
            os._exit(0)
        made += 1
except OSError as error:
    print(type(error).__name__)
made
"""


def test_a_fork_bomb_is_stopped_and_its_children_die(jail: SandboxSession) -> None:
    with PythonTool(LIMITS, isolation=jail._pool.isolation, spare=0) as own, own.open() as session:
        error, made = session.run(BOMB).output.split()
        assert error in ("BlockingIOError", "PermissionError")
        assert int(made) < LIMITS.processes
        assert len(below := descendants(own._zygote._process.pid)) >= int(made)
        with own.open() as other:
            assert other.run("1").output == "1"  # the neighbours still live
        session.close()
        assert eventually(lambda: len(descendants(own._zygote._process.pid)) <= 1), below


def test_a_thread_bomb_is_stopped(jail: SandboxSession) -> None:
    code = "import threading, time\nfor n in range(5000): threading.Thread(target=time.sleep, args=(9,)).start()"
    result = jail.run(code)
    assert result.output.startswith(("RuntimeError: can't start new thread", "error: time limit", "MemoryError"))
    jail.run("1")


def test_one_process_means_none_may_be_started(tool: PythonTool) -> None:
    if tool.isolation == "limits":
        pytest.skip("the limits rung only counts processes roughly")
    with PythonTool(SandboxLimits(processes=1), isolation=tool.isolation, spare=0) as own:
        assert own.open().run("import os; os.fork()").output.startswith(("PermissionError", "BlockingIOError"))


def test_scratch_is_bounded_as_a_file_system_is(jail: SandboxSession) -> None:
    result = jail.run("for i in range(100): open(f'f{i}', 'wb').write(b'x' * (1 << 20))")
    assert "No space left" in result.output


HOST = """
import sys, time, warnings
warnings.simplefilter("ignore")
from turnwise.tools import SandboxLimits, PythonTool
tool = PythonTool(SandboxLimits(wall_seconds=60), isolation=sys.argv[1])
sessions = [tool.open() for _ in range(3)]
print([s.run("1").output for s in sessions], flush=True)
sessions[0].run("import subprocess; p = subprocess.Popen(['sleep', '60'])")
sessions[1].run("import signal; [signal.signal(s, signal.SIG_IGN) for s in (1, 2, 3, 15)]")
print("up", flush=True)
sys.stdin.readline()  # until its processes have been counted
{end}
"""


def host(name: str, end: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOST.format(end=end), name]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("end", ["sessions[2].run('while True: pass')", "pass"])
def test_no_process_outlives_the_host(tool: PythonTool, end: str) -> None:
    with host(tool.isolation, end) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "['1', '1', '1']\n"
        assert process.stdout.readline() == "up\n"
        below = descendants(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        if "run" in end:
            time.sleep(0.05)  # let the endless loop begin
            process.kill()
        assert process.wait(60) == (-signal.SIGKILL if "run" in end else 0)
        assert below
        alive = lambda: {pid for pid in below if Path(f"/proc/{pid}").exists()}  # noqa: E731
        if tool.isolation == "limits" and "run" in end:  # a grandchild may outlive a SIGKILL there: not claimed
            time.sleep(0.2)
            for pid in alive():
                os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: not alive()), [Path(f"/proc/{pid}/status").read_text()[:200] for pid in alive()]


def test_scratch_directories_vanish(tool: PythonTool) -> None:
    with PythonTool(LIMITS, isolation=tool.isolation) as own:
        where = own.open().run("import os; open('f', 'w').write('x'); print(os.getcwd())").output.split()[0]
    scratch = Path(where)
    made = [path for path in (scratch, *scratch.parents) if path.name.startswith("turnwise-")]  # none in a namespace
    assert made or tool.isolation != "limits"
    assert eventually(lambda: not any(path.exists() for path in (scratch / "f", *made)))


def test_closing_leaves_no_process(tool: PythonTool) -> None:
    before = descendants(os.getpid())
    own = PythonTool(LIMITS, isolation=tool.isolation)
    sessions = [own.open() for _ in range(5)]
    for session in sessions:
        session.run("1")
    assert descendants(os.getpid()) - before
    own.close()
    assert eventually(lambda: not descendants(os.getpid()) - before)


def test_sessions_do_not_pile_up() -> None:
    tool = use("limits")
    for _ in range(30):
        with tool.open() as session:
            session.run("1")
    assert eventually(lambda: len(descendants(tool._zygote._process.pid)) <= 3)
