"""Trees of forks: every trajectory may be forked again, before a turn or at a token inside one.

A shared prefix is sampled once, by its owner, and its keys and values are copied, not computed again. Knows sessions,
trajectories and entropies; no engine, no environment, no loss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.core.protocols import Session
from turnwise.core.records import Group, Status, Trajectory
from turnwise.core.seeds import stable_seed
from turnwise.errors import RecipeError
from turnwise.rollout.episode_start import ForkPoint, inside_turn
from turnwise.rollout.strategies.base import GroupRequest, park


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

    def begin(self) -> None:
        park([session for _, session in self.free])

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


# ---------------------------------------------------------------- after tool results


@dataclass(frozen=True)
class AfterToolResults:
    """``trunks`` trajectories from the prompt. Before each later turn a trajectory is forked with probability
    clip(chance + weight·(H − H₀), 0, 1), up to ``width`` − 1 times: H is the mean entropy of the first ``looks`` tokens of the
    turn just taken, H₀ that of the first turn. Forks are forked again. Sessions that are left start at the prompt."""

    trunks: int = 8
    width: int = 2
    chance: float = 0.5
    weight: float = 0.2
    looks: int = 20
    vocabulary: int = 0  # entropies are divided by its logarithm; 0: not divided

    requirements = frozenset({"forks"})

    def __post_init__(self) -> None:
        if not (self.trunks >= 1 and self.width >= 1 and 0 <= self.chance <= 1 and self.looks >= 1):
            raise RecipeError(f"need trunks, width, looks >= 1 and 0 <= chance <= 1, got {self}")

    def begin(self, request: GroupRequest) -> Coroutine[Any, Any, Group]:
        return self._grow(TreeGrowth(request))

    async def _grow(self, tree: TreeGrowth) -> Group:
        tree.begin()
        newest = await tree.play([None] * self.trunks)
        while tree.free:
            starts = [point for episode in newest for point in self._forks(tree.request.group, episode)]
            newest = await tree.play(starts or [None])
        return tree.group()

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


@dataclass(frozen=True)
class SegmentTree:
    """A tree of segments of ``segment`` sampled tokens: a node of depth d has the d-th of the ``factors`` branches, and leaves
    run to the end. A trajectory that ends early has no further branches. Sessions that are left start at the prompt."""

    factors: str = "4/2/2"
    segment: int = 8

    requirements = frozenset({"forks"})

    def __post_init__(self) -> None:
        parse_factors(self.factors)
        if self.segment < 1:
            raise RecipeError(f"segments of {self.segment} tokens; write at least 1")

    def begin(self, request: GroupRequest) -> Coroutine[Any, Any, Group]:
        return self._grow(TreeGrowth(request))

    async def _grow(self, tree: TreeGrowth) -> Group:
        tree.begin()
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
        while tree.free:
            await tree.play([None] * len(tree.free))
        return tree.group()


# --------------------------------------------------------------------- uncertain tokens


@dataclass(frozen=True)
class UncertainTokens:
    """``share`` of a group is a tree: one trajectory, forked at its most uncertain tokens, and its forks at theirs. A fork whose
    first ``look`` tokens are within ``near`` of its parent's, as edit distance per token, has reconverged: it is dropped, and its
    place is taken by a fork elsewhere, at most ``again`` times; then by a sample from the prompt. The rest is independent."""

    share: float = 0.5
    look: int = 8
    near: float = 0.4
    first: int = 1  # tokens of a trajectory before which it is not forked
    again: int = 2

    requirements = frozenset({"forks"})

    def __post_init__(self) -> None:
        if not (
            0 <= self.share <= 1 and self.look >= 1 and 0 <= self.near <= 1 and self.first >= 0 and self.again >= 0
        ):
            raise RecipeError(f"need 0 <= share <= 1, look >= 1, 0 <= near <= 1, first >= 0 and again >= 0, got {self}")

    def begin(self, request: GroupRequest) -> Coroutine[Any, Any, Group]:
        return self._grow(TreeGrowth(request))

    async def _grow(self, tree: TreeGrowth) -> Group:
        tree.begin()
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
        while tree.free:
            await tree.play([None] * len(tree.free))
        return tree.group()

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
