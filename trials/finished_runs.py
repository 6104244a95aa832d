"""The command that trains; of a finished run its success and its accounts. Starts nothing."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

COMMAND = [sys.executable, "-m", "turnwise.cli.main"]


def success(run: Path) -> tuple[float, list[float]]:
    """Success of the final evaluation, and its 95 % interval."""
    after = json.loads((run / "summary.json").read_text())["success_after"]
    return after["success"], [round(bound, 3) for bound in after["interval"]]


def agree(ours: tuple[float, list[float]], theirs: tuple[float, list[float]]) -> bool:
    """Whether one of two success rates lies in the interval of the other."""
    return theirs[1][0] <= ours[0] <= theirs[1][1] or ours[1][0] <= theirs[0] <= ours[1][1]


def trained(run: Path) -> dict[int, int]:
    """How many groups each step was trained on."""
    from turnwise.store.ledger import SqliteLedger

    with SqliteLedger(run / "ledger.sqlite", readonly=True) as ledger:
        return Counter(group.step for group in ledger.groups() if group.state == "trained")


def audit(run: Path, by_step: Mapping[int, int], staleness: int) -> tuple[str, dict[str, int]]:
    """What is wrong with the accounts of a finished run (empty: nothing), and its counts. ``by_step``: of how many groups each
    step must have been trained; ``staleness``: how many versions old a token may be."""
    from turnwise.store.ledger import SqliteLedger

    with SqliteLedger(run / "ledger.sqlite", readonly=True) as ledger:
        counts = ledger.group_counts()
        groups = [group for group in ledger.groups() if group.state == "trained"]
        ages = [
            group.step - version
            for group in groups
            for trajectory in ledger.group(group.group_id).trajectories
            for turn in trajectory.turns
            for version in turn.version
        ]
    with contextlib.closing(sqlite3.connect(f"file:{run / 'ledger.sqlite'}?mode=ro", uri=True)) as database:
        rows = database.execute("SELECT id, state, reason, void, dropped_at FROM groups").fetchall()
        (end,) = database.execute("SELECT max(trained_at) FROM groups WHERE void = 0").fetchone()
    undone = [row for row in rows if row[3]]
    dropped = [row for row in rows if row[1] == "dropped" and not row[3]]
    left = [row for row in rows if row[1] in ("in_flight", "finished")]
    facts = {
        "issued": counts.issued, "trained": len(groups), "dropped": len(dropped), "reissued": len(undone), "left": len(left),
        "tokens": len(ages), "oldest": max(ages, default=0),
    }  # fmt: skip
    if counts.issued != len(groups) + len(dropped) + len(undone) + len(left):
        return f"issued groups do not add up: {facts}", facts
    if any(not row[2] for row in rows if row[1] == "dropped"):
        return "a group was dropped without a reason", facts
    kept = Counter(_number(row[0]) for row in rows if not row[3])
    if twice := [number for number, count in kept.items() if count > 1]:
        return f"the draws {twice[:5]} have more than one account", facts
    owed = {_number(row[0]) for row in undone if row[4] < end}  # a resume after the last step issues nothing again
    lost = [n for n in owed if n not in kept and n < max(kept)]
    if lost:
        return f"the draws {lost[:5]} were undone and never issued again", facts
    if (counted := Counter(group.step for group in groups)) != by_step:
        return f"groups trained on by step: {dict(counted)}", facts
    if not ages or min(ages) < 0 or max(ages) > staleness:
        return f"tokens are {min(ages, default=0)} to {max(ages, default=0)} versions old, allowed: {staleness}", facts
    failed = json.loads((run / "summary.json").read_text())["success_after"]["failed"]
    if failed:
        return f"{failed} episodes of the final evaluation failed", facts
    logged = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    return ("" if logged == list(range(1, len(by_step) + 1)) else f"steps logged: {logged}"), facts


def _number(key: str) -> int:
    return int(key.split("~")[0])
