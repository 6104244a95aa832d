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
    n = len(trajectories)
    turns = [turn for t in trajectories for turn in t.turns]
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
        **_times(turns),
        **_trees(groups),
    }


def _outcomes(groups: Sequence[Group], trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Success where it is reported, rewards, and how much the trajectories of a group differ."""
    n = len(trajectories)
    judged = [t.success for t in trajectories if t.success is not None]
    rewards = [t.reward for t in trajectories]
    names = sorted({name for t in trajectories for name in t.rewards})
    flat = sum(len({t.reward for t in g.trajectories}) == 1 for g in groups)
    distinct = sum(len({_answer(t) for t in g.trajectories}) for g in groups)
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


def _answer(trajectory: Trajectory) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(turn.tokens) for turn in trajectory.turns)


def _limits(trajectories: Sequence[Trajectory], turns: Sequence[Turn], max_tokens: int) -> dict[str, float]:
    """Shares of episodes and turns that a limit cut, by the limit."""
    n, cut = len(trajectories), [turn for turn in turns if turn.stop == Stop.LENGTH]
    by_tokens = sum(not max_tokens or len(turn.tokens) >= max_tokens for turn in cut)
    return {
        "tokens_per_turn": sum(len(turn.tokens) for turn in turns) / max(1, len(turns)),
        "truncated": sum(t.status == Status.TRUNCATED for t in trajectories) / n,
        "truncated/turns_by_max_tokens": by_tokens / max(1, len(turns)),
        "truncated/episodes_by_context": sum(_filled_context(t, max_tokens) for t in trajectories) / n,
        "truncated/episodes_by_max_turns": sum(t.reason == "turn limit" for t in trajectories) / n,
    }


def _filled_context(trajectory: Trajectory, max_tokens: int) -> bool:
    """Whether the context window ended this episode, before a turn or within its last one."""
    last = trajectory.turns[-1] if trajectory.turns else None
    within = last is not None and last.stop == Stop.LENGTH and len(last.tokens) < max_tokens
    return within or trajectory.reason.startswith("context window")


def _ages(trajectories: Sequence[Trajectory], turns: Sequence[Turn], version: int) -> dict[str, float]:
    versions = [v for turn in turns for v in turn.version]
    return {
        "staleness": version - sum(versions) / len(versions) if versions else 0.0,
        "staleness/oldest": float(version - min(versions, default=version)),
        "staleness/span": max(map(_span, trajectories), default=0.0),  # versions inside one trajectory
    }


def _span(trajectory: Trajectory) -> float:
    versions = set().union(*(turn.version for turn in trajectory.turns))
    return float(max(versions) - min(versions)) if versions else 0.0


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
    tree = {
        "tree/forks": float(forks),
        "tree/depth": float(depth),
        "tree/shared_tokens": shared / max(1, shared + sampled),
    }
    return {**(tree if forks else {}), **({"guidance/trained_episodes": float(guided)} if guided else {})}


def _times(turns: Sequence[Turn]) -> dict[str, float]:
    """Mean seconds of a turn, as its episode waits for them: sampling, and the environment's reply."""
    n = max(1, len(turns))
    return {
        "seconds/turn_sampled": sum(turn.seconds_generating for turn in turns) / n,
        "seconds/turn_answered": sum(turn.seconds_acting for turn in turns) / n,
    }
