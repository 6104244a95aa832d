"""Episodes that start near the end of a recorded solution, and further back as they succeed. The prefix is context."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from turnwise.core.protocols import Session
from turnwise.core.records import Group
from turnwise.core.seeds import stable_seed
from turnwise.errors import RecipeError
from turnwise.rollout.guidance.base import LiveGuidance, PlainGroups
from turnwise.rollout.guidance.support import Support
from turnwise.rollout.strategies.base import GroupRequest, Strategy, succeeded

TASKS = 65536  # tasks that are remembered; the oldest are forgotten first


async def _started_late(request: GroupRequest, sessions: list[Session], turns_left: int) -> Group:
    return request.grown(await request.play_all(sessions, support=Support(turns_left=turns_left)))


@dataclass(frozen=True)
class BackwardStarts:
    """A group starts ``first`` turns before the end of its task's solution. Where at least ``enough`` of its episodes succeed,
    the task's next group starts ``by`` turns earlier; where none does, ``by`` turns later, but never nearer to the end than
    ``first``. Beyond the beginning of the solution groups start at the prompt. Tasks must come back: use a pool."""

    first: int = 1
    by: int = 1
    enough: float = 0.5

    requirements = frozenset({"solutions"})
    reads_rewards = False

    def __post_init__(self) -> None:
        if not (self.first >= 1 and self.by >= 1 and 0 < self.enough <= 1):
            raise RecipeError(f"need first >= 1, by >= 1 and 0 < enough <= 1, got {self}")

    def open(self, seed: int) -> LiveGuidance:
        return _BackwardStarts(rule=self)

    def move(self, left: int, rate: float) -> int:
        """The turns that are left to a task's next group, after one of which a share ``rate`` succeeded."""
        return left + self.by if rate >= self.enough else max(self.first, left - self.by) if rate == 0 else left


@dataclass
class _BackwardStarts(PlainGroups):
    rule: BackwardStarts = field(default_factory=BackwardStarts)
    left: dict[str, int] = field(default_factory=dict)  # by task key

    def begin(self, request: GroupRequest, strategy: Strategy) -> Coroutine[Any, Any, Group]:
        return _started_late(request, request.sessions(), self.left.get(request.task.key, self.rule.first))

    def observe(self, group: Group) -> None:
        self.count_results(group.trajectories)
        key, rate = group.task.key, sum(map(succeeded, group.trajectories)) / max(1, len(group.trajectories))
        before = self.left.pop(key, self.rule.first)
        if not any(t.guidance for t in group.trajectories):  # it started at the prompt: there is no earlier start
            self.count("withdrawn", int(rate >= self.rule.enough))
            self.left[key] = before if rate else self.rule.move(before, rate)
        else:
            self.left[key] = self.rule.move(before, rate)
        while len(self.left) > TASKS:
            del self.left[next(iter(self.left))]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.left = {key: int(n) for key, n in state["left"].items()}

    def metrics(self) -> dict[str, float]:
        mean = sum(self.left.values()) / max(1, len(self.left))
        return {**super().metrics(), "guidance/turns_left": mean}


@dataclass(frozen=True)
class LateStarts:
    """Every group starts at one of ``starts`` + 1 places with equal chances: at the prompt, or k·``apart`` turns before the end
    of its task's solution, k = 1 ... ``starts``. All episodes of a group start at the same place."""

    starts: int = 3
    apart: int = 2

    requirements = frozenset({"solutions"})
    reads_rewards = False

    def __post_init__(self) -> None:
        if self.starts < 0 or self.apart < 1:
            raise RecipeError(f"need starts >= 0 and apart >= 1, got {self}")

    def open(self, seed: int) -> LiveGuidance:
        return _LateStarts(rule=self, seed=seed)


@dataclass
class _LateStarts(PlainGroups):
    rule: LateStarts = field(default_factory=LateStarts)
    seed: int = 0

    def begin(self, request: GroupRequest, strategy: Strategy) -> Coroutine[Any, Any, Group]:
        number = request.group.split("~")[0]
        k = stable_seed(self.seed, "start", number) * (self.rule.starts + 1) >> 63
        if k == 0:
            return strategy.begin(request)
        return _started_late(request, request.sessions(), k * self.rule.apart)

    def observe(self, group: Group) -> None:
        self.count_results(group.trajectories)
