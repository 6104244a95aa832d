"""Episodes as rows for others, and for us: pairs of a better and a worse one, and successes as demonstrations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from turnwise.core.records import Group, Message, Origin, Status, Trajectory
from turnwise.errors import SettingError

Row = dict[str, Any]


def pairs(group: Group) -> Iterator[Row]:
    """The best and the worst of a group, if their rewards differ; what both begin with is the prompt."""
    members = _whole(group)
    if len(members) < 2:
        return
    best, worst = max(members, key=lambda t: t.reward), min(members, key=lambda t: t.reward)
    shared = parting(best.messages, worst.messages)
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
    """Every success (without a verdict: every rewarded episode)."""
    for t in _whole(group):
        if t.reward > 0 if t.success is None else t.success:
            yield {"messages": list(t.messages), "reward": t.reward, "task": group.task.key}


FORMS: dict[str, Callable[[Group], Iterator[Row]]] = {"pairs": pairs, "demos": demos}


def parting(left: Sequence[Message], right: Sequence[Message]) -> int:
    """Where two dialogues part: the last place up to which they agree and where both let the assistant speak; 0: nowhere."""
    alike = next((n for n, (a, b) in enumerate(zip(left, right)) if a != b), min(len(left), len(right)))
    speaks = lambda said, n: n < len(said) and said[n]["role"] == "assistant"  # noqa: E731
    return next((n for n in range(alike, 0, -1) if speaks(left, n) and speaks(right, n)), 0)


def _whole(group: Group) -> list[Trajectory]:
    own = (t for t in group.trajectories if t.origin != Origin.REPLAY and t.fork is None)
    return [t for t in own if t.status != Status.FAILED and any(m["role"] == "assistant" for m in t.messages)]


def write_rows(groups: Iterator[Group], form: str, path: str | Path, tools: Sequence[dict[str, Any]] = ()) -> int:
    """The rows of all groups as JSON Lines in a new file; how many there are."""
    path = Path(path)
    if path.exists():
        raise SettingError(f"{path} exists and will not be overwritten; name another file")
    if not path.parent.is_dir():
        raise SettingError(f"there is no folder {path.parent}; make it first")
    shown = {"tools": list(tools)} if tools else {}
    rows = [json.dumps({**row, **shown}) for group in groups for row in FORMS[form](group)]
    if not rows:
        what = "two episodes with different rewards" if form == "pairs" else "a success"
        raise SettingError(f"no task was played with {what}, so there is nothing to write")
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return len(rows)
