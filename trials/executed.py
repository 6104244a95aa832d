"""``python -m trials.executed [pytest's arguments]``: which modules of the package does ``make test`` never enter?

Runs the tests of ``make test`` (or those given) with a watch over function calls, and lists every module that has functions of
which none was called. The status is 1 if there are any but those of ``ELSEWHERE``. Counts what test processes call themselves,
not what their child processes do. With Python 3.12 the watch costs nothing; before, it doubles the time.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

SOURCE = Path(__file__).resolve().parent.parent / "src" / "turnwise"
FOLDER = "TURNWISE_EXECUTED"  # where each test process leaves the files it entered
ELSEWHERE = ("engines/kernels/", "engines/remote/vllm", "environments/families/", "integrations/trl", "integrations/verl")
"""Needs a GPU, vLLM, or a package that may be absent."""
entered: set[str] = set()


def watch() -> None:
    """Note the file of every function that is called from now on."""
    if sys.version_info >= (3, 12):
        events = sys.monitoring
        events.use_tool_id(events.COVERAGE_ID, "executed")

        def begin(code: CodeType, _: int) -> Any:
            if code.co_name != "<module>":
                entered.add(code.co_filename)
            return events.DISABLE  # once for each function is enough

        events.register_callback(events.COVERAGE_ID, events.events.PY_START, begin)
        events.set_events(events.COVERAGE_ID, events.events.PY_START)
        return

    def call(frame: FrameType, event: str, _: object) -> None:
        if frame.f_code.co_name != "<module>":
            entered.add(frame.f_code.co_filename)

    threading.settrace(call)
    sys.settrace(call)


# ------------------------------------------------------------- as a plugin of pytest


def pytest_configure() -> None:
    if os.environ.get(FOLDER):
        watch()


def pytest_sessionfinish() -> None:
    if folder := os.environ.get(FOLDER):
        mine = sorted(name for name in entered if name.startswith(str(SOURCE)))
        (Path(folder) / f"{os.getpid()}.txt").write_text("\n".join(mine), encoding="utf-8")


# --------------------------------------------------------------------- as a command


def has_functions(path: Path) -> bool:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in ast.walk(tree))


def never_entered(folder: Path) -> list[str]:
    """Modules with functions of which no test process called any."""
    seen = {line for part in folder.glob("*.txt") for line in part.read_text(encoding="utf-8").splitlines()}
    return [
        path.relative_to(SOURCE).as_posix()
        for path in sorted(SOURCE.rglob("*.py"))
        if str(path) not in seen and has_functions(path)
    ]


def main() -> int:
    given = sys.argv[1:] or ["-n", "auto", "--maxprocesses", "8", "--dist", "worksteal", "-m", "not thorough"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-p", "trials.executed", *given]
        subprocess.run(command, env={**os.environ, FOLDER: folder})
        missed = never_entered(Path(folder))
    for name in missed:
        print(f"never entered: {name}" + (" (elsewhere)" if name.startswith(ELSEWHERE) else ""))
    return 1 if any(not name.startswith(ELSEWHERE) for name in missed) else 0


if __name__ == "__main__":
    sys.exit(main())
