"""What a step leaves behind: the numbers that each update computes for its tokens (advantage, log-probability, entropy, gate,
weight, gradient), how likely the tokens are afterwards, and metrics of its batch of rollouts.

A ``TokenRecorder`` listens to an objective and only looks at detached copies of its results, so the weights of a run do not
depend on it. Numbers stay on the device until the ledger writes them, which is while the next
update computes. Does not know how they are stored or shown.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from turnwise.algebra.objective import Objective
from turnwise.algebra.piece import MicroBatchView
from turnwise.core.batch import Batch
from turnwise.core.columns import Column
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, Field
from turnwise.core.protocols import OVERRULED, REFUSED, UNREAD_TOOL_CALLS, Learner
from turnwise.core.records import Group, Limit, Status, Stop, Trajectory, Turn
from turnwise.core.signals import Signal
from turnwise.rollout.strategies import DRAFT_TOKENS
from turnwise.store.token_columns import TokenColumns

MAX_MEMORY = 100_000  # characters of the pieces' memory; a larger one (a row for each task) is not kept
STEP_COLUMNS = (Column.UPDATED_TURNS, Column.FREEZE_POLICY)


@dataclass(frozen=True, eq=False)
class MicroBatchRecord:
    """The numbers of one micro-batch, on the device: the micro-batch itself may be freed."""

    trajectories: tuple[str, ...]
    sizes: Tensor  # tokens of each
    values: Mapping[str, Tensor]


@dataclass
class TokenRecorder:
    """The tokens of one training step, by update and micro-batch."""

    step: int
    groups: Sequence[Group]
    again: int = 0  # tokens whose log-probability is measured once more when the step is over
    memory: Mapping[str, Any] = field(default_factory=dict)  # of the objective's pieces, before the step
    updates: list[list[MicroBatchRecord]] = field(default_factory=list)
    after: dict[str, Tensor] = field(default_factory=dict)  # by trajectory: log-probabilities after the step

    def watch(self, objective: Objective) -> Objective:
        states = objective.memory.state_dict()
        text = json.dumps(states, default=str)
        self.memory = json.loads(text) if len(text) <= MAX_MEMORY else {}
        self.objective = objective
        return replace(objective, listeners=(*objective.listeners, self))

    def planned(self, batch: Batch) -> None:
        self.updates.append([])

    def micro_batch(self, batch: Batch, policy: Mapping[Signal, Field], slope: Tensor) -> None:
        values = token_values(self.objective, batch, policy, slope)
        self.updates[-1].append(MicroBatchRecord(batch.trajectory_ids, batch.tree.size(TOKEN, TRAJECTORY).x, values))

    def measure_after(self, learner: Learner, batch: Batch) -> dict[str, float]:
        """Log-probabilities under the weights after the step, by one forward pass; the seconds that it took.

        Of whole groups, because siblings explain each other: those with the largest gradients, as many as ``again`` tokens allow
        and at least one. A group without a gradient is left out: the step did not push its tokens."""
        began, tree = time.perf_counter(), batch.tree
        pushed: dict[str, float] = {}
        for record in (record for micro_batches in self.updates for record in micro_batches if self.again):
            parts = record.values["slope"].abs().cpu().split(record.sizes.tolist())
            for name, part in zip(record.trajectories, parts):
                pushed[name] = pushed.get(name, 0.0) + float(part.sum())
        by_trajectory = torch.tensor([pushed.get(name, 0.0) for name in batch.trajectory_ids])
        push, sizes = Field(tree, TRAJECTORY, by_trajectory).sum(GROUP).x, tree.size(TOKEN, GROUP).x
        order = push.argsort(descending=True, stable=True)
        total = sizes[order].cumsum(0)
        first = torch.arange(len(order)) == 0
        fits = ((total <= self.again) | first) & (push[order] > 0)
        chosen = torch.isin(tree.ancestor(TRAJECTORY, GROUP), order[fits]).nonzero().squeeze(1)
        if not len(chosen):
            return {}
        part = batch.select(chosen)
        logp = learner.measure(part, frozenset({Signal.LOGP}))[Signal.LOGP].x.float().cpu()
        self.after = dict(zip(part.trajectory_ids, logp.split(part.tree.size(TOKEN, TRAJECTORY).x.tolist())))
        return {"seconds/measured_after": time.perf_counter() - began}

    def columns(self) -> list[TokenColumns]:
        """The updates as the ledger stores them. An update is left out if each of its tokens was already trained on by an
        earlier one: a second epoch would double the size."""
        order = [t.id for group in self.groups for t in group.trajectories]
        groups = tuple((group.id, tuple(t.id for t in group.trajectories)) for group in self.groups)
        stored: list[TokenColumns] = []
        trained: dict[str, Tensor] = {}  # by trajectory: its tokens that an update before this one trained on
        for position, micro_batches in enumerate(self.updates):
            rows: dict[str, dict[str, Tensor]] = {}  # the columns of each trajectory, on the host
            for record in micro_batches:
                parts = {name: x.cpu().split(record.sizes.tolist()) for name, x in record.values.items()}
                for index, trajectory in enumerate(record.trajectories):
                    row = {name: parts[name][index] for name in parts}
                    if self.after:  # NaN: not measured
                        row["after"] = self.after.get(trajectory, torch.full_like(row["weight"], math.nan))
                    rows[trajectory] = row
            new = False
            for trajectory, row in rows.items():
                now, before = row["weight"] != 0, trained.get(trajectory)
                new |= before is None or bool((now & ~before).any())
                trained[trajectory] = now if before is None else now | before
            if stored and not new:
                continue
            ids = [name for name in dict.fromkeys(order) if name in rows]
            names = list(rows[ids[0]]) if ids else []
            columns = {name: torch.cat([rows[i][name] for i in ids]).numpy() for name in names}
            sizes = tuple(len(rows[i]["weight"]) for i in ids)
            head: dict[str, Any] = {} if stored else {"groups": groups, "memory": self.memory}
            stored.append(TokenColumns(self.step, position, tuple(ids), sizes, columns, **head))
        self.updates.clear()
        self.after.clear()
        return stored


@torch.no_grad()
def token_values(
    objective: Objective, batch: Batch, policy: Mapping[Signal, Field], slope: Tensor
) -> dict[str, Tensor]:
    """One number for each token and column, on the device; copies, since a graph's buffers are used again."""
    token = lambda f: f.at(TOKEN).x.detach().float().clone()  # noqa: E731
    view = MicroBatchView(batch, {signal: f.detach() for signal, f in policy.items()})
    values = {
        "advantage": token(batch[Column.ADVANTAGE]),
        "weight": token(batch[Column.WEIGHT]),
        "slope": slope.detach().float().clone(),  # ∂ loss / ∂ log π
    }
    if not objective.ratio.couples_trajectories:
        rho = objective.ratio(view)
        gated = objective.gate(rho, batch[Column.ADVANTAGE].to(view.logp.x.dtype), view)
        values["gate"] = token(gated) / token(rho)
    values |= {str(signal): token(f) for signal, f in policy.items()}
    measured = {key: f for key, f in batch.columns.items() if isinstance(key, Signal) and key not in policy}
    values |= {str(signal): token(f) for signal, f in measured.items() if f.level <= TRAJECTORY}
    return values | {str(name): token(batch[name]) for name in STEP_COLUMNS if name in batch.columns}


# ------------------------------------------------ metrics of a batch of rollouts


def describe(groups: Sequence[Group], version: int, max_tokens: int = 0, context: int = 0) -> dict[str, float]:
    """``max_tokens``, ``context``: the limits of a turn and of a dialogue, by which turns that one of them cut differ from those
    that the caller of an agent cut."""
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
        **_limits(trajectories, turns, max_tokens, context),
        **_ages(trajectories, turns, version),
        # mean seconds of a turn, as its episode waits for them: sampling, and the environment's reply
        "seconds/turn_sampled": sum(turn.seconds_generating for turn in turns) / m,
        "seconds/turn_answered": sum(turn.seconds_acting for turn in turns) / m,
        **_trees(groups),
        **_calls_of_agents(trajectories),
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


def _limits(
    trajectories: Sequence[Trajectory], turns: Sequence[Turn], max_tokens: int, context: int
) -> dict[str, float]:
    """Shares of episodes and turns that a limit cut, by the limit."""
    n, m, by_tokens, by_context = len(trajectories), max(1, len(turns)), 0, 0
    for t in trajectories:
        for turn in t.turns:
            by_tokens += turn.stop == Stop.LENGTH and (not max_tokens or len(turn.tokens) >= max_tokens)
        # the context window ended this episode, before a turn or within its last one
        last = t.turns[-1] if t.turns else None
        within = last is not None and last.stop == Stop.LENGTH and len(last.tokens) < max_tokens
        within &= t.fork is not None or _ids_read(t) >= context
        by_context += within or t.limit == Limit.CONTEXT
    return {
        "tokens_per_turn": sum(len(turn.tokens) for turn in turns) / m,
        "truncated": sum(t.status == Status.TRUNCATED for t in trajectories) / n,
        "truncated/turns_by_max_tokens": by_tokens / m,
        "truncated/episodes_by_context": by_context / n,
        "truncated/episodes_by_max_turns": sum(t.limit == Limit.TURNS for t in trajectories) / n,
        **{
            f"truncated/episodes_by_agent_{limit}": cut / n
            for limit in (Limit.TOKENS, Limit.SECONDS)
            if (cut := sum(t.limit == limit for t in trajectories))
        },
    }


def _ids_read(trajectory: Trajectory) -> int:
    """How long the last sequence of a trajectory is that forks from none."""
    ids = 0
    for turn in trajectory.turns:
        ids = (0 if turn.restart else ids) + len(turn.context) + len(turn.tokens)
    return ids


def _calls_of_agents(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Per episode, by code and by field: calls that were refused, and calls that named a field which the run decides."""
    counted: Counter[str] = Counter()
    for t in trajectories:
        counted.update({name: float(n) for name, n in t.facts.items() if name.startswith((REFUSED, OVERRULED))})
    return {name: count / len(trajectories) for name, count in sorted(counted.items())}


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
