"""Metrics of a batch of rollouts: rewards, success, lengths, limits that cut, ages, times. Trains on nothing of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from turnwise.core.protocols import UNREAD_TOOL_CALLS
from turnwise.core.records import Group, Status, Stop, Trajectory, Turn
from turnwise.rollout.strategies import DRAFT_TOKENS


def describe(groups: Sequence[Group], version: int, max_tokens: int = 0) -> dict[str, float]:
    """``max_tokens``: the limit of a turn, by which a turn it cut differs from one that the context window cut."""
    trajectories = [t for g in groups for t in g.trajectories]
    if not trajectories:
        return {"groups": 0.0, "trajectories": 0.0, "tokens": 0.0}
    turns = [turn for t in trajectories for turn in t.turns]
    n, m = len(trajectories), max(1, len(turns))
    drafted = sum(float(t.facts.get(DRAFT_TOKENS, 0.0)) for t in trajectories)
    return {
        "groups": float(len(groups)),
        "trajectories": float(n),
        "tokens": float(sum(t.sampled for t in trajectories)),
        **({"tokens/drafts": drafted} if drafted else {}),
        "turns": len(turns) / n,
        "tool_calls": sum(turn.tool_calls for turn in turns) / n,
        "tool_errors": sum(turn.tool_errors for turn in turns) / n,
        "tool_calls/unread": sum(float(turn.facts.get(UNREAD_TOOL_CALLS, 0.0)) for turn in turns) / n,
        "restarts": sum(turn.restart for turn in turns) / n,
        **_outcomes(groups, trajectories),
        **_limits(trajectories, turns, max_tokens),
        **_ages(trajectories, turns, version),
        # mean seconds of a turn, as its episode waits for them: sampling, and the environment's reply
        "seconds/turn_sampled": sum(turn.seconds_generating for turn in turns) / m,
        "seconds/turn_answered": sum(turn.seconds_acting for turn in turns) / m,
        **_trees(groups),
    }


def _outcomes(groups: Sequence[Group], trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Success where it is reported, rewards, and how much the trajectories of a group differ."""
    n = len(trajectories)
    judged = [t.success for t in trajectories if t.success is not None]
    rewards = [t.reward for t in trajectories]
    names = sorted({name for t in trajectories for name in t.rewards})
    flat, distinct = 0, 0  # groups with one reward, and different answers inside groups
    for group in groups:
        flat += len({t.reward for t in group.trajectories}) == 1
        distinct += len({tuple(tuple(turn.tokens) for turn in t.turns) for t in group.trajectories})
    mean = sum(rewards) / n
    return {
        "success": sum(judged) / len(judged) if judged else math.nan,
        "reward": mean,
        "reward_max_abs": max(map(abs, rewards)),
        **{f"reward/{name}": sum(t.rewards.get(name, 0.0) for t in trajectories) / n for name in names},
        "reward/mean": mean,
        "groups/zero_variance": flat / len(groups),
        "answers/distinct": distinct / n,
    }


def _limits(trajectories: Sequence[Trajectory], turns: Sequence[Turn], max_tokens: int) -> dict[str, float]:
    """Shares of episodes and turns that a limit cut, by the limit."""
    n, m, by_tokens, by_context = len(trajectories), max(1, len(turns)), 0, 0
    for t in trajectories:
        for turn in t.turns:
            by_tokens += turn.stop == Stop.LENGTH and (not max_tokens or len(turn.tokens) >= max_tokens)
        # the context window ended this episode, before a turn or within its last one
        last = t.turns[-1] if t.turns else None
        within = last is not None and last.stop == Stop.LENGTH and len(last.tokens) < max_tokens
        by_context += within or t.reason.startswith("context window")
    return {
        "tokens_per_turn": sum(len(turn.tokens) for turn in turns) / m,
        "truncated": sum(t.status == Status.TRUNCATED for t in trajectories) / n,
        "truncated/turns_by_max_tokens": by_tokens / m,
        "truncated/episodes_by_context": by_context / n,
        "truncated/episodes_by_max_turns": sum(t.reason == "turn limit" for t in trajectories) / n,
    }


def _ages(trajectories: Sequence[Trajectory], turns: Sequence[Turn], version: int) -> dict[str, float]:
    """How many versions ago tokens were sampled."""
    versions = [v for turn in turns for v in turn.version]
    span = 0  # the most versions inside one trajectory
    for t in trajectories:
        inside = set().union(*(turn.version for turn in t.turns))
        span = max(span, max(inside) - min(inside)) if inside else span
    return {
        "staleness": version - sum(versions) / len(versions) if versions else 0.0,
        "staleness/oldest": float(version - min(versions, default=version)),
        "staleness/span": float(span),
    }


def _trees(groups: Sequence[Group]) -> dict[str, float]:
    """How groups grew, where any trajectory forks or had help: forks, their depth, the share of tokens that forks did not have
    to sample again, and guided episodes."""
    forks, depth, shared, sampled, guided = 0, 0, 0, 0, 0
    for group in groups:
        by_id = {t.id: t for t in group.trajectories}
        for t in group.trajectories:
            guided += bool(t.guidance)
            sampled += t.sampled
            level = 0
            while t.fork is not None:
                parent = by_id[t.fork.parent]
                shared += sum(len(turn.tokens) for turn in parent.turns[: t.fork.turn]) + t.fork.token
                t, level = parent, level + 1
            forks, depth = forks + (level > 0), max(depth, level)
    metrics = {"guidance/trained_episodes": float(guided)} if guided else {}
    if forks:
        metrics |= {"tree/forks": float(forks), "tree/depth": float(depth)}
        metrics |= {"tree/shared_tokens": shared / max(1, shared + sampled)}
    return metrics
