"""Trees of forks: every trajectory may be forked again, before a turn or at a token inside one.

A shared prefix is sampled once, by its owner, and its keys and values are copied, not computed again. Knows sessions,
trajectories and entropies; no engine, no environment, no loss.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from turnwise.core.limits import Declared, choice, number
from turnwise.core.protocols import Session
from turnwise.core.records import Completion, Group, Message, Sampling, Status, Stop, Trajectory
from turnwise.core.seeds import stable_seed
from turnwise.errors import ContextOverflow, RecipeError
from turnwise.rewards.judge import REFLECTION_TOKENS, Reflection, StepVerdicts, reflection_question, step_question
from turnwise.rollout.episode import ForkPoint, inside_turn
from turnwise.rollout.strategies import GroupRequest, Strategy, close, park, succeeded
from turnwise.rollout.support import Support


@dataclass
class GrownEpisode:
    """A trajectory with what its forks need: a fork point and the entropies of each of its turns."""

    trajectory: Trajectory
    points: list[ForkPoint] = field(default_factory=list)
    entropies: list[Sequence[float]] = field(default_factory=list)

    def uncertainty(self, turn: int, count: int | None = None) -> list[float]:
        """Entropies of a turn's first tokens; −log p of the sampled tokens where the generator reports none."""
        reported = self.entropies[turn] if turn < len(self.entropies) else ()
        return list(reported or [-x for x in self.trajectory.turns[turn].logp])[:count]

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
    """``trunks`` trajectories from the prompt (0: half of the group). Before each later turn a trajectory is forked with the
    probability clip(chance + weight·(H − H₀), 0, 1), up to ``width`` − 1 times: H is the mean entropy of the first ``looks``
    tokens of the turn just taken, H₀ that of the first turn. Forks are forked again. Sessions that are left start at the
    prompt."""

    trunks: int = number(0, least=0)
    width: int = number(2, least=1)
    chance: float = number(0.5, least=0, most=1)
    weight: float = 0.2
    looks: int = number(20, least=1)
    requirements = frozenset({"forks", "later turns"})
    vocabulary: int = 0  # entropies are divided by its logarithm; 0: not divided

    async def extend(self, tree: TreeGrowth) -> None:
        newest = await tree.play([None] * (self.trunks or (tree.request.size + 1) // 2))
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
                sampled = depth * self.segment - begins[episode.trajectory.id]
                point = episode.position(sampled) if episode.trajectory.status != Status.FAILED else None
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
            other = [g for g, point in zip(made, points) if not self._reconverged(g, point, family)]
            pruned += len(other) < len(made)
            self._drop(tree, [g for g in made if g not in other])
            family += other

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
    requirements = frozenset({"forks", "later turns"})
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


# ------------------------------------------------- where a step told most about the outcome


@dataclass
class Node:
    """The state before a step, or after the last one. ``point`` None: the prompt."""

    point: ForkPoint | None = None
    likelihood: float = 1.0  # of the step that leads to it: exp of the mean log p of its tokens
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


def step_tree(episodes: Sequence[GrownEpisode], segment: int = 0) -> Node:
    """The tree of these trajectories by steps: turns, cut after every ``segment`` tokens (0: not cut). Parents come before their
    forks."""
    root = Node()
    # of each trajectory: all of its nodes, and the number of the one at each of its own turns and tokens
    lines, places = dict[str, list[Node]](), dict[str, dict[tuple[int, int], int]]()
    for episode in episodes:
        t, place = episode.trajectory, dict[tuple[int, int], int]()
        line = [root]
        if t.fork is not None:
            line = lines[t.fork.parent][: places[t.fork.parent][t.fork.turn, t.fork.token] + 1]
        for k, turn in enumerate(t.turns):
            cuts = [*range(0, max(1, len(turn.tokens)), segment or max(1, len(turn.tokens))), len(turn.tokens)]
            for begin, end in itertools.pairwise(cuts):
                place[k, begin] = len(line) - 1
                logp = turn.logp[begin:end]
                following = inside_turn(episode.points[k], turn.tokens, end) if end < len(turn.tokens) else None
                if following is None and k + 1 < len(t.turns):
                    following = episode.points[k + 1]
                line[-1].children.append(Node(following, math.exp(sum(logp) / len(logp) if logp else 0.0)))
                line.append(line[-1].children[-1])
        for node in line:
            node.rewards.append(t.reward)
        lines[t.id], places[t.id] = line, place
    return root


class BottleneckTree(TreeStrategy):
    """``trunks`` trajectories from the prompt; then, round after round, ``each`` new continuations of the ``best`` nodes by their
    score, until the group is full. A node is the state before a step: a turn, or ``segment`` tokens of one (0: turns alone); ties
    go to the earlier one."""

    trunks: int = number(4, least=1)
    best: int = number(1, least=1)
    each: int = number(1, least=1)
    beta: float = number(5.0, above=0)
    segment: int = number(16, least=0)

    reads_rewards = True

    async def extend(self, tree: TreeGrowth) -> None:
        await tree.play([None] * self.trunks)
        while tree.free:
            played = [g for g in tree.grown if g.trajectory.status != Status.FAILED and g.trajectory.turns]
            nodes = [node for node in step_tree(played, self.segment).walk() if node.children]
            ranked = sorted(range(len(nodes)), key=lambda n: (-score(nodes[n], self.beta), n))[: self.best]
            await tree.play([nodes[n].point for n in ranked for _ in range(self.each)] or [None])


PRUNED = "pruned"  # fact of a branch that was stopped: what is added to its reward, at most 0
WATCH_EVERY = 4  # tokens sampled between two looks


def trailing_mean(values: Sequence[float], t: int, width: int) -> float:
    """Mean of the ``width`` values up to and including position t; of fewer at the beginning."""
    window = values[max(0, t - width + 1) : t + 1]
    return sum(window) / len(window)


def entropy_rise(entropy: Sequence[float], t: int, width: int) -> float:
    """H_t less the mean of the ``width`` entropies before it; 0 at the first token."""
    return entropy[t] - trailing_mean(entropy, t - 1, width) if t else 0.0


class BranchRule(Declared):
    """Branch at a token with H ≥ ``high``, mean confidence C ≤ ``confident`` over ``window`` tokens and ΔH ≥ ``rise``, at least
    ``first`` tokens after the start or the branch before. Its width is

        clip(round(least + by_entropy·(H − low)/(high − low) − by_confidence·(C − confident)/|confident|), least, most)"""

    high: float = number(3.5, above=0)
    low_share: float = number(2 / 7, least=0, below=1)  # low, as a share of high
    confident: float = number(1.2, above=0)
    rise: float = 0.2
    least: int = number(1, least=1, most="most")
    most: int = 4
    by_entropy: float = 2.0
    by_confidence: float = 1.0
    first: int = number(4, least=0)
    window: int = number(4, least=1)

    def width(self, entropy: float, confidence: float) -> int:
        """How many continuations a token gets, its own included."""
        low = self.low_share * self.high
        risen = self.by_entropy * (entropy - low) / (self.high - low)
        sure = self.by_confidence * (confidence - self.confident) / abs(self.confident)
        return min(max(round(self.least + risen - sure), self.least), self.most)

    def branches(self, entropy: Sequence[float], confidence: Sequence[float]) -> list[tuple[int, int]]:
        """Positions and widths, in order; only widths above 1."""
        places, begin = list[tuple[int, int]](), 0
        for t, h in enumerate(entropy):
            sure = trailing_mean(confidence, t, self.window)
            sure = self.confident if math.isinf(sure) else sure  # the generator does not report it
            near = t - begin < self.first
            if near or h < self.high or sure > self.confident or entropy_rise(entropy, t, self.window) < self.rise:
                continue
            if (width := self.width(h, sure)) > 1:
                places.append((t, width))
                begin = t
        return places


class PruneRule(Declared):
    """Stop a branch when its mean confidence over ``window`` tokens is below ``weak``; or that over ``tail`` tokens fell
    ``falls`` times in a row to at most ``tail_weak``; or ΔH > 0 ``rises`` times in a row and now > ``rise``. ``weak`` 0,
    ``tail_weak`` 0 and ``rise`` inf never stop one.

    Its reward gets min(0, C_tail − (1 − p₁₀) − ``cost``), p₁₀ the mean of its least likely tenth of tokens."""

    weak: float = 0.4
    tail_weak: float = 1.0
    rise: float = 0.5
    falls: int = number(3, least=1)
    rises: int = number(3, least=1)
    window: int = number(4, least=1)
    tail: int = number(8, least=1)
    cost: float = number(0.05, least=0)

    def stops_at(self, entropy: Sequence[float], confidence: Sequence[float]) -> int | None:
        """The first token after which the branch is stopped; None: it runs on."""
        falling, rising, before = 0, 0, float("inf")
        for t, _ in enumerate(entropy):
            tail, risen = trailing_mean(confidence, t, self.tail), entropy_rise(entropy, t, self.window)
            falling, rising = (falling + 1 if tail < before else 0), (rising + 1 if risen > 0 else 0)
            before = tail
            weak = t + 1 >= self.window and trailing_mean(confidence, t, self.window) < self.weak
            if (
                weak
                or (falling >= self.falls and tail <= self.tail_weak)
                or (rising >= self.rises and risen > self.rise)
            ):
                return t
        return None

    def penalty(self, confidence: Sequence[float], probability: Sequence[float]) -> float:
        """What a stopped branch's reward gets."""
        lowest = sorted(probability)[: max(1, len(probability) // 10)]
        tail = trailing_mean(confidence, len(confidence) - 1, self.tail)
        return min(0.0, tail - (1 - sum(lowest) / len(lowest)) - self.cost)


@dataclass
class WatchedSession:
    """A session that keeps entropies and confidences of what it sampled, and stops for good where ``rule`` says so."""

    session: Session
    rule: PruneRule | None = None  # None: only watch
    entropy: list[float] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    probability_logs: list[float] = field(default_factory=list)
    stopped: bool = False

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        if self.stopped:
            raise ContextOverflow("the branch was pruned: the policy stayed uncertain")
        sampling = replace(sampling, entropy=True)
        parts, left = list[Completion](), sampling.max_tokens
        whole = self.rule is None or bool(sampling.stop)  # a stop string may lie in two pieces
        while left:
            size = left if whole else min(left, WATCH_EVERY)
            sampled = [token for part in parts for token in part.tokens]
            rest = replace(sampling, max_tokens=size, begun=sampling.begun + len(sampled))
            part = await self.session.generate([*ids, *sampled], rest)
            count = self._watch(part)
            parts.append(first_tokens(part, count) if count < len(part.tokens) else part)
            left -= size
            if self.stopped or part.stop != Stop.LENGTH or len(part.tokens) < size:
                break
        if len(parts) == 1:
            return parts[0]
        joined: Any = {name: [x for part in parts for x in getattr(part, name)] for name in LISTS}
        return replace(parts[-1], seconds=sum(part.seconds for part in parts), begun=sampling.begun, **joined)

    def _watch(self, part: Completion) -> int:
        """Keep what a piece says of itself; returns how many of its tokens remain."""
        before = len(self.entropy)
        self.entropy += part.entropy or [-x for x in part.logp]
        self.confidence += part.confidence or [float("inf")] * len(part.tokens)
        self.probability_logs += part.logp
        end = None if self.rule is None else self.rule.stops_at(self.entropy, self.confidence)
        if end is None:
            return len(part.tokens)
        self.stopped = True
        for listed in (self.entropy, self.confidence, self.probability_logs):
            del listed[end + 1 :]
        return end + 1 - before

    def fork(self, seed: int) -> Session:
        return self.session.fork(seed)

    def park(self) -> None:
        self.session.park()

    def unpark(self) -> None:
        self.session.unpark()

    def cancel(self) -> None:
        self.session.cancel()

    def close(self) -> None:
        self.session.close()


LISTS = ("tokens", "logp", "mass", "version", "kept", "entropy", "confidence")


def first_tokens(part: Completion, count: int) -> Completion:
    """A completion that was stopped after ``count`` of its tokens. Routes also cover the prompt: the last ones go."""
    lists: Any = {name: list(getattr(part, name))[:count] for name in LISTS}
    routes = part.routes[: max(0, len(part.routes) - len(part.tokens) + count)]
    return replace(part, stop=Stop.LENGTH, routes=routes, **lists)


class ConfidenceTree(TreeStrategy):
    """``trunks`` trajectories from the prompt; each is forked where ``branch`` says so, and its forks are forked again, up to the
    size of the group. Forks are stopped where ``prune`` says so, and stay in the group with the fact ``pruned``. Sessions that
    are left start at the prompt."""

    trunks: int = number(4, least=1)
    branch: BranchRule = field(default_factory=BranchRule)
    prune: PruneRule | None = field(default_factory=PruneRule)

    def begin(self, request: GroupRequest) -> Coroutine[Any, Any, Group]:
        return self.grow_tree(WatchedGrowth(request, self.prune))

    async def extend(self, tree: WatchedGrowth) -> None:
        newest = await tree.play([None] * self.trunks)
        while tree.free:
            starts = [point for episode in newest for point in self._forks(tree, episode)]
            newest = await tree.play(starts or [None] * len(tree.free))

    def _forks(self, tree: WatchedGrowth, episode: GrownEpisode) -> list[ForkPoint]:
        watched, points = tree.watched[episode.trajectory.id], list[ForkPoint]()
        if episode.trajectory.status == Status.FAILED or watched.stopped:
            return []
        for position, width in self.branch.branches(watched.entropy, watched.confidence):
            point = episode.position(position)
            points += [point] * (width - 1) if point is not None else []
        return points


class WatchedGrowth(TreeGrowth):
    """A tree whose sessions are watched; those of forks may be stopped."""

    def __init__(self, request: GroupRequest, prune: PruneRule | None) -> None:
        super().__init__(request)
        self.prune, self.watched = prune, dict[str, WatchedSession]()

    async def _play(self, i: int, session: Session, start: ForkPoint | None) -> GrownEpisode:
        rule = None if start is None else self.prune
        watched = self.watched[self.request.key(i)] = WatchedSession(session, rule)
        episode = await super()._play(i, watched, start)
        trajectory = episode.trajectory
        if watched.stopped and rule is not None and trajectory.status != Status.FAILED:
            penalty = rule.penalty(watched.confidence, [math.exp(x) for x in watched.probability_logs])
            episode.trajectory = replace(trajectory, facts={**trajectory.facts, PRUNED: penalty}, limit=None)
        return episode


DIAGNOSES = ("verifier", "surprise", "start")
RETRY = 400_000  # index of the first session of a retry that replaces an attempt


def first_error(episode: GrownEpisode, diagnosis: str) -> ForkPoint | None:
    """The turn to try again. ``verifier``: the first after which the solution was not nearer; ``surprise``: the one with the
    least likely first tokens; ``start``: the first turn. None where the attempt has no turn."""
    points = episode.points[: len(episode.trajectory.turns)]
    if not points or episode.trajectory.status == Status.FAILED:
        return None
    if diagnosis == "start":
        return points[0]
    if diagnosis == "verifier":
        left = [point.remaining for point in episode.points]
        for point, now, then in zip(points, left, [*left[1:], None]):
            if now is None or then is None or then >= now:
                return point
        return points[-1]
    surprise = [sum(episode.uncertainty(i, 4)) / max(1, len(episode.uncertainty(i, 4))) for i in range(len(points))]
    return points[surprise.index(max(surprise))]


async def attempt(request: GroupRequest, i: int, session: Session) -> GrownEpisode:
    """Play one episode and keep the points at which it can be forked."""
    points = list[ForkPoint]()
    trajectory = await request.play(request.key(i), request.task, session, fork_points=points)
    return GrownEpisode(trajectory, points)


REFLECTION, VERDICTS = "reflection", "verdicts"  # diagnoses of a helper
Read = TypeVar("Read")


class HintedRetry(Strategy):
    """Half of a group are attempts. Another half tries them again: a helper reads each attempt and says where to begin and with
    which advice (``reflection``), or failed ones are forked at the turn that another ``diagnosis`` finds and continued with hints
    up to ``tier``. The record contains no advice and no hint. The partner of an attempt that was good, or of which the helper
    says nothing that can be read, is another attempt. ``AfterLastFork`` and similar credit train only on what differs."""

    tier: int = number(1, least=1)
    diagnosis: str = choice(REFLECTION, *DIAGNOSES)

    reads_rewards = True

    @property
    def requirements(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"forks", "helper" if self.diagnosis == REFLECTION else "hints"})

    async def grow(self, request: GroupRequest, sessions: list[Session]) -> Group:
        count = (request.size + 1) // 2
        park(sessions[count:])
        tried = await asyncio.gather(*(attempt(request, i, s) for i, s in enumerate(sessions[:count])))
        pairs = list(zip(tried, sessions[count:]))
        options = await asyncio.gather(*(self._again(request, episode, session) for episode, session in pairs))
        again = await request.play_each(sessions[count:], options, count)
        return request.grown([*(g.trajectory for g in tried), *again])

    async def _again(self, request: GroupRequest, episode: GrownEpisode, session: Session) -> dict[str, Any]:
        """How the partner of an attempt is played."""
        if self.diagnosis == REFLECTION:
            reflection = await reflect(request, episode, session)
            if reflection is None or reflection.outcome == "success":
                return {}
            advice = Support(text=reflection.advice, title=REFLECTION, recorded=False)
            return {"fork_from": episode.points[reflection.step], "support": advice}
        point = None if succeeded(episode.trajectory) else first_error(episode, self.diagnosis)
        hint = Support(tier=self.tier, recorded=False)
        return {"fork_from": point, "support": hint} if point is not None else {}


async def reflect(request: GroupRequest, episode: GrownEpisode, session: Session) -> Reflection | None:
    """What the helper says of an attempt; None where there is nothing to read, or no answer. ``session`` plays next."""
    return await asked_about(request, episode, session, reflection_question, Reflection.read, temperature=1.0)


async def asked_about(
    request: GroupRequest,
    episode: GrownEpisode,
    session: Session,
    question: Callable[[Sequence[Message], int], list[Message]],
    read: Callable[[str, int], Read],
    temperature: float = 0.0,
) -> Read | None:
    """What the helper answers to a question about an attempt and its steps."""
    assert request.helper is not None, "a strategy that asks requires a helper"
    steps = len(episode.points[: len(episode.trajectory.turns)])
    if episode.trajectory.status == Status.FAILED or not steps:
        return None
    session.unpark()  # batches of a deterministic generator must not depend on how long an answer takes
    answer = await request.helper.ask(
        question(episode.trajectory.messages, steps), lambda reply: read(reply, steps), REFLECTION_TOKENS, temperature
    )
    request.helper.count("failed", float(bool(answer.failure)))
    return None if answer.failure else read(answer.text, steps)


class RepairedAttempts(Strategy):
    """All of a group are attempts. Up to ``repairs`` failed ones are continued from their first error: the first step that a
    helper scores below ``below``, with its correction (``verdicts``), or the turn that another ``diagnosis`` finds, with hints up
    to ``tier``. Neither stands in the record. A repair that succeeds takes the place of its attempt, with the attempt's own
    turns before the error."""

    repairs: int = number(1, least=0)
    tier: int = number(1, least=1)
    diagnosis: str = choice(VERDICTS, *DIAGNOSES)
    below: float = number(0.5, above=0, most=1)

    reads_rewards = True

    @property
    def requirements(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"forks", "helper" if self.diagnosis == VERDICTS else "hints"})

    def begin(self, request: GroupRequest) -> Coroutine[Any, Any, Group]:
        return self._grow(request, request.sessions(), request.sessions(self.repairs, RETRY))

    async def _grow(self, request: GroupRequest, sessions: list[Session], spare: list[Session]) -> Group:
        park(spare)
        tried = await asyncio.gather(*(attempt(request, i, s) for i, s in enumerate(sessions)))
        members, left = [g.trajectory for g in tried], list(spare)
        plays: dict[int, tuple[ForkPoint, Coroutine[Any, Any, Trajectory]]] = {}
        for i, episode in enumerate(tried):
            error = None if not left or succeeded(episode.trajectory) else await self._error(request, episode, left[0])
            if error is not None:
                key = request.key(RETRY + i)  # says whose place it takes
                play = request.play(key, request.task, left.pop(0), fork_from=error[0], support=error[1])
                plays[i] = error[0], play
        close(left)
        repairs = await asyncio.gather(*(play for _, play in plays.values()))
        for (i, (point, _)), repair in zip(plays.items(), repairs):
            if succeeded(repair):
                members[i] = grafted(members[i], repair, point)
        return request.grown(members)

    async def _error(
        self, request: GroupRequest, episode: GrownEpisode, session: Session
    ) -> tuple[ForkPoint, Support] | None:
        """Where a failed attempt is to be continued, and with which help."""
        if self.diagnosis == VERDICTS:
            verdicts = await asked_about(request, episode, session, step_question, StepVerdicts.read)
            step = None if verdicts is None else verdicts.first_wrong(self.below)
            if verdicts is None or step is None:
                return None
            return episode.points[step], Support(text=verdicts.correction, title="correction", recorded=False)
        point = first_error(episode, self.diagnosis)
        return None if point is None else (point, Support(tier=self.tier, recorded=False))


def grafted(parent: Trajectory, child: Trajectory, point: ForkPoint) -> Trajectory:
    """``child`` with the turns of ``parent`` before the fork as its own: one trajectory, which needs no parent in its group."""
    assert point.token == 0, "only forks before a turn are grafted"
    first = replace(child.turns[0], context=parent.turns[point.turn].context, restart=parent.turns[point.turn].restart)
    return replace(child, fork=None, turns=(*parent.turns[: point.turn], first, *child.turns[1:]))
