"""Trees that grow where a turn told most about the outcome, by an information-bottleneck score of every node.

Knows sessions, trajectories and their rewards; no engine, no environment, no loss.
"""

from __future__ import annotations

import math
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.core.records import Group, Status
from turnwise.errors import RecipeError
from turnwise.rollout.episode_start import ForkPoint
from turnwise.rollout.strategies.base import GroupRequest
from turnwise.rollout.strategies.tree import GrownEpisode, TreeGrowth


@dataclass
class Node:
    """The state before a turn, or after the last one. ``point`` None: the prompt."""

    point: ForkPoint | None = None
    likelihood: float = 1.0  # of the turn that leads to it: exp of the mean log p of its tokens
    children: list[Node] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)  # of all trajectories that pass through it

    @property
    def value(self) -> float:
        return sum(self.rewards) / len(self.rewards)

    def walk(self) -> list[Node]:
        return [self, *(node for child in self.children for node in child.walk())]


def score(node: Node, beta: float) -> float:
    """J = (1 + β)/n Σ over the n children of (v(child)/v(node) − (1 + 1/β))·likelihood; where v(node) is 0, the quotient is 0."""
    terms = [
        ((child.value / node.value if node.value else 0.0) - (1 + 1 / beta)) * child.likelihood
        for child in node.children
    ]
    return (1 + beta) * sum(terms) / len(terms)


def turn_tree(episodes: Sequence[GrownEpisode]) -> Node:
    """The tree of these trajectories by turns; parents come before their forks."""
    root = Node()
    lines, begins = (
        dict[str, list[Node]](),
        dict[str, int](),
    )  # all nodes of a trajectory, and where its own turns begin
    for episode in episodes:
        t = episode.trajectory
        begin = 0 if t.fork is None else begins[t.fork.parent] + t.fork.turn
        line = [root] if t.fork is None else lines[t.fork.parent][: begin + 1]
        for k, turn in enumerate(t.turns):
            mean = sum(turn.logp) / len(turn.logp) if turn.logp else 0.0
            following = episode.points[k + 1] if k + 1 < len(t.turns) else None
            line[-1].children.append(Node(following, math.exp(mean)))
            line.append(line[-1].children[-1])
        for node in line:
            node.rewards.append(t.reward)
        lines[t.id], begins[t.id] = line, begin
    return root


@dataclass(frozen=True)
class BottleneckTree:
    """``trunks`` trajectories from the prompt; then, round after round, ``each`` new continuations of the ``best`` nodes by their
    score, until the group is full. A node is the state before a turn; ties go to the earlier one."""

    trunks: int = 4
    best: int = 1
    each: int = 1
    beta: float = 5.0

    requirements = frozenset({"forks"})
    reads_rewards = True

    def __post_init__(self) -> None:
        if min(self.trunks, self.best, self.each) < 1 or self.beta <= 0:
            raise RecipeError(f"need trunks, best, each >= 1 and beta > 0, got {self}")

    def begin(self, request: GroupRequest) -> Coroutine[Any, Any, Group]:
        return self._grow(TreeGrowth(request))

    async def _grow(self, tree: TreeGrowth) -> Group:
        tree.begin()
        await tree.play([None] * self.trunks)
        while tree.free:
            played = [g for g in tree.grown if g.trajectory.status != Status.FAILED and g.trajectory.turns]
            nodes = [node for node in turn_tree(played).walk() if node.children]
            ranked = sorted(range(len(nodes)), key=lambda n: (-score(nodes[n], self.beta), n))[: self.best]
            await tree.play([nodes[n].point for n in ranked for _ in range(self.each)] or [None])
        return tree.group()
