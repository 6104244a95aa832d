"""The command that trains, and what a finished run says of its success. Starts nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

COMMAND = [sys.executable, "-m", "turnwise.cli.main"]


def success(run: Path) -> tuple[float, list[float]]:
    """Success of the final evaluation, and its 95 % interval."""
    after = json.loads((run / "summary.json").read_text())["success_after"]
    return after["success"], [round(bound, 3) for bound in after["interval"]]


def agree(ours: tuple[float, list[float]], theirs: tuple[float, list[float]]) -> bool:
    """Whether one of two success rates lies in the interval of the other."""
    return theirs[1][0] <= ours[0] <= theirs[1][1] or ours[1][0] <= theirs[0] <= ours[1][1]
