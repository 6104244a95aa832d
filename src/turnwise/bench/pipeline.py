"""A discrete-event simulation of the asynchronous loop: episodes that sample and wait for tools, a learner, publications.

Sampling is processor sharing: every sequence that samples gains one token per decode step, and a step takes longer the more
sequences there are; a deterministic generator composes a batch once every environment has answered. Which groups are issued,
trained on and dropped is decided by ``StalenessPolicy`` itself, as in a run that goes on after the last step simulated. Knows no
model and no device: a load says how many tokens and tool seconds an episode has, a pipeline how long each stage takes.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from turnwise.training.collector import StalenessPolicy


class TurnLoad(NamedTuple):
    """One turn: tokens to sample, then seconds that the environment takes to answer."""

    tokens: float
    seconds: float = 0.0


EpisodeLoad = Sequence[TurnLoad]


@dataclass(frozen=True)
class Pipeline:
    """How long the stages take. ``decode``: seconds of one decode step with this many sequences on all generators."""

    groups: int
    size: int
    decode: Callable[[int], float]
    learn: float
    publish: float = 0.0
    staleness: int | str = 0  # as in a run: "0,continuous", 4, "4,drop", "4,keep"
    slots: int = 1 << 30  # sequences that sample at the same time; more wait
    tick: int = 8  # tokens after which a deterministic generator may compose another batch
    shared: bool = False  # generator and learner use one device in turn


@dataclass(frozen=True)
class PipelineResult:
    """Means over the steps after the first ones."""

    seconds: float  # of a step
    tokens: float  # sampled in a second
    generator: float  # share of the time in which something was sampled
    learner: float  # share of the time spent learning
    oldest: int  # largest number of steps between issue and training
    dropped: float = 0.0  # groups in a step that came too late


@dataclass
class _Episode:
    group: int
    turns: Iterator[TurnLoad]
    acting: float = 0.0  # seconds of the environment after the turn that is sampled


@dataclass
class _Rollouts:
    """Everything that goes on beside the learner."""

    pipeline: Pipeline
    now: float = 0.0
    clock: float = 0.0  # tokens that each sampling sequence has gained so far
    tokens: float = 0.0
    busy: float = 0.0
    deterministic: bool = False
    changed: bool = False  # since the batch was composed: a turn was asked for, or an episode ended
    batch_end: float = 0.0  # the clock after which such a change ends the batch
    paused: bool = False
    sampling: list[tuple[float, int, _Episode]] = field(default_factory=list)  # heap by the clock at a turn's end
    acting: list[tuple[float, int, _Episode]] = field(default_factory=list)  # heap by time
    waiting: deque[tuple[float, _Episode]] = field(default_factory=deque)
    left: dict[int, int] = field(default_factory=dict)  # unfinished episodes of each running group
    ready: list[int] = field(default_factory=list)
    order: Iterator[int] = field(default_factory=itertools.count)

    def add(self, group: int, episodes: Sequence[EpisodeLoad]) -> None:
        self.left[group] = len(episodes)
        for load in episodes:
            self._next_turn(_Episode(group, iter(load)))

    def _next_turn(self, episode: _Episode) -> None:
        turn, self.changed = next(episode.turns, None), True
        if turn is None:
            self.left[episode.group] -= 1
            if not self.left[episode.group]:
                del self.left[episode.group]
                self.ready.append(episode.group)
            return
        episode.acting = turn.seconds
        self.waiting.append((turn.tokens, episode))
        self._admit()

    def remove(self, groups: Collection[int]) -> None:
        """Cancel the episodes of groups that run, and forget those that are ready."""
        stays = lambda entry: entry[-1].group not in groups  # noqa: E731
        self.sampling, self.acting = list(filter(stays, self.sampling)), list(filter(stays, self.acting))
        self.waiting = deque(filter(stays, self.waiting))
        heapq.heapify(self.sampling)
        heapq.heapify(self.acting)
        self.left = {group: n for group, n in self.left.items() if group not in groups}
        self.ready = [group for group in self.ready if group not in groups]
        self._admit()

    def _admit(self, boundary: bool = False) -> None:
        """Admit what waits; a deterministic generator does so at a batch boundary only."""
        while (boundary or not self.deterministic) and self.waiting and len(self.sampling) < self.pipeline.slots:
            tokens, episode = self.waiting.popleft()
            self.tokens += tokens
            heapq.heappush(self.sampling, (self.clock + tokens, next(self.order), episode))

    def _samples(self) -> bool:
        """Whether the generator samples now. A deterministic one composes its next batch when no environment is to answer."""
        if self.paused:
            return False
        if self.deterministic and not (self.sampling and (self.clock < self.batch_end or not self.changed)):
            if self.acting:
                return False
            self._admit(boundary=True)
            self.batch_end, self.changed = self.clock + self.pipeline.tick, False
        return bool(self.sampling)

    def run(self, until: Callable[[], bool] = lambda: False, limit: float = math.inf) -> None:
        """Go on until ``until`` holds after an event, or until the time ``limit``."""
        while not until():
            step = self.pipeline.decode(len(self.sampling)) if self._samples() else math.inf
            sampled = self.now + (self.sampling[0][0] - self.clock) * step if step < math.inf else math.inf
            answered = self.acting[0][0] if self.acting else math.inf
            ends = self.deterministic and self.changed and step < math.inf
            batch = self.now + (self.batch_end - self.clock) * step if ends else math.inf
            then = min(sampled, answered, limit, batch)
            assert then < math.inf, "nothing left to wait for"
            if step < math.inf:
                exact = {sampled: self.sampling[0][0], batch: self.batch_end}  # free of rounding
                self.clock = exact.get(then, self.clock + (then - self.now) / step)
                self.busy += then - self.now
            self.now = then
            if then == sampled:
                _, _, episode = heapq.heappop(self.sampling)
                heapq.heappush(self.acting, (then + episode.acting, next(self.order), episode))
                self._admit()
            elif then == answered:
                self._next_turn(heapq.heappop(self.acting)[2])
            elif then == limit:
                return


def simulate(pipeline: Pipeline, draw: Callable[[], EpisodeLoad], steps: int = 60, warm_up: int = 10) -> PipelineResult:
    """Run ``steps`` steps of episodes that ``draw`` returns; the first ``warm_up`` are not counted. ``draw`` is called for all
    episodes of a group in a row, so that they may have something in common."""
    p, policy = pipeline, StalenessPolicy.parse(pipeline.staleness)
    rollouts, issued = _Rollouts(pipeline, deterministic=policy.deterministic), dict[str, int]()
    numbers = itertools.count()
    ends, marks = list[float](), list[tuple[float, float, int]]()
    oldest = in_training = dropped = 0

    def issue(step: int) -> None:
        outstanding = len(rollouts.left) + len(rollouts.ready) + in_training
        for _ in range(policy.admit(len(rollouts.left), outstanding, p.groups)):
            group = next(numbers)
            issued[str(group)] = step
            rollouts.add(group, [draw() for _ in range(p.size)])

    for step in range(steps):
        in_training = 0
        issue(step)
        chosen: list[str] | None = None
        while chosen is None:
            if len(rollouts.ready) >= p.groups:
                chosen = policy.select(issued, [str(g) for g in rollouts.ready], p.groups, step)
            if chosen is None:
                finished = len(rollouts.ready)
                rollouts.run(lambda finished=finished: len(rollouts.ready) > finished)  # type: ignore[misc]
                issue(step)
        oldest = max(oldest, *(step - issued.pop(key) for key in chosen))
        rollouts.ready = [g for g in rollouts.ready if str(g) not in set(chosen)]
        in_training = len(chosen)
        late = policy.evict(issued, step + 1)
        rollouts.remove({int(key) for key in late})
        for key in late:
            del issued[key]
        dropped += len(late)
        # their places are free for new groups at once
        if late:
            issue(step)
        for seconds, paused in ((p.learn, p.shared), (p.publish, True)):
            rollouts.paused = paused
            rollouts.run(limit=rollouts.now + seconds)
        rollouts.paused = False
        ends.append(rollouts.now)
        marks.append((rollouts.tokens, rollouts.busy, dropped))
    # what lies between the last step of the warm-up and the last of all
    span, count = ends[-1] - ends[warm_up - 1], steps - warm_up
    tokens, busy, late_groups = (after - before for before, after in zip(marks[warm_up - 1], marks[-1]))
    return PipelineResult(span / count, tokens / span, busy / span, p.learn * count / span, oldest, late_groups / count)
