"""A memory of finished tasks: prompts show the most similar ones, solved ones to follow and failed ones to avoid."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise.core.protocols import Session
from turnwise.core.records import Group, Trajectory
from turnwise.errors import RecipeError
from turnwise.rollout.guidance.base import LiveGuidance, PlainGroups
from turnwise.rollout.guidance.support import Support
from turnwise.rollout.guidance.when_stuck import GUIDED, guided_sessions
from turnwise.rollout.strategies.base import GroupRequest, Strategy, succeeded

Case = list[Any]  # [first message, dialogue, whether it succeeded]


@dataclass(frozen=True)
class CaseMemory:
    """The first trajectory of a group is sampled plainly and tells the first message of the task. The prompts of the others show
    the ``cases`` finished tasks with the most similar first message (cosine of word counts). Each task leaves one case, a success
    where there is one; the memory holds the last ``size``. The prompt with the cases is recorded and trained under."""

    cases: int = 4
    size: int = 256
    longest: int = 400  # characters of one case

    requirements = frozenset({"help"})
    reads_rewards = False

    def __post_init__(self) -> None:
        if not (self.cases >= 0 and self.size >= 1 and self.longest >= 1):
            raise RecipeError(f"need cases >= 0 and size, longest >= 1, got {self}")

    def open(self, seed: int) -> LiveGuidance:
        return _CaseMemory(rule=self)


@dataclass
class _CaseMemory(PlainGroups):
    rule: CaseMemory = field(default_factory=CaseMemory)
    stored: dict[str, Case] = field(default_factory=dict)  # by task key, oldest first

    def begin(self, request: GroupRequest, strategy: Strategy) -> Coroutine[Any, Any, Group]:
        if request.size < 2 or not self.rule.cases:
            return strategy.begin(request)
        plain = strategy.begin(replace(request, size=1))
        return self._grow(request, plain, guided_sessions(request, request.size - 1))

    async def _grow(self, request: GroupRequest, plain: Coroutine[Any, Any, Group], spare: list[Session]) -> Group:
        group = await plain
        text = self.case_text(group)
        self.count("groups_with_cases", int(bool(text)))
        more: dict[str, Any] = {"support": Support(text=text)} if text else {}
        played = await request.play_all(spare, GUIDED, **more)
        group = replace(group, trajectories=(*group.trajectories, *played))
        self.count_results(group.trajectories)
        return group

    def case_text(self, group: Group) -> str:
        """The most similar cases as text; ties go to the latest. Empty without any."""
        asked = _words(next((first_message(t) for t in group.trajectories if t.messages), ""))
        others = [case for key, case in self.stored.items() if key != group.task.key]
        order = sorted(range(len(others)), key=lambda n: (-cosine(asked, _words(others[n][0])), -n))
        nearest = [others[n] for n in order[: self.rule.cases]]
        kinds = (("earlier tasks that were solved:", True), ("earlier tasks that failed, do otherwise:", False))
        parts = [[title, *(shown for _, shown, good in nearest if good == kind)] for title, kind in kinds]
        return "\n\n".join("\n".join(part) for part in parts if len(part) > 1)

    def observe(self, group: Group) -> None:
        told = [t for t in group.trajectories if t.messages and t.fork is None]
        question = next((first_message(t) for t in told if not t.guidance), "")
        if question:
            best = next((t for t in told if succeeded(t)), told[0])
            dialogue = "\n".join([question, *_after_first_message(best)])
            self.stored.pop(group.task.key, None)
            self.stored[group.task.key] = [question, dialogue[: self.rule.longest], succeeded(best)]
        for key in list(self.stored)[: -self.rule.size]:
            del self.stored[key]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "stored": self.stored}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.stored = {key: list(case) for key, case in state["stored"].items()}

    def metrics(self) -> dict[str, float]:
        solved = sum(bool(good) for *_, good in self.stored.values())
        return {**super().metrics(), "guidance/cases": float(len(self.stored)), "guidance/cases_solved": float(solved)}


def first_message(trajectory: Trajectory) -> str:
    """What the first user message of a trajectory says."""
    users = [m for m in trajectory.messages if m.get("role") == "user"]
    return str((users or list(trajectory.messages))[0].get("content", ""))


def _after_first_message(trajectory: Trajectory) -> list[str]:
    """What was said after the first user message: without the cases that a guided prompt holds."""
    begin = next((n for n, m in enumerate(trajectory.messages) if m.get("role") == "user"), 0)
    return [str(m.get("content", "")) for m in trajectory.messages[begin + 1 :]]


def _words(text: str) -> Counter[str]:
    return Counter(text.split())


def cosine(a: Counter[str], b: Counter[str]) -> float:
    """Of two word counts, in [0, 1]; 0 where one is empty."""
    norm = math.sqrt(sum(n * n for n in a.values()) * sum(n * n for n in b.values()))
    return sum(n * b[word] for word, n in a.items()) / norm if norm else 0.0


__all__ = ["CaseMemory", "cosine", "first_message"]
