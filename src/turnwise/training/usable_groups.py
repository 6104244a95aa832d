"""Which part of a finished group can be trained on, and why the rest cannot. Knows neither the ledger nor a recipe."""

from __future__ import annotations

from dataclasses import replace

from turnwise.core.records import Group, Status, Trajectory
from turnwise.rollout.scoring import MAX_REWARD


def usable(group: Group) -> tuple[Group, list[str]]:
    """The part of a group that can be trained on, and why the rest cannot. A fork whose parent failed has lost its prefix."""
    good: list[Trajectory] = []
    kept = [t for t in group.trajectories if not _why_unusable(t)]
    while len(kept) != len(good):  # a dropped fork drops its own forks in the next pass
        good, ids = kept, {t.id for t in kept}
        kept = [t for t in good if t.fork is None or t.fork.parent in ids]
    if len(good) == len(group.trajectories):
        return group, []
    ids = {t.id for t in good}
    reasons = [_why_unusable(t) or "it forks from one that failed" for t in group.trajectories if t.id not in ids]
    return replace(group, trajectories=tuple(good)), reasons


def _why_unusable(trajectory: Trajectory) -> str:
    if trajectory.status == Status.FAILED:
        return trajectory.reason or "it failed without a reason"
    if not trajectory.sampled:
        return trajectory.reason or "nothing was sampled"
    if not abs(trajectory.reward) <= MAX_REWARD:
        return f"its reward {trajectory.reward:g} is outside the range of float32; scale rewards to about 1"
    return ""
