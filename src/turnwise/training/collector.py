"""The collector: issues groups of rollouts, waits for them, and admits or drops them. Knows no loss and no environment.

``StalenessPolicy`` decides how many are outstanding (running, ready or in training), which come next and which too late. With the
limit k, at most (k + 1)·B groups are outstanding, and never more than the remaining steps can train on. k = 0 is synchronous: a
wave of groups begins when the last has ended, so a run does not depend on how long tools take. With k > 0 a slow group may be
overtaken by later ones until its last step. Then training waits for it (``wait``), drops it (``drop``), or goes on and trains on
it whenever it ends (``keep``). With the first two no token that is trained on was sampled more than k policy versions before.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from turnwise.config.values import KEEP, WAIT, Staleness
from turnwise.core.protocols import Generator, GroupScorer, LedgerProtocol, Session
from turnwise.core.records import Group, Status, Task, Trajectory
from turnwise.core.retries import LOST_SHARE, PAUSES, given_up, lost_in, tried
from turnwise.core.seeds import stable_seed
from turnwise.errors import EnvironmentFault, HostFault
from turnwise.observe.rules import LOST, TOO_OLD
from turnwise.recipes.recipe import Recipe
from turnwise.rollout.helper import Helper
from turnwise.rollout.scoring import MAX_REWARD, scored_play
from turnwise.rollout.strategies import EpisodeRunner, GroupRequest, close
from turnwise.training.task_feed import TaskFeed, draw_order

FAILED_IN_A_ROW = 16  # groups without a usable trajectory before the run stops with the reason


@dataclass(frozen=True)
class StalenessPolicy(Staleness):
    """``limit``: the most policy versions between the oldest token of a group and the step that trains on it. ``late``: what
    happens to a group that would exceed it, or how a synchronous run samples. A group that still runs counts from the step in
    which it was issued."""

    @property
    def reason(self) -> str:
        """Why the ledger says that a group was evicted."""
        return f"{TOO_OLD} {self.limit} allows"

    def admit(self, running: int, outstanding: int, per_step: int, trainable: int | None = None) -> int:
        """How many groups to issue now. ``outstanding``: running, ready or in training. ``trainable``: how many groups the step
        that is trained now and all later ones take together; None: the end is not known. Synchronous rollouts come in waves:
        none is issued while one runs."""
        if self.synchronous and running:
            return 0
        most = self.capacity(per_step)
        return max(0, (most if trainable is None else min(most, trainable)) - outstanding)

    def select(self, oldest: Mapping[str, int], ready: Sequence[str], count: int, step: int) -> list[str] | None:
        """The groups to train on in ``step``, of those that are ``ready``; None: wait for another. ``oldest``: of each
        outstanding group, the version of its oldest token, or the step in which it was issued; in draw order."""
        available = set(ready)
        if self.synchronous:
            first = list(oldest)[:count]
            return first if len(first) == count and set(first) <= available else None
        chosen = sorted((key for key in oldest if key in available), key=lambda key: oldest[key])[:count]
        if len(chosen) < count:
            return None
        taken = set(chosen)
        left = [at for key, at in oldest.items() if key not in taken]
        nothing_to_wait_for = len(available) == len(oldest)  # a step that trained on fewer groups left more than fit
        if self.late == WAIT and not nothing_to_wait_for:
            # from the next step on, `count` of those left are trained on in a step, the oldest first: each in time?
            in_time = ((at + self.limit - step) * count > position for position, at in enumerate(sorted(left)))
            return chosen if all(in_time) else None
        return chosen

    def evict(self, oldest: Mapping[str, int], step: int) -> list[str]:
        """The groups that would be too old in ``step``. Where training waits, there are none but after a step that trained on
        fewer groups than planned, or where a server sampled with older weights than it should."""
        if self.synchronous or self.late == KEEP:
            return []
        return [key for key, at in oldest.items() if step - at > self.limit]

    def check(self, groups: Sequence[Group], step: int) -> None:
        """Assert the limit for every token that ``step`` trains on."""
        if self.synchronous or self.late == KEEP:
            return
        for group in groups:
            age = step - oldest_version(group, step)
            assert age <= self.limit, f"step {step} would train on tokens of group {group.id}, {age} versions old"


def oldest_version(group: Group, default: int) -> int:
    """The version of the policy that sampled its oldest token; ``default`` where no token has one."""
    versions = (min(turn.version) for t in group.trajectories for turn in t.turns if len(turn.version))
    return int(min(versions, default=default))


# ------------------------------------------------------------------ the collector


@dataclass
class Collector:
    """The rollout side of the training loop."""

    recipe: Recipe
    generator: Generator
    sampler: TaskFeed
    ledger: LedgerProtocol
    play: EpisodeRunner
    seed: int
    policy: StalenessPolicy = StalenessPolicy()
    max_draws: int = 8
    scorer: GroupScorer | None = None  # rewards beside the environment's
    steps: int = 0  # of the whole run: no more groups are issued than they train on; 0: its end is not known
    helper: Helper | None = None  # a model that episodes and strategies may ask
    to_reissue: deque[tuple[str, Task]] = field(default_factory=deque)  # in flight when the resumed run was stopped
    ready: deque[Group] = field(default_factory=deque)
    running: dict[asyncio.Task[Group], str] = field(default_factory=dict)
    issued_in: dict[str, int] = field(default_factory=dict)  # step of the issue, then version of the oldest token
    sessions: dict[str, list[Session]] = field(default_factory=dict)  # opened by each running group
    cancelled: set[asyncio.Task[Group]] = field(default_factory=set)  # their clean-up goes on beside the run
    training: int = 0  # groups the learner holds at this moment
    dropped: Counter[str] = field(default_factory=Counter)
    failed_in_a_row: int = 0
    ended: int = 0  # groups, since the run was started or resumed
    lost: int = 0  # of these, by a fault of the machine
    last_metrics: dict[str, float] = field(default_factory=dict)  # of the last step; adaptive strategies read them

    @property
    def synchronous(self) -> bool:
        return self.policy.synchronous

    def issue(self, step: int) -> None:
        """Issue as many groups as staleness allows and the remaining steps can train on."""
        outstanding, groups = len(self.running) + len(self.ready) + self.training, self.recipe.budget.groups
        trainable = self.training + (self.steps - step - bool(self.training)) * groups if self.steps else None
        count = self.policy.admit(len(self.running), outstanding, groups, trainable)
        # a strategy that reads rewards while its group grows gets each trajectory scored alone, any other the whole group
        play, scorer = self.play, self.scorer
        if scorer is not None and self.recipe.reads_rewards:
            play, scorer = scored_play(play, scorer), None
        for order in self.sampler.orders(count, self.to_reissue):
            self.ledger.issue(order.key, order.task, step, self.generator.version)
            opened, lost = self.sessions.setdefault(order.key, []), list[str]()
            open_session, noted = partial(self._open, opened, order.number), _noting(play, lost)
            more = self.last_metrics, step, self.helper
            request = GroupRequest(order.key, order.task, order.size, open_session, noted, *more)
            grow = partial(self.sampler.grow, order, request, self.recipe.strategy)
            first = grow()
            task = asyncio.ensure_future(_grown(first, grow, opened, lost, scorer))
            task.add_done_callback(partial(_closed, first))
            self.running[task] = order.key
            self.issued_in[order.key] = step

    def _open(self, opened: list[Session], number: str, i: int, draft: bool = False) -> Session:
        """The i-th session of a group. A draft uses the random numbers of the exact sample it stands for."""
        seed = stable_seed(self.seed, "sample", number, i)
        opened.append(self.generator.open(seed, draft=True) if draft else self.generator.open(seed))
        return opened[-1]

    async def collect_step(self, step: int) -> list[Group]:
        """The groups of one step, oldest first. Fewer than the budget when too many had to be dropped."""
        count, finished = self.recipe.budget.groups, 0
        draws = count * (self.max_draws - 1) + self.policy.capacity(count, max(0, self.steps - step))
        self._harvest(step)  # what has ended while the learner worked
        while finished < draws:
            self.issue(step)
            if self.policy.select(self._oldest(), [g.id for g in self.ready], count, step) is not None:
                break
            # a synchronous wave is admitted as one: in which order its groups end must not matter
            until = asyncio.ALL_COMPLETED if self.policy.synchronous else asyncio.FIRST_COMPLETED
            await asyncio.wait(self.running, return_when=until)
            finished += self._harvest(step)
        in_order = sorted(self.ready, key=lambda g: draw_order(g.id))
        ready = [g.id for g in in_order]
        chosen = set(self.policy.select(self._oldest(), ready, count, step) or ready[:count])
        groups = [g for g in in_order if g.id in chosen]
        self.policy.check(groups, step)
        self.ready = deque(g for g in in_order if g.id not in chosen)
        self.training = len(groups)
        for key in chosen:
            self.issued_in.pop(key, None)
        self._evict(step, 1)  # nothing that they still sample could be trained on; `issue` replaces them
        return groups

    def _oldest(self) -> dict[str, int]:
        """The version of the oldest token of each outstanding group, in draw order; of a running one, the step of its issue."""
        keys = sorted([*self.running.values(), *(g.id for g in self.ready)], key=draw_order)
        return {key: self.issued_in[key] for key in keys}

    def _harvest(self, step: int) -> int:
        """Store, then admit or drop the groups that have ended; their number. Drop what is too old."""
        if (fatal := getattr(self.generator, "fatal", None)) is not None:
            raise fatal  # its servers are gone: the episodes that this ended must not be counted as failed
        done = sorted((task for task in self.running if task.done()), key=lambda t: draw_order(self.running[t]))
        # in draw order, not in that of completion: samplers learn from each, and timing must not change what they learn
        for task in done:
            key = self.running.pop(task)
            self.sessions.pop(key, None)
            self._finish(key, task.result(), step)
        self._evict(step)
        return len(done)

    def _evict(self, step: int, ahead: int = 0) -> None:
        """Drop what would be too old ``ahead`` steps from now. Running episodes are cancelled; nobody waits for their end."""
        late = set(self.policy.evict(self._oldest(), step + ahead))
        for task in [task for task, key in self.running.items() if key in late]:
            self.sampler.forget(key := self.running.pop(task))
            self.cancelled.add(task)
            task.cancel()
            task.add_done_callback(partial(self._cancelled, self.sessions.pop(key)))
        self.ready = deque(g for g in self.ready if g.id not in late)
        for key in sorted(late, key=draw_order):
            self._drop(key, self.policy.reason, step)

    def _cancelled(self, opened: list[Session], task: asyncio.Task[Group]) -> None:
        """A cancelled group has ended: close what it leaves open, also sessions that had not begun an episode."""
        self.cancelled.discard(task)
        close(opened)
        if not task.cancelled():
            task.exception()  # else asyncio reports that nobody read it

    def _finish(self, key: str, group: Group, step: int) -> None:
        """Store a finished group, then admit or drop it."""
        self.ledger.finish(group, step)
        self.ended += 1
        if reason := lost_in(group):
            self.lost += 1
            self.sampler.forget(key)
            self._drop(key, f"{LOST}: {reason}", step)
            if self.lost > LOST_SHARE * self.ended:
                raise HostFault(
                    f"the machine failed {self.lost} of {self.ended} groups, each {1 + len(PAUSES)} times, and nothing of them "
                    f"was trained on; the last: {reason}"
                )
            return
        usable_part, reasons = usable(group)
        self.dropped.update(f"trajectory: {reason}" for reason in reasons)
        if not usable_part.trajectories:
            self.failed_in_a_row += 1
            self.sampler.forget(key)
            self._drop(key, f"every trajectory failed: {reasons[0]}", step)
            if self.failed_in_a_row >= FAILED_IN_A_ROW:
                raise EnvironmentFault(
                    f"{self.failed_in_a_row} groups in a row had no usable trajectory; the last: {reasons[0]}"
                )
            return
        self.failed_in_a_row = 0
        self.sampler.observe(usable_part)
        self._admit(usable_part, step)

    def restore(self, finished: Sequence[Group], step: int) -> None:
        """After a resume: the groups that had ended and were not trained on, admitted as they were then."""
        for group in finished:
            self._admit(usable(group)[0], step)

    def _admit(self, group: Group, step: int) -> None:
        admitted = self.recipe.admission(group)
        self.sampler.meter.note("admission", admitted is not group)
        if isinstance(admitted, str):
            self._drop(group.id, admitted, step)
        else:
            self.ready.append(admitted)
            self.issued_in[group.id] = oldest_version(admitted, self.issued_in.get(group.id, 0))

    def _drop(self, key: str, reason: str, step: int) -> None:
        self.dropped[reason] += 1
        self.issued_in.pop(key, None)
        self.ledger.drop(key, reason, step)

    async def stop(self) -> None:
        """Cancel what is in flight. The ledger keeps it as in flight, so that a resume issues it again."""
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, *self.cancelled, return_exceptions=True)


async def _grown(
    first: Coroutine[Any, Any, Group],
    grow: Callable[[], Coroutine[Any, Any, Group]],
    opened: list[Session],
    lost: list[str],
    scorer: GroupScorer | None,
) -> Group:
    """The group, played and scored. What the machine failed is done again: the same task, the same seeds. ``lost`` holds how it
    failed episodes, also such as the strategy keeps out of the group (drafts, baselines)."""

    def again() -> Coroutine[Any, Any, Group]:
        close(opened)  # those that no episode closed
        opened.clear()
        lost.clear()
        return grow()

    group = await tried(first, again, lambda _: lost)
    if lost:
        return given_up(group, lost[-1])
    if scorer is not None:  # while it is scored, other groups are still sampled
        score = partial(scorer.score, group)
        group = await tried(score(), score, lost_in)
    return given_up(group, reason) if (reason := lost_in(group)) else group


def _closed(first: Coroutine[Any, Any, Group], _: object) -> None:
    first.close()  # a group that is cancelled before it begins would warn that nobody awaited it


def _noting(play: EpisodeRunner, lost: list[str]) -> EpisodeRunner:
    """``play``, which adds to ``lost`` how the machine failed an episode."""

    async def noted(*args: Any, **more: Any) -> Trajectory:
        trajectory = await play(*args, **more)
        if trajectory.lost:
            lost.append(trajectory.reason)
        return trajectory

    return noted


# ------------------------------------------------------------------- usable groups


def usable(group: Group) -> tuple[Group, list[str]]:
    """The part of a group that can be trained on, and why the rest cannot. A fork whose parent failed has lost its prefix."""
    rest: list[Trajectory] = []
    good = [t for t in group.trajectories if not _why_unusable(t)]
    while len(good) != len(rest):  # a dropped fork drops its own forks in the next pass
        rest, ids = good, {t.id for t in good}
        good = [t for t in rest if t.fork is None or t.fork.parent in ids]
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
