"""What a session is for: REPL semantics, persistence, privacy between sessions, threads and event loops."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.tool_pools import LIMITS, eventually, use

import turnwise.errors
from turnwise.errors import SettingError, ToolFault
from turnwise.tools import PythonTool, SandboxLimits, SandboxSession, python_tool

SOURCE = str(Path(turnwise.errors.__file__).parents[1])
pytestmark = pytest.mark.filterwarnings("ignore:untrusted code is NOT isolated")


@pytest.mark.parametrize(
    ("code", "output", "ok"),
    [
        ("1 + 1", "2", True),
        ("'a'", "'a'", True),
        ("None", "", True),
        ("x = 3", "", True),
        ("print('a'); 5", "a\n5", True),
        ("for i in range(3): print(i)", "0\n1\n2", True),
        ("def f():\n  return 7\nf()", "7", True),
        ("", "", True),
        ("# nothing", "", True),
        ("y", "NameError: name 'y' is not defined", False),
        ("1 / 0", "ZeroDivisionError: division by zero", False),
        ("{}['k']", "KeyError: 'k'", False),
        ("print('before'); 1 / 0", "before\nZeroDivisionError: division by zero", False),
        ("def f(:", "SyntaxError: invalid syntax (line 1)", False),
        ("raise SystemExit(3)", "SystemExit: 3", False),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", False),
        ("input()", "EOFError: EOF when reading a line", False),
        ("import sys; print('e', file=sys.stderr)", "e", True),
        ("import os; os.write(1, b'raw\\n') and None", "raw", True),
        ("'\\ud800' and print('\\ud800')", "\\ud800", True),
        ("class E(Exception):\n  def __str__(self): raise E\nraise E", "E: <exception str() failed>", False),
        ("from math import comb; comb(5, 2)", "10", True),
        ("__name__", "'__main__'", True),
    ],
)
def test_answers_like_a_repl(session: SandboxSession, code: str, output: str, ok: bool) -> None:
    result = session.run(code)
    assert (result.output.replace("__main__.E", "E"), result.ok) == (output, ok)
    assert 0 <= result.seconds < LIMITS.wall_seconds


def test_names_persist_within_a_session_and_not_between(tool: PythonTool) -> None:
    with tool.open() as one, tool.open() as two:
        one.run("x = 41\nimport math\nmath.pi = 3\nopen('note', 'w').write('mine')")
        assert one.run("x + 1").output == "42"
        assert one.run("_ + 1").output == "43"
        assert two.run("x").output.startswith("NameError")
        assert two.run("import math; math.pi").output.startswith("3.14")
        assert two.run("import os; os.path.exists('note')").output == "False"


def test_a_hundred_interleaved_sessions_do_not_mix(tool: PythonTool) -> None:
    sessions = [tool.open() for _ in range(100)]
    for i, session in enumerate(sessions):
        assert session.run(f"x = {i}; open('f', 'w').write('{i}')").ok
    for i, session in reversed(list(enumerate(sessions))):
        assert session.run("x, open('f').read()").output == f"({i}, '{i}')"
    for session in sessions:
        session.close()


def test_threads(tool: PythonTool) -> None:
    def episode(i: int) -> bool:
        with tool.open() as session:
            session.run(f"x = {i}")
            return all(session.run("x + 1").output == str(i + 1) for _ in range(20))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(episode, range(40)))


def test_threads_of_one_session_take_turns(session: SandboxSession) -> None:
    session.run("n = 0")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: session.run("n += 1"), range(40)))
    assert session.run("n").output == "40"


def test_async_calls_leave_the_event_loop_free(tool: PythonTool) -> None:
    async def scene() -> tuple[list[str], int]:
        sessions = [patient.open() for _ in range(8)]
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.005)
                ticks += 1

        ticker = asyncio.create_task(tick())
        results = await asyncio.gather(*(s.arun(f"import time; time.sleep(0.5); {i}") for i, s in enumerate(sessions)))
        ticker.cancel()
        for session in sessions:
            session.close()
        return [r.output for r in results], ticks

    with PythonTool(SandboxLimits(wall_seconds=60), isolation=tool.isolation) as patient:
        outputs, ticks = asyncio.run(scene())
    assert outputs == [str(i) for i in range(8)]
    assert ticks >= 10


def test_async_time_limit_and_recovery(session: SandboxSession) -> None:
    async def scene() -> list[str]:
        return [(await session.arun(code)).output for code in ("x = 1", "while True: pass", "x")]

    first, second, third = asyncio.run(scene())
    assert (first, third) == ("", "NameError: name 'x' is not defined")
    assert second.startswith("error: time limit of 4 s")


def test_a_cancelled_call_never_answers_the_next_one(session: SandboxSession) -> None:
    async def scene() -> str:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.arun("import time; time.sleep(0.3); 'late'"), 0.05)
        return (await session.arun("'fresh'")).output

    assert asyncio.run(scene()) == "'fresh'"


def test_sync_and_async_mix(session: SandboxSession) -> None:
    session.run("x = 1")
    assert asyncio.run(session.arun("x")).output == "1"
    assert session.run("x").output == "1"


def test_close_is_final_and_idempotent(tool: PythonTool) -> None:
    session = tool.open()
    session.close()
    session.close()
    with pytest.raises(ToolFault, match="closed"):
        session.run("1")


def test_close_ends_a_running_call(tool: PythonTool) -> None:
    with PythonTool(SandboxLimits(wall_seconds=120, cpu_seconds=120), isolation=tool.isolation, spare=0) as own:
        session = own.open()
        session.run("1")
        threading.Timer(0.05, session.close).start()
        began = time.monotonic()
        with pytest.raises(ToolFault, match="closed"):
            session.run("while True: pass")
        assert time.monotonic() - began < 60, "the call went on until its own time limit"


def test_a_forgotten_session_is_buried_by_the_next_open(tool: PythonTool) -> None:
    session = tool.open()
    session.run("1")
    number = session._worker.number
    del session
    gc.collect()
    assert [worker.number for worker in tool._workers_to_end] == [number]
    tool.open().close()
    assert not tool._workers_to_end


def test_interpreters_of_the_next_batch_start_when_those_of_the_last_have_ended(tool: PythonTool) -> None:
    with PythonTool(LIMITS, isolation=tool.isolation) as own:
        batch = [own.open() for _ in range(6)]
        assert all(session.run(f"x = {n}; x").output == str(n) for n, session in enumerate(batch))
        before = {session._worker.number for session in batch}
        for session in batch:
            session.close()
        assert eventually(lambda: len(own._idle_workers) == 6 and not own._starting)
        assert all(worker.ready and not worker.used for worker in list(own._idle_workers)[-3:])
        fresh = [own.open() for _ in range(6)]
        assert not before & {session._worker.number for session in fresh}, "no interpreter serves two episodes"
        assert all(session.run("x").output == "NameError: name 'x' is not defined" for session in fresh)
        assert len(own._idle_workers) <= 3, "those in use are not replaced while they are"
        own._zygote._process.kill()
        own._zygote._process.wait()
        with own.open() as session:  # one that waited and died with the pool: nobody's names are lost
            assert session.run("1").output == "1"


def test_no_more_interpreters_wait_than_may(tool: PythonTool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnwise.tools.python.READY", 0)
    with PythonTool(LIMITS, isolation=tool.isolation, spare=0) as own:
        for session in [own.open() for _ in range(3)]:
            session.close()
        assert not own._starting and not own._idle_workers


def test_a_dead_pool_is_replaced_and_its_death_is_no_answer_to_the_model(tool: PythonTool) -> None:
    with PythonTool(LIMITS, isolation=tool.isolation, spare=0) as own:
        session = own.open()
        session.run("x = 1")
        own._zygote._process.kill()
        own._zygote._process.wait()
        deadline = time.monotonic() + 60
        with pytest.raises(ToolFault, match="has ended"):
            while session.run("x").output == "1":  # death takes a moment to reach it
                assert time.monotonic() < deadline
        assert session.run("2").output == "2"


def test_a_forked_host_does_not_touch_its_parents_sessions(tool: PythonTool) -> None:
    session = tool.open()
    session.run("x = 5")
    pid = os.fork()
    if pid == 0:
        try:
            session.run("x")
        except ToolFault:
            os._exit(0 if session.run("6").output == "6" else 1)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    assert session.run("x").output == "5"
    session.close()


def test_wrong_settings_raise() -> None:
    with pytest.raises(SettingError, match="did you mean 'bubblewrap'"):
        PythonTool(isolation="bublewrap")
    with pytest.raises(SettingError, match="wall_seconds"):
        SandboxLimits(wall_seconds=0)
    with pytest.raises(SettingError, match="memory_bytes"):
        SandboxLimits(memory_bytes=1000)


def test_a_forced_isolation_that_is_missing_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    for name in ("bubblewrap", "namespaces"):
        with pytest.raises(ToolFault, match="not installed"):
            PythonTool(isolation=name).open()


def test_falls_back_to_weaker_isolation_and_the_last_one_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr("turnwise.tools.guest.landlock.version", lambda: 0)
    with pytest.warns(UserWarning, match="NOT isolated.*not installed"), PythonTool(LIMITS) as tool:
        assert tool.isolation == "limits"


def test_describe_is_one_sentence(tool: PythonTool) -> None:
    assert tool.describe().startswith(f"{tool.isolation}: stops ")
    assert "does not stop" in tool.describe()


AS_NOBODY = """
import sys, warnings
warnings.simplefilter("ignore")
from turnwise.tools import PythonTool
from turnwise.errors import ToolFault
try:
    with PythonTool(isolation=sys.argv[1]) as tool, tool.open() as session:
        print(session.run("import os; os.getuid() != 0, 6 * 7").output)
except ToolFault as fault:
    print("unavailable", fault)
"""


def test_root_is_not_needed(tool: PythonTool) -> None:
    python = "/usr/bin/python3"
    if os.getuid() != 0 or not os.path.exists(python):
        pytest.skip("needs root, to become somebody else, and a Python that everybody may run")
    user = {"user": 65534, "group": 65534, "extra_groups": [], "cwd": "/", "env": {"PYTHONPATH": SOURCE}}
    if subprocess.run([python, "-B", "-c", "import turnwise.tools"], capture_output=True, **user).returncode:
        pytest.skip("that Python cannot import the package")
    out = subprocess.run([python, "-B", "-c", AS_NOBODY, tool.isolation], capture_output=True, text=True, **user)
    if out.stdout.startswith("unavailable"):
        pytest.skip(out.stdout)
    assert out.stdout == "(True, 42)\n", out.stderr


def test_environments_share_one_pool() -> None:
    assert python_tool(LIMITS) is python_tool(LIMITS)


def test_a_warm_call_is_fast() -> None:
    session = use("limits").open()
    session.run("1")
    fastest = min(session.run("1 + 1").seconds for _ in range(200))
    session.close()
    assert fastest < 0.05  # about 0.15 ms; a process that were started anew would take more, however busy the machine


LEAVING = {
    "with an open session": "session = python_tool().open(); session.run('1')",
    "after a close": "session = python_tool().open(); session.run('1'); session.close()",
    "after sessions were forgotten": "for _ in range(3): python_tool().open().run('1')",
    "after their parent died": "session = python_tool().open(); python_tool()._zygote._process.kill(); session.run('1')",
    "from a forked copy too": "python_tool().open().run('1'); import os; pid = os.fork(); pid and os.waitpid(pid, 0)",
}


@pytest.mark.thorough
@pytest.mark.parametrize("how", LEAVING)
def test_a_process_that_ends_leaves_no_socket_and_no_worker_behind(how: str) -> None:
    code = f"from turnwise.tools import python_tool\n{LEAVING[how]}\nprint(python_tool()._zygote._process.pid)"
    command = [sys.executable, "-X", "dev", "-W", "ignore::UserWarning", "-c", code]
    out = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (out.returncode, out.stderr) == (0, "")
    assert not any(Path(f"/proc/{pid}").exists() for pid in out.stdout.split())
