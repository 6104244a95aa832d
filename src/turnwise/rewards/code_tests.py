"""Runs a program that a model wrote against tests, in the sandbox of ``turnwise.tools``.

A test passes only if it runs to its end and prints a word that the program cannot know before. Knows no reward.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from turnwise.tools import SandboxLimits, python_tool

MAX_TESTS = 64
READ_AND_PRINT = """
import io, sys
sys.stdin = io.StringIO({text!r})
_out = sys.stdout = io.StringIO()
try:
    exec(compile({program!r}, "program", "exec"), {{"__name__": "__main__"}})
except SystemExit:
    pass
sys.stdout = sys.__stdout__
"""


def run_tests(program: str, tests: Any, seconds: float) -> tuple[int, int]:
    """How many tests the program passes, and how many there are."""
    tests = _parsed(tests)
    limits = SandboxLimits(wall_seconds=seconds)
    if isinstance(tests, dict):
        cases = list(zip(tests.get("inputs", ()), tests.get("outputs", ())))[:MAX_TESTS]
        return sum(_prints(program, str(i), str(o), limits) for i, o in cases), len(cases)
    texts: Sequence[str] = [tests] if isinstance(tests, str) else [str(test) for test in tests][:MAX_TESTS]
    return sum(_passes(program, test, limits) for test in texts), len(texts)


def _parsed(tests: Any) -> Any:
    """A text that holds a JSON list or object, as many data sets store tests, is read as one."""
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(tests)
        except ValueError:
            return tests
    return tests


def _passes(program: str, test: str, limits: SandboxLimits) -> bool:
    word = secrets.token_hex(8)
    with python_tool(limits).open() as session:
        if not session.run(program).ok:
            return False
        result = session.run(f"{test}\nprint({word!r})")
        return result.ok and word in result.output


def _prints(program: str, text: str, expected: str, limits: SandboxLimits) -> bool:
    """Whether the program prints ``expected`` when it reads ``text``; spaces at the ends of lines do not count."""
    with python_tool(limits).open() as session:
        if not session.run(READ_AND_PRINT.format(text=text, program=program)).ok:
            return False
        result = session.run(f"_out.getvalue().split() == {expected.split()!r}")
        return result.ok and result.output.strip() == "True"
