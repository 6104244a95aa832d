"""The pools the tests of tools share: one per isolation, or the reason why there is none."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable

import pytest

from turnwise.errors import ToolFault
from turnwise.tools import PythonTool, SandboxLimits
from turnwise.tools.isolation import ISOLATIONS

LIMITS = SandboxLimits(wall_seconds=4.0, cpu_seconds=20, memory_bytes=256 << 20, processes=8, scratch_bytes=4 << 20)
NAMES = [isolation.name for isolation in ISOLATIONS]
ISOLATING = [isolation.name for isolation in ISOLATIONS if isolation.seccomp]


@functools.cache
def shared(name: str) -> PythonTool | str:
    """One pool per isolation for the whole run; or why there is none."""
    tool = PythonTool(LIMITS, isolation=name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tool.describe()
    except ToolFault as fault:
        return str(fault)
    return tool


def use(name: str) -> PythonTool:
    found = shared(name)
    if isinstance(found, str):
        pytest.skip(found)
    return found


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether the condition holds before a deadline that only a defect reaches: a busy machine may need seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
