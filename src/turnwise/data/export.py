"""Export of episodes as dataset rows: preference pairs, and successful episodes as demonstrations.

Knows finished groups; no tokens and no environment.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from turnwise.core.records import Group, Message, Origin, Status, Trajectory
from turnwise.errors import SettingError

Row = dict[str, Any]
EXPORTED_STATES = ("trained", "finished")  # of groups in a ledger


def pairs(group: Group) -> Iterator[Row]:
    """The best and the worst trajectory of a group, if their rewards differ; their common prefix is the prompt."""
    members = _completed(group)
    if len(members) < 2:
        return
    best, worst = max(members, key=lambda t: t.reward), min(members, key=lambda t: t.reward)
    shared = divergence(best.messages, worst.messages)
    if best.reward > worst.reward and shared and best.messages[shared:] != worst.messages[shared:]:
        yield {
            "prompt": list(best.messages[:shared]),
            "chosen": list(best.messages[shared:]),
            "rejected": list(worst.messages[shared:]),
            "reward_chosen": best.reward,
            "reward_rejected": worst.reward,
            "task": group.task.key,
        }


def demos(group: Group) -> Iterator[Row]:
    """Every successful trajectory; without a success flag, every one with a positive reward."""
    for t in _completed(group):
        if t.reward > 0 if t.success is None else t.success:
            yield {"messages": list(t.messages), "reward": t.reward, "task": group.task.key}


FORMS: dict[str, Callable[[Group], Iterator[Row]]] = {"pairs": pairs, "demos": demos}


def divergence(left: Sequence[Message], right: Sequence[Message]) -> int:
    """The index at which two dialogues diverge: the last one up to which they agree and where both have an assistant
    message; 0 if there is none."""
    common = next((n for n, (a, b) in enumerate(zip(left, right)) if a != b), min(len(left), len(right)))
    is_turn = lambda messages, n: n < len(messages) and messages[n]["role"] == "assistant"  # noqa: E731
    return next((n for n in range(common, 0, -1) if is_turn(left, n) and is_turn(right, n)), 0)


def _completed(group: Group) -> list[Trajectory]:
    unforked = (t for t in group.trajectories if t.origin != Origin.REPLAY and t.fork is None)
    return [t for t in unforked if t.status != Status.FAILED and any(m["role"] == "assistant" for m in t.messages)]


def write_rows(groups: Iterator[Group], form: str, path: str | Path, tools: Sequence[dict[str, Any]] = ()) -> int:
    """Write the rows of all groups as JSON Lines to a new file; returns how many there are."""
    path = Path(path)
    if path.exists():
        raise SettingError(f"{path} exists and will not be overwritten; name another file")
    if not path.parent.is_dir():
        raise SettingError(f"there is no folder {path.parent}; make it first")
    extra = {"tools": list(tools)} if tools else {}
    rows = [json.dumps({**row, **extra}) for group in groups for row in FORMS[form](group)]
    if not rows:
        needed = "two episodes with different rewards" if form == "pairs" else "a success"
        raise SettingError(f"no task was played with {needed}, so there is nothing to write")
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return len(rows)
