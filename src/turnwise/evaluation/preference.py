"""Preference accuracy on held-out pairs: is the better answer likelier than the worse one? Knows no objective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.core.batch import pack
from turnwise.core.levels import TRAJECTORY
from turnwise.core.protocols import Learner
from turnwise.core.records import Group
from turnwise.core.signals import Signal
from turnwise.maths.statistics import wilson

GROUPS_PER_BATCH = 64
NOT_EVALUATED: Mapping[str, Any] = {"success": None, "tasks": 0, "samples": 0, "by_difficulty": {}}


def rank_pairs(learner: Learner, groups: Sequence[Group]) -> dict[str, float]:
    """Share of pairs whose better answer has the higher log-probability, in total and per token, and its mean log-probability."""
    rows: list[tuple[str, float, float, float]] = []
    for i in range(0, len(groups), GROUPS_PER_BATCH):
        batch = pack(groups[i : i + GROUPS_PER_BATCH])
        logp = learner.measure(batch, frozenset({Signal.LOGP}))[Signal.LOGP]
        owners = [g.id for g in groups[i : i + GROUPS_PER_BATCH] for _ in g.trajectories]
        chosen = [float(t.facts.get("chosen", 1.0)) for g in groups[i : i + GROUPS_PER_BATCH] for t in g.trajectories]
        originals = [not t.facts.get("revises") for g in groups[i : i + GROUPS_PER_BATCH] for t in g.trajectories]
        columns = (logp.sum(TRAJECTORY).x.tolist(), logp.mean(TRAJECTORY).x.tolist())
        rows += [row for row, original in zip(zip(owners, chosen, *columns), originals) if original]
    if not rows:
        return {}
    better = {key: (whole, each) for key, chosen, whole, each in rows if chosen}
    worse = {key: (whole, each) for key, chosen, whole, each in rows if not chosen}
    chosen_logp = [each for _, chosen, _, each in rows if chosen]
    metrics = {"groups": float(len(groups)), "logp": sum(chosen_logp) / max(1, len(chosen_logp))}
    pairs = [(better[key], worse[key]) for key in better if key in worse]
    if pairs:
        metrics["accuracy"] = sum(good[0] > bad[0] for good, bad in pairs) / len(pairs)
        metrics["accuracy_per_token"] = sum(good[1] > bad[1] for good, bad in pairs) / len(pairs)
    return metrics


def as_evaluation(ranking: Mapping[str, float]) -> dict[str, Any]:
    """A ranking in the form of an evaluation summary: a pair ranked right counts as a task solved. Held-out rows that are no
    pairs have a log-probability and no success."""
    if "accuracy" not in ranking:
        return dict(NOT_EVALUATED)
    pairs = int(ranking["groups"])
    bounds = wilson(ranking["accuracy"] * pairs, pairs)
    counts = dict.fromkeys(("turns", "tool_calls", "tool_errors"), 0.0)
    interval = [bounds.low, bounds.high]
    return {
        "success": ranking["accuracy"],
        "interval": interval,
        "tasks": pairs,
        "samples": 1,
        **counts,
        "by_difficulty": {},
    }
