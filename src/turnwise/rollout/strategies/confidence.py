"""Trees whose branches begin where the policy is uncertain, and end early where it stays so.

A session that watches samples a turn in short pieces, which changes no token, and stops it when a rule says so. Knows entropies
and confidences of tokens; no engine, no environment, no loss.
"""

from __future__ import annotations

import math
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise.core.limits import Declared, number
from turnwise.core.protocols import Session
from turnwise.core.records import Completion, Group, Sampling, Status, Stop, Trajectory
from turnwise.errors import ContextOverflow
from turnwise.rollout.episode_start import ForkPoint
from turnwise.rollout.strategies.base import GroupRequest
from turnwise.rollout.strategies.tree import GrownEpisode, TreeGrowth, TreeStrategy

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
        found, begin = list[tuple[int, int]](), 0
        for t, h in enumerate(entropy):
            sure = trailing_mean(confidence, t, self.window)
            sure = self.confident if math.isinf(sure) else sure  # the generator does not report it
            near = t - begin < self.first
            if near or h < self.high or sure > self.confident or entropy_rise(entropy, t, self.window) < self.rise:
                continue
            if (width := self.width(h, sure)) > 1:
                found.append((t, width))
                begin = t
        return found


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
            part = await self.session.generate([*ids, *sampled], replace(sampling, max_tokens=size))
            kept = self._watch(part)
            parts.append(_first(part, kept) if kept < len(part.tokens) else part)
            left -= size
            if self.stopped or part.stop != Stop.LENGTH or len(part.tokens) < size:
                break
        if len(parts) == 1:
            return parts[0]
        lists: Any = {name: [x for part in parts for x in getattr(part, name)] for name in LISTS}
        return replace(parts[-1], seconds=sum(part.seconds for part in parts), **lists)

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

    def cancel(self) -> None:
        self.session.cancel()

    def close(self) -> None:
        self.session.close()


LISTS = ("tokens", "logp", "mass", "version", "kept", "entropy", "confidence")


def _first(part: Completion, count: int) -> Completion:
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
        episode.trajectory = _with_penalty(episode.trajectory, watched)
        return episode


def _with_penalty(trajectory: Trajectory, watched: WatchedSession) -> Trajectory:
    if not watched.stopped or watched.rule is None or trajectory.status == Status.FAILED:
        return trajectory
    penalty = watched.rule.penalty(watched.confidence, [math.exp(x) for x in watched.probability_logs])
    return replace(trajectory, facts={**trajectory.facts, PRUNED: penalty})
