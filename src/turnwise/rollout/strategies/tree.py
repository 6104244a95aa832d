"""Trees of forks: every trajectory may be forked again, before a turn or at a token inside one.

A shared prefix is sampled once, by its owner, and its keys and values are copied, not computed again. Knows sessions,
trajectories and entropies; no engine, no environment, no loss.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from turnwise.core.limits import number
from turnwise.core.protocols import Session
from turnwise.core.records import Group, Status, Trajectory
from turnwise.core.seeds import stable_seed
from turnwise.errors import RecipeError
from turnwise.rollout.episode_start import ForkPoint, inside_turn
from turnwise.rollout.strategies.base import GroupRequest, Strategy, park


@dataclass
class GrownEpisode:
    """A trajectory with what its forks need: a fork point and the entropies of each of its turns."""

    trajectory: Trajectory
    points: list[ForkPoint] = field(default_factory=list)
    entropies: list[Sequence[float]] = field(default_factory=list)

    def uncertainty(self, turn: int, count: int | None = None) -> list[float]:
        """Entropies of a turn's first tokens; −log p of the sampled tokens where the generator reports none."""
        known = self.entropies[turn] if turn < len(self.entropies) else ()
        return list(known or [-x for x in self.trajectory.turns[turn].logp])[:count]

    def position(self, tokens: int) -> ForkPoint | None:
        """The fork point after so many of its own sampled tokens; None where it has no more than these."""
        for turn, point in zip(self.trajectory.turns, self.points):
            if tokens < len(turn.tokens):
                return inside_turn(point, turn.tokens, tokens)
            tokens -= len(turn.tokens)
        return None


class TreeGrowth:
    """The sessions of one group, and the trajectories grown so far. Never more than the group's size."""

    def __init__(self, request: GroupRequest) -> None:
        self.request, self.free = request, list(enumerate(request.sessions()))
        self.grown: list[GrownEpisode] = []

    async def play(self, starts: Sequence[ForkPoint | None]) -> list[GrownEpisode]:
        """Continue from each start, as far as there are sessions; None starts at the prompt."""
        episodes = [self._play(*self.free.pop(0), start) for start in list(starts)[: len(self.free)]]
        made = list(await asyncio.gather(*episodes))
        self.grown += made
        return made

    async def _play(self, i: int, session: Session, start: ForkPoint | None) -> GrownEpisode:
        points, entropies = list[ForkPoint](), list[Sequence[float]]()
        more: dict[str, Any] = {} if start is None else {"fork_from": start}
        key, task = self.request.key(i), self.request.task
        trajectory = await self.request.play(key, task, session, fork_points=points, entropies=entropies, **more)
        return GrownEpisode(trajectory, points, entropies)

    def group(self) -> Group:
        """The group in the order of trajectory numbers: a parent has a lower number than its forks."""
        for _, session in self.free:
            session.close()
        return self.request.grown([g.trajectory for g in self.grown])


class TreeStrategy(Strategy):
    """Interface: a group that grows as a tree of forks. Sessions that ``extend`` leaves start at the prompt."""

    requirements: ClassVar = frozenset({"forks"})

    def begin(self, request: GroupRequest) -> Coroutine[Any, Any, Group]:
        return self.grow_tree(TreeGrowth(request))

    async def grow_tree(self, tree: TreeGrowth) -> Group:
        park([session for _, session in tree.free])
        await self.extend(tree)
        while tree.free:
            await tree.play([None] * len(tree.free))
        return tree.group()

    async def extend(self, tree: Any) -> None:
        """Play trunks and their forks."""
        raise NotImplementedError


# ---------------------------------------------------------------- after tool results


class AfterToolResults(TreeStrategy):
    """``trunks`` trajectories from the prompt. Before each later turn a trajectory is forked with probability
    clip(chance + weight·(H − H₀), 0, 1), up to ``width`` − 1 times: H is the mean entropy of the first ``looks`` tokens of the
    turn just taken, H₀ that of the first turn. Forks are forked again. Sessions that are left start at the prompt."""

    trunks: int = number(8, least=1)
    width: int = number(2, least=1)
    chance: float = number(0.5, least=0, most=1)
    weight: float = 0.2
    looks: int = number(20, least=1)
    vocabulary: int = 0  # entropies are divided by its logarithm; 0: not divided

    async def extend(self, tree: TreeGrowth) -> None:
        newest = await tree.play([None] * self.trunks)
        while tree.free:
            starts = [point for episode in newest for point in self._forks(tree.request.group, episode)]
            newest = await tree.play(starts or [None])

    def _forks(self, group: str, episode: GrownEpisode) -> list[ForkPoint]:
        """The points at which an episode is forked, earliest first."""
        if episode.trajectory.status == Status.FAILED:
            return []
        points, first = list[ForkPoint](), self._mean(episode, 0)
        for turn, point in list(enumerate(episode.points))[1:]:
            chance = self.chance + self.weight * (self._mean(episode, turn - 1) - first)
            for copy in range(self.width - 1):
                u = stable_seed("fork", group, episode.trajectory.id, turn, copy) / 2**63
                points += [point] * (u < min(max(chance, 0.0), 1.0))
        return points

    def _mean(self, episode: GrownEpisode, turn: int) -> float:
        values = episode.uncertainty(turn, self.looks) if turn < len(episode.trajectory.turns) else []
        return sum(values) / max(1, len(values))


# --------------------------------------------------------------------- fixed segments


def parse_factors(text: str) -> tuple[int, ...]:
    """``2/2/2``: how many branches a node of each depth has."""
    try:
        factors = tuple(int(part) for part in text.split("/"))
    except ValueError:
        raise RecipeError(f"factors is {text!r}; write whole numbers separated by /, such as 4/2/2") from None
    if not factors or min(factors) < 1:
        raise RecipeError(f"factors is {text!r}; write numbers of at least 1")
    return factors


class SegmentTree(TreeStrategy):
    """A tree of segments of ``segment`` sampled tokens: a node of depth d has the d-th of the ``factors`` branches, and leaves
    run to the end. A trajectory that ends early has no further branches. Sessions that are left start at the prompt."""

    factors: str = "4/2/2"
    segment: int = number(8, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_factors(self.factors)

    async def extend(self, tree: TreeGrowth) -> None:
        first, *deeper = parse_factors(self.factors)
        await tree.play([None] * first)
        begins = {g.trajectory.id: 0 for g in tree.grown}  # sampled tokens before each trajectory's own
        for depth, factor in enumerate(deeper, start=1):
            starts, owners = list[ForkPoint](), list[int]()
            for episode in tree.grown:
                own = depth * self.segment - begins[episode.trajectory.id]
                point = episode.position(own) if episode.trajectory.status != Status.FAILED else None
                starts += [point] * (factor - 1) if point is not None else []
                owners += [depth * self.segment] * (factor - 1) if point is not None else []
            made = await tree.play(starts)
            begins |= {g.trajectory.id: begin for g, begin in zip(made, owners)}


# --------------------------------------------------------------------- uncertain tokens


class UncertainTokens(TreeStrategy):
    """``share`` of a group is a tree: one trajectory, forked at its most uncertain tokens, and its forks at theirs. A fork whose
    first ``look`` tokens are within ``near`` of its parent's, as edit distance per token, has reconverged: it is dropped, and its
    place is taken by a fork elsewhere, at most ``again`` times; then by a sample from the prompt. The rest is independent."""

    share: float = number(0.5, least=0, most=1)
    look: int = number(8, least=1)
    near: float = number(0.4, least=0, most=1)
    first: int = number(1, least=0)  # tokens of a trajectory before which it is not forked
    again: int = number(2, least=0)

    async def extend(self, tree: TreeGrowth) -> None:
        size = tree.request.size
        branches = round(self.share * size)
        await tree.play([None] * (size - branches + (branches > 0)))
        roots = tree.grown[-1:] if branches else []
        pruned, family, used = 0, list(roots), set[tuple[str, int, int]]()
        while tree.free and family and pruned <= self.again:
            points = self._points(family, used, len(tree.free))
            if not points:
                break
            made = await tree.play(points)
            kept = [g for g, point in zip(made, points) if not self._reconverged(g, point, family)]
            pruned += len(kept) < len(made)
            self._drop(tree, [g for g in made if g not in kept])
            family += kept

    def _points(self, family: list[GrownEpisode], used: set[tuple[str, int, int]], count: int) -> list[ForkPoint]:
        """The most uncertain tokens of all trajectories of the tree at which it was not forked yet."""
        scored = []
        for episode in family:
            before = 0
            for turn, point in enumerate(episode.points[: len(episode.trajectory.turns)]):
                tokens = episode.trajectory.turns[turn].tokens
                for t, h in enumerate(episode.uncertainty(turn)):
                    if before + t >= self.first and (episode.trajectory.id, turn, t) not in used and t < len(tokens):
                        scored.append((-h, episode.trajectory.id, turn, t, inside_turn(point, tokens, t)))
                before += len(tokens)
        chosen = sorted(scored, key=lambda s: s[:4])[:count]
        used |= {(s[1], s[2], s[3]) for s in chosen}
        return [s[4] for s in chosen]

    def _reconverged(self, child: GrownEpisode, point: ForkPoint, family: list[GrownEpisode]) -> bool:
        parent = next(g for g in family if g.trajectory.id == point.key).trajectory
        if child.trajectory.status == Status.FAILED or not child.trajectory.turns:
            return False
        theirs = list(parent.turns[point.turn].tokens[point.token :])[: self.look]
        ours = list(child.trajectory.turns[0].tokens)[: self.look]
        return edit_distance(ours, theirs) / max(1, len(ours), len(theirs)) < self.near

    @staticmethod
    def _drop(tree: TreeGrowth, dropped: list[GrownEpisode]) -> None:
        """Take reconverged forks out of the group and give their numbers fresh sessions."""
        numbers = [int(g.trajectory.id.rsplit(".", 1)[1]) for g in dropped]
        tree.grown = [g for g in tree.grown if g not in dropped]
        renewed = [(i, tree.request.open_session(i + 300_000)) for i in numbers]
        park([session for _, session in renewed])
        tree.free = sorted([*tree.free, *renewed], key=lambda pair: pair[0])


def edit_distance(a: Sequence[int], b: Sequence[int]) -> int:
    """Insertions, deletions and replacements that turn ``a`` into ``b``."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        above, row[0] = row[0], i
        for j, y in enumerate(b, start=1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (x != y))
    return row[-1]


# ------------------------------------------------------------------------- vines


class Vines(TreeStrategy):
    """``trunks`` trajectories from the prompt. ``states`` evenly spaced turns of each are rollout states: from each of them
    ``vines`` continuations are sampled to the end. A trunk too short for so many states has fewer; sessions that are left start
    at the prompt."""

    trunks: int = number(1, least=1)
    states: int = number(2, least=0)
    vines: int = number(8, least=1)

    @property
    def needed(self) -> int:
        """Trajectories of a full group."""
        return self.trunks * (1 + self.states * self.vines)

    def check_group_size(self, size: int) -> None:
        """Raise if a group has no place for every vine."""
        if self.needed > size:
            raise RecipeError(
                f"{self.trunks} trunks with {self.states} states of {self.vines} vines are more than a group of {size}; write "
                f"--group-size {self.needed} or more, or fewer vines"
            )

    def begin(self, request: GroupRequest) -> Coroutine[Any, Any, Group]:
        self.check_group_size(request.size)
        return super().begin(request)

    async def extend(self, tree: TreeGrowth) -> None:
        trunks = await tree.play([None] * self.trunks)
        await tree.play([point for trunk in trunks for point in self.rollout_states(trunk) for _ in range(self.vines)])

    def rollout_states(self, trunk: GrownEpisode) -> list[ForkPoint]:
        """Evenly spaced turns of a trunk; never the first, where a vine would be another trunk."""
        turns = 0 if trunk.trajectory.status == Status.FAILED else len(trunk.trajectory.turns)
        at = sorted({k * turns // (self.states + 1) for k in range(1, self.states + 1)} - {0})
        return [trunk.points[turn] for turn in at]


# ------------------------------------------------- where a turn told most about the outcome


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


class BottleneckTree(TreeStrategy):
    """``trunks`` trajectories from the prompt; then, round after round, ``each`` new continuations of the ``best`` nodes by their
    score, until the group is full. A node is the state before a turn; ties go to the earlier one."""

    trunks: int = number(4, least=1)
    best: int = number(1, least=1)
    each: int = number(1, least=1)
    beta: float = number(5.0, above=0)

    reads_rewards = True

    async def extend(self, tree: TreeGrowth) -> None:
        await tree.play([None] * self.trunks)
        while tree.free:
            played = [g for g in tree.grown if g.trajectory.status != Status.FAILED and g.trajectory.turns]
            nodes = [node for node in turn_tree(played).walk() if node.children]
            ranked = sorted(range(len(nodes)), key=lambda n: (-score(nodes[n], self.beta), n))[: self.best]
            await tree.play([nodes[n].point for n in ranked for _ in range(self.each)] or [None])
