"""Scores groups with the reward functions of a run: named rewards, their weighted sum, and a verdict.

Every function sees the answers of a group with the columns of its row. Functions of the user's own process run in a thread under
the time limit; the others in processes that can be killed. Knows no environment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from turnwise.core.records import Group, Message, Trajectory
from turnwise.environments.calls import call_environment
from turnwise.errors import EnvironmentFault
from turnwise.rewards.functions import RewardFunction
from turnwise.rewards.samples import AnswerGroup, AnswerSample, RewardOutcome
from turnwise.rollout.scoring import RewardScore, apply_scores, scorable

ENVIRONMENT = "environment"  # name of the environment's own reward
THREADS = 16  # calls of reward processes that wait at the same time

Columns = Callable[[Group], tuple[str | list[Message] | None, Mapping[str, Any]]]
"""The prompt of a group as its row has it (None: that of the dialogue), and the columns of its row."""


@dataclass(frozen=True)
class FunctionScorer:
    """``environment_weight`` multiplies what the environment paid; None: it pays nothing and is not reported."""

    functions: tuple[RewardFunction, ...]
    columns: Columns
    seconds: float = 10.0
    environment_weight: float | None = None
    unscored: float | None = None  # the reward where a function fails; None: the trajectory fails

    async def score(self, group: Group) -> Group:
        indices = scorable(group)
        if not indices:
            return group
        weighed = replace(group, trajectories=tuple(self._weigh(t) for t in group.trajectories))
        answers = self._answers(group, indices)
        columns = await asyncio.gather(*(self._call(function, answers) for function in self.functions))
        scores = {i: self._combine([outcomes[n] for outcomes in columns]) for n, i in enumerate(indices)}
        return apply_scores(weighed, scores)

    def _weigh(self, trajectory: Trajectory) -> Trajectory:
        weight = self.environment_weight
        if weight is None or not trajectory.turns:
            return trajectory
        turns = tuple(replace(turn, reward=turn.reward * weight) for turn in trajectory.turns)
        named = {ENVIRONMENT: trajectory.reward, **trajectory.rewards}
        return replace(trajectory, turns=turns if weight != 1 else trajectory.turns, rewards=named)

    def _answers(self, group: Group, indices: Sequence[int]) -> AnswerGroup:
        prompt, columns = self.columns(group)
        members = [group.trajectories[i] for i in indices]
        dialogues = [split_dialogue(t.messages) for t in members]
        samples = [_sample(t, completion) for t, (_, completion) in zip(members, dialogues)]
        return AnswerGroup(dialogues[0][0] if prompt is None else prompt, tuple(samples), columns)

    async def _call(self, function: RewardFunction, answers: AnswerGroup) -> list[RewardOutcome]:
        if not function.runs_here:
            return await asyncio.get_running_loop().run_in_executor(_executor(), function.score, answers)
        try:
            return list(await call_environment(function.score, answers, seconds=self.seconds, inline=False))
        except (EnvironmentFault, RuntimeError) as fault:
            return [RewardOutcome(fault=str(fault))] * len(answers.answers)

    def _combine(self, outcomes: Sequence[RewardOutcome]) -> RewardScore:
        """One trajectory's score from the outcome of every function."""
        rewards: dict[str, float] = {}
        total, verdicts = 0.0, []
        for function, outcome in zip(self.functions, outcomes):
            name, score = function.spec.name, outcome.score
            if outcome.fault and self.unscored is None:
                return RewardScore(failure=f"reward {name}: {outcome.fault}")
            score = self.unscored if outcome.fault else score
            if score is None:
                continue  # does not apply to this row
            rewards |= {name: score, **{f"{name}/{key}": value for key, value in outcome.extra.items()}}
            total += function.spec.weight * score
            verdicts += [outcome.success] if outcome.success is not None else []
        if not rewards and self.environment_weight is None:
            return RewardScore(failure="no reward function applies to this row: all returned None")
        return RewardScore(rewards, total, all(verdicts) if verdicts else None)

    def close(self) -> None:
        for function in self.functions:
            function.close()


def split_dialogue(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """What the agent read first, and everything from its first message on."""
    first = next((i for i, m in enumerate(messages) if m.get("role") == "assistant"), len(messages))
    return list(messages[:first]), list(messages[first:])


def _sample(trajectory: Trajectory, completion: list[Message]) -> AnswerSample:
    spoken = [m["content"] for m in completion if m.get("role") == "assistant"]
    ids = [int(token) for turn in trajectory.turns for token in turn.tokens]
    return AnswerSample(spoken[-1] if spoken else "", [dict(m) for m in completion], ids)


@cache
def _executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="reward")
