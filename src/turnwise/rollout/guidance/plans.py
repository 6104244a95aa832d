"""Plans: an expert's trace becomes a short plan, and the policy itself plays the task with the plan in its prompt.

What it plays so is close to what it can say, unlike the expert's own trace. Successes join the group as expert data, without the
plan. Knows trajectories; no token, no environment, no loss.
"""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise.core.protocols import Session
from turnwise.core.records import Group, Origin, Trajectory
from turnwise.errors import RecipeError
from turnwise.rollout.guidance.base import LiveGuidance, PlainGroups
from turnwise.rollout.guidance.support import Support
from turnwise.rollout.guidance.when_stuck import GUIDED, guided_sessions
from turnwise.rollout.strategies.base import GroupRequest, Strategy, all_failed, close, succeeded


@dataclass(frozen=True)
class SelfRolledPlans:
    """A group without a success whose task has no trace yet gets up to ``tries`` episodes of the policy with the plan of the
    scripted solution in its prompt, one after the other until one succeeds. The success joins the group as expert data: the
    record contains no plan and no log-probabilities of the planned policy. A task is played so once; ``tasks`` are remembered."""

    tries: int = 4
    tasks: int = 65536

    requirements = frozenset({"solutions"})
    reads_rewards = True

    def __post_init__(self) -> None:
        if self.tries < 1 or self.tasks < 1:
            raise RecipeError(f"need tries >= 1 and tasks >= 1, got {self}")

    def open(self, seed: int) -> LiveGuidance:
        return _SelfRolledPlans(rule=self)


@dataclass
class _SelfRolledPlans(PlainGroups):
    rule: SelfRolledPlans = field(default_factory=SelfRolledPlans)
    traced: list[str] = field(default_factory=list)  # keys of tasks that have a success, planned or not, oldest first

    def begin(self, request: GroupRequest, strategy: Strategy) -> Coroutine[Any, Any, Group]:
        plain = strategy.begin(request)
        if request.task.key in self.traced:
            return plain
        return self._grow(request, plain, guided_sessions(request, self.rule.tries))

    async def _grow(self, request: GroupRequest, plain: Coroutine[Any, Any, Group], spare: list[Session]) -> Group:
        group = await plain
        self.count_results(group.trajectories)
        while spare and all_failed(group.trajectories):
            number, session = GUIDED + self.rule.tries - len(spare), spare.pop(0)
            (rolled,) = await request.play_all([session], number, support=Support(plan=True, recorded=False))
            self.count_results([rolled])
            self.count("plans_given")
            if succeeded(rolled):
                self.count("plans_worked")
                group = replace(group, trajectories=(*group.trajectories, as_expert(rolled)))
                break
        close(spare)
        return group

    def observe(self, group: Group) -> None:
        if any(map(succeeded, group.trajectories)) and group.task.key not in self.traced:
            self.traced = [*self.traced, group.task.key][-self.rule.tasks :]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "traced": self.traced}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.traced = list(state["traced"])

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), "guidance/traced_tasks": float(len(self.traced))}


def as_expert(rolled: Trajectory) -> Trajectory:
    """What the policy played with the plan, as expert data: its behaviour policy is not that of the plain prompt."""
    turns = tuple(replace(turn, logp=(), mass=(), version=()) for turn in rolled.turns)
    return replace(rolled, turns=turns, origin=Origin.EXPERT)
