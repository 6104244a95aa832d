"""Help by task, over many steps: the shortest prefix that works, prefixes of recorded solutions, hints by difficulty."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise.core.protocols import Session
from turnwise.core.records import Group
from turnwise.core.seeds import stable_seed
from turnwise.errors import RecipeError
from turnwise.rollout.guidance.base import LiveGuidance, PlainGroups
from turnwise.rollout.guidance.support import Support
from turnwise.rollout.guidance.when_stuck import GUIDED, guided_sessions, parse_shares
from turnwise.rollout.strategies.base import GroupRequest, Strategy, succeeded

TASKS = 65536  # tasks that are remembered; the oldest are forgotten first


def _uniform(*parts: object) -> float:
    return stable_seed(*parts) / 2**63


async def _guided_group(request: GroupRequest, sessions: list[Session], support: Support) -> Group:
    return request.grown(await request.play_all(sessions, support=support))


# ------------------------------------------------------- the shortest prefix that works


@dataclass(frozen=True)
class ShortestPrefix:
    """Hard tasks, those whose last plain group had no success, are sampled with and without help in turn. Help is the shortest
    of the ``shares`` of the solution, in the prompt, from which at least one of ``tries`` rollouts succeeded; while none has, the
    shares are tried in order, and after the last the first again. The first plain success of a task ends its help.

    Groups are guided as a whole, so guided and plain rollouts are never compared. Tasks must come back: use a pool."""

    shares: str = "0.25/0.5/0.75"
    tries: int = 8

    requirements = frozenset({"solutions"})
    reads_rewards = False

    def __post_init__(self) -> None:
        parse_shares(self.shares)
        if self.tries < 1:
            raise RecipeError(f"{self.tries} tries of a prefix; write at least 1")

    def open(self, seed: int) -> LiveGuidance:
        return _ShortestPrefix(rule=self, shares=parse_shares(self.shares))


@dataclass
class _ShortestPrefix(PlainGroups):
    rule: ShortestPrefix = field(default_factory=ShortestPrefix)
    shares: tuple[float, ...] = ()
    hard: dict[str, list[int]] = field(default_factory=dict)  # by task key: share, tries with it, works, guided next

    def begin(self, request: GroupRequest, strategy: Strategy) -> Coroutine[Any, Any, Group]:
        level, _, _, guided = self.hard.get(request.task.key, (0, 0, 0, 0))
        if not guided:
            return strategy.begin(request)
        return _guided_group(request, request.sessions(), Support(share=self.shares[level]))

    def observe(self, group: Group) -> None:
        self.count_results(group.trajectories)
        key, solved = group.task.key, any(map(succeeded, group.trajectories))
        if not all(t.guidance for t in group.trajectories):
            self._after_plain(key, solved)
            return
        level, tries, works, _ = self.hard.pop(key, (0, 0, 0, 0))
        self.count(f"tier_{level + 1}_given")
        tries, works = tries + len(group.trajectories), int(works or solved)
        if not works and tries >= self.rule.tries:
            level, tries = (level + 1) % len(self.shares), 0
        self._remember(key, [level, tries, works, 0])

    def _after_plain(self, key: str, solved: bool) -> None:
        if solved:
            self.count("withdrawn", int(self.hard.pop(key, None) is not None))
        else:
            level, tries, works, _ = self.hard.pop(key, (0, 0, 0, 0))
            self._remember(key, [level, tries, works, 1])

    def _remember(self, key: str, entry: list[int]) -> None:
        self.hard[key] = entry
        while len(self.hard) > TASKS:
            del self.hard[next(iter(self.hard))]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "hard": self.hard}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.hard = {key: [int(n) for n in entry] for key, entry in state["hard"].items()}

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), "guidance/hard_tasks": float(len(self.hard))}


# --------------------------------------------------------- prefixes of recorded solutions


@dataclass(frozen=True)
class RecordedPrefixes:
    """Of ``prefixes`` + 1 groups of a task, one starts at the prompt; the others continue one of ``prefixes`` cuts of the
    solution, uniform between ``low`` and ``high`` of its ids and fixed for the task. The prefix is context: it is played in the
    environment and never trained on."""

    prefixes: int = 3
    low: float = 0.4
    high: float = 0.8

    requirements = frozenset({"solutions"})
    reads_rewards = False

    def __post_init__(self) -> None:
        if not (self.prefixes >= 0 and 0 <= self.low <= self.high <= 1):
            raise RecipeError(f"need prefixes >= 0 and 0 <= low <= high <= 1, got {self}")

    def open(self, seed: int) -> LiveGuidance:
        return _RecordedPrefixes(rule=self, seed=seed)

    def cut(self, seed: int, task: str, k: int) -> float:
        """Where the k-th prefix of a task ends, as a share of the solution."""
        return self.low + (self.high - self.low) * _uniform(seed, "cut", task, k)


@dataclass
class _RecordedPrefixes(PlainGroups):
    rule: RecordedPrefixes = field(default_factory=RecordedPrefixes)
    seed: int = 0

    def begin(self, request: GroupRequest, strategy: Strategy) -> Coroutine[Any, Any, Group]:
        number = request.group.split("~")[0]
        k = int(_uniform(self.seed, "which", number) * (self.rule.prefixes + 1))
        if k == self.rule.prefixes:
            return strategy.begin(request)
        support = Support(share=self.rule.cut(self.seed, request.task.key, k), played=True)
        return _guided_group(request, request.sessions(), support)

    def observe(self, group: Group) -> None:
        self.count_results(group.trajectories)


# ----------------------------------------------------------------- hints by difficulty


@dataclass(frozen=True)
class HintByDifficulty:
    """Half of a group is played without help. The harder it was, d = 1 − success rate, the longer the prefix of the solution that
    the other half continues: share = ``most``·d; d = 0 means no help. The prefix is context."""

    most: float = 0.8

    requirements = frozenset({"solutions"})
    reads_rewards = True

    def __post_init__(self) -> None:
        if not 0 < self.most <= 1:
            raise RecipeError(f"most is {self.most}; write a share above 0 and up to 1")

    def open(self, seed: int) -> LiveGuidance:
        return _HintByDifficulty(rule=self)

    def share(self, success: float) -> float:
        return self.most * (1 - success)


@dataclass
class _HintByDifficulty(PlainGroups):
    rule: HintByDifficulty = field(default_factory=HintByDifficulty)

    def begin(self, request: GroupRequest, strategy: Strategy) -> Coroutine[Any, Any, Group]:
        plain = (request.size + 1) // 2
        first = strategy.begin(replace(request, size=plain))
        return self._grow(request, first, guided_sessions(request, request.size - plain))

    async def _grow(self, request: GroupRequest, plain: Coroutine[Any, Any, Group], spare: list[Session]) -> Group:
        group = await plain
        rate = sum(map(succeeded, group.trajectories)) / max(1, len(group.trajectories))
        share = self.rule.share(rate)
        more = {"support": Support(share=share, played=True)} if share else {}
        self.count("hints_given", int(bool(share)))
        played = await request.play_all(spare, GUIDED, **more)
        group = replace(group, trajectories=(*group.trajectories, *played))
        self.count_results(group.trajectories)
        return group
