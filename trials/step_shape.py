"""How many files and functions of ``src/turnwise`` one training step executes: the path that a reader of a step walks.

    python -m trials.step_shape            # the two numbers
    python -m trials.step_shape --rooms    # and where they come from

A small GRPO run on a CPU. Counted is everything that Python calls between the end of the first step and the end of the second,
in any thread but that of the watch, which looks once a second at whatever happens then.
Comprehensions and generator expressions are counted apart: whether they are calls depends on the release of Python.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import turnwise

ROOT = str(Path(turnwise.__file__).parent)
SMALL: dict[str, Any] = {
    "method": "grpo", "env": "calculator", "hidden": 32, "layers": 1, "vocabulary": 320, "cold_steps": 1, "cold_batch": 4,
    "steps": 3, "groups": 2, "group_size": 3, "max_tokens": 12, "context": 320, "eval_tasks": 0, "trackers": [], "threads": 1,
    "quiet": True,
}  # fmt: skip
WATCH = "turnwise-run-watch"
FIRST, LAST = 1, 2  # counted after the first of these steps has ended, until the second has


def executed() -> set[CodeType]:
    """The code of one training step."""
    called: set[CodeType] = set()
    step = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if step == FIRST and event == "call" and code not in called and code.co_filename.startswith(ROOT):
            if threading.current_thread().name != WATCH:
                called.add(code)

    def listen(event: str, facts: Any) -> None:
        nonlocal step
        if event == "step" and facts.get("stage") == "learn":
            step = facts["step"]
            if step == LAST:  # what follows need not be slow
                threading.setprofile(None)
                sys.setprofile(None)

    threading.setprofile(note)  # threads that begin later: the watch, writers, tools
    sys.setprofile(note)
    with tempfile.TemporaryDirectory() as folder:
        turnwise.train(**SMALL, out=folder, name="run", listen=listen)
    return called


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", action="store_true", help="files and functions of each room")
    parser.add_argument("--files", action="store_true", help="functions of each file")
    given = parser.parse_args()
    code = executed()
    functions = [part for part in code if not part.co_name.endswith(("comp>", "<genexpr>"))]
    files = Counter(part.co_filename.removeprefix(f"{ROOT}/") for part in functions)
    rest = len(code) - len(functions)
    print(f"one training step executes {len(files)} files, {len(functions)} functions and {rest} comprehensions")
    if given.rooms:
        rooms = Counter[str]()
        for name, count in files.items():
            rooms[name.split("/")[0]] += count
        for room, count in rooms.most_common():
            print(f"{room:14} {sum(name.startswith(f'{room}/') for name in files):4} files {count:5} functions")
    if given.files:
        for name, count in files.most_common():
            print(f"{count:5} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
