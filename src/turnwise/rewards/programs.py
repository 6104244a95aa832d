"""Programs against tests, in the sandbox: no program gives its own verdict, and none has what is expected in its process.

A program that reads and prints is compared here, with what it wrote. A test in Python runs in a second sandboxed process, and
asks the program's for plain data (``exam``). Knows neither answers nor rewards.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import time
from dataclasses import dataclass
from typing import Any

from turnwise.errors import ToolFault
from turnwise.tools import ExecutionResult, PythonTool, SandboxLimits, SandboxSession, python_tool

MAX_TESTS = 64
OUTPUT_BYTES, SOURCE_BYTES = 4 << 20, 32 << 20  # an answer is sent on as a literal, at most 4 bytes for each of its own
EXAM = "__import__('sys').modules['turnwise.tools.guest.exam']"  # loaded before a session begins; leaves no name


def run_tests(program: str, tests: Any, seconds: float) -> tuple[int, int]:
    """How many tests the program passes, and how many were run: of more than ``MAX_TESTS``, some that a program cannot foresee.
    Each has a new process of the program.

    Raises ``ValueError`` for a test that says nothing of a program, or passes more than plain data to it."""
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(ValueError):  # many data sets store a list or an object as text
            tests = json.loads(tests)
    limits = SandboxLimits(wall_seconds=seconds, output_bytes=OUTPUT_BYTES, source_bytes=SOURCE_BYTES)
    pool = python_tool(limits)
    pick = functools.partial(_some, program)
    if isinstance(tests, dict):
        inputs, outputs = (list(tests.get(name, ())) for name in ("inputs", "outputs"))
        if len(inputs) != len(outputs):
            raise ValueError(
                f"the tests have {len(inputs)} inputs and {len(outputs)} outputs; write one output for each input"
            )
        pairs = pick(list(zip(inputs, outputs)))
        return sum(_prints(pool, program, str(i), str(o)) for i, o in pairs), len(pairs)
    texts = [tests] if isinstance(tests, str) else pick([str(test) for test in tests])
    return sum(_passes(pool, program, test) for test in texts), len(texts)


def _some(program: str, tests: list[Any]) -> list[Any]:
    """All tests, or ``MAX_TESTS`` of them drawn by the program's text: one that passes the first ones alone is found out."""
    return tests if len(tests) <= MAX_TESTS else random.Random(program).sample(tests, MAX_TESTS)


def _prints(pool: PythonTool, program: str, text: str, expected: str) -> bool:
    with pool.open() as session:
        result = session.run(f"{EXAM}.read_and_print({program!r}, {text!r})")
    return result.ok and result.output.split() == expected.split()  # spaces and ends of lines do not count


def _passes(pool: PythonTool, program: str, test: str) -> bool:
    deadline = time.monotonic() + 2 * pool.limits.wall_seconds  # to load the program, and for all calls together
    with pool.open() as session:
        if not session.run(f"_exam = {EXAM}.Program({program!r}, globals())").ok:
            return False
        examiner, said = _begin(pool, test)
        while said.ok and said.output.startswith("[") and time.monotonic() < deadline:
            answer = session.run(f"_exam.answer({said.output!r})")
            if not answer.ok:
                break
            said = examiner.session.run(f"_exam.next({answer.output!r})")
    if said.ok and not said.output.startswith("["):
        _idle(pool).append(examiner)
    else:  # a test that waits for an answer would wait for ever
        examiner.session.close()
    if said.ok and said.output.startswith("refused: "):
        raise ValueError(f"the test {test[:200]!r} cannot be used: {said.output[9:]}")
    return said.ok and said.output == "passed"


@dataclass(frozen=True)
class ExaminerSession:
    """A session that runs tests, one after another: no line of a program runs there, so it need not be a new one each time."""

    session: SandboxSession
    ends: float  # when to open another, long before its processor time is used up


@functools.cache
def _idle(pool: PythonTool) -> list[ExaminerSession]:
    return []


def _begin(pool: PythonTool, test: str) -> tuple[ExaminerSession, ExecutionResult]:
    """An examiner that has begun a test, and its first word. One that waited may have ended with its pool: then a new one."""
    idle, begin = _idle(pool), f"_exam = {EXAM}.Examiner({test!r})\n_exam.next()"
    while idle:
        examiner = idle.pop()
        with contextlib.suppress(ToolFault):
            if time.monotonic() < examiner.ends and (said := examiner.session.run(begin)).ok:
                return examiner, said
        examiner.session.close()
    examiner = ExaminerSession(pool.open(), time.monotonic() + pool.limits.cpu_seconds / 2)
    return examiner, examiner.session.run(begin)
