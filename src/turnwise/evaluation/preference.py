"""How a policy ranks held-back pairs: does it find the better answer likelier than the worse one? Knows no objective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.core.batch import pack
from turnwise.core.levels import TRAJECTORY
from turnwise.core.protocols import Learner
from turnwise.core.records import Group
from turnwise.core.signals import Signal
from turnwise.maths.statistics import wilson

AT_ONCE = 64  # groups


def ranking(learner: Learner, groups: Sequence[Group]) -> dict[str, float]:
    """Shares of pairs in which the better answer has the higher log-probability, as a whole and a token; and its mean."""
    rows: list[tuple[str, float, float, float]] = []
    for i in range(0, len(groups), AT_ONCE):
        batch = pack(groups[i : i + AT_ONCE])
        logp = learner.measure(batch, frozenset({Signal.LOGP}))[Signal.LOGP]
        owners = [g.id for g in groups[i : i + AT_ONCE] for _ in g.trajectories]
        chosen = [float(t.facts.get("chosen", 1.0)) for g in groups[i : i + AT_ONCE] for t in g.trajectories]
        plain = [not t.facts.get("revises") for g in groups[i : i + AT_ONCE] for t in g.trajectories]
        columns = (logp.sum(TRAJECTORY).x.tolist(), logp.mean(TRAJECTORY).x.tolist())
        rows += [row for row, answers in zip(zip(owners, chosen, *columns), plain) if answers]
    if not rows:
        return {}
    better = {key: (whole, each) for key, chosen, whole, each in rows if chosen}
    worse = {key: (whole, each) for key, chosen, whole, each in rows if not chosen}
    liked = [each for _, chosen, _, each in rows if chosen]
    found = {"groups": float(len(groups)), "logp": sum(liked) / max(1, len(liked))}
    pairs = [(better[key], worse[key]) for key in better if key in worse]
    if pairs:
        found["accuracy"] = sum(good[0] > bad[0] for good, bad in pairs) / len(pairs)
        found["accuracy_per_token"] = sum(good[1] > bad[1] for good, bad in pairs) / len(pairs)
    return found


def brief(found: Mapping[str, float]) -> dict[str, Any]:
    """A ranking in the words of an evaluation: a pair ranked right is a task solved."""
    pairs = int(found["groups"])
    bounds = wilson(found["accuracy"] * pairs, pairs)
    counts = dict.fromkeys(("turns", "tool_calls", "tool_errors"), 0.0)
    interval = [bounds.low, bounds.high]
    return {
        "success": found["accuracy"],
        "interval": interval,
        "tasks": pairs,
        "samples": 1,
        **counts,
        "by_difficulty": {},
    }
