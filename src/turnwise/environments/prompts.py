"""Prompts of a file as an environment: one prompt, one answer. What the answer earns is said by reward functions, not here.

    prompt_class({"train": {0: problem, ...}, "held_out": {...}})    a class; a task's seed is the number of its row

Where every row has a reference answer, the class has scripted policies that give it, so that a model that knows no language can
begin by imitating them. Knows no file and no reward.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from turnwise.core.protocols import Action, Step
from turnwise.core.records import Message
from turnwise.environments.base import Environment, text_action
from turnwise.errors import EnvironmentFault, SettingError

NAME = "prompts"  # of the environment in tasks and settings
INTEGER = re.compile(r"-?[0-9]{1,9}")
NEAR_MISSES = (-10, -2, -1, 1, 2, 10)


@dataclass(frozen=True)
class PromptProblem:
    """One prompt, and the reference answer where there is one."""

    messages: tuple[Message, ...]
    answer: str | None = None
    tools: tuple[dict[str, Any], ...] = ()


class PromptEnvironment(Environment):
    """One answer to one prompt. ``prompt_class`` makes a subclass for each file."""

    max_turns = 1
    inline = True
    verdict: ClassVar[bool] = False  # the environment itself does not say whether an answer is right
    problems: ClassVar[Mapping[str, Mapping[int, PromptProblem]]]  # by split and row number
    seeds: ClassVar[Mapping[str, Sequence[int]]]  # the tasks of each split, which end
    problem: PromptProblem

    def reset(self, seed: int) -> Sequence[Message]:
        problems = self.problems[self.split]
        if seed not in problems:
            raise EnvironmentFault(f"no {self.split} row has the number {seed}; there are {len(problems)} rows")
        self.problem = problems[seed]
        self.tools = self.problem.tools
        return [dict(message) for message in self.problem.messages]

    def step(self, action: Action) -> Step:
        return Step(terminated=True, info={"tool_calls": len(action.calls), "tool_errors": len(action.faults)})


class AnsweredPromptEnvironment(PromptEnvironment):
    """Every row has a reference answer."""

    def answer(self) -> str:
        assert self.problem.answer is not None
        return self.problem.answer

    def oracle(self) -> Action:
        return text_action(self.answer())

    def random_action(self, rng: random.Random) -> Action:
        """The reference answer of a random row."""
        other = self.problems["train"][rng.choice(self.seeds["train"])]
        assert other.answer is not None
        return text_action(other.answer)

    def demonstrate(self, rng: random.Random) -> Action:
        """Right in half of the episodes. Otherwise a near miss of a whole number, so that an imitator must still read the
        prompt, or the answer of a random row."""
        if rng.random() < 0.5:
            return self.oracle()
        if INTEGER.fullmatch(self.answer()):
            return text_action(str(int(self.answer()) + rng.choice(NEAR_MISSES)))
        return self.random_action(rng)


def prompt_class(problems: Mapping[str, Mapping[int, PromptProblem]], verdict: bool = False) -> type[PromptEnvironment]:
    """The class whose tasks are these problems, by split and row number. ``verdict``: rewards say whether an answer is right."""
    answered = all(p.answer is not None for rows in problems.values() for p in rows.values())
    base = AnsweredPromptEnvironment if answered else PromptEnvironment
    seeds = {split: tuple(rows) for split, rows in problems.items()}
    body = {
        "problems": problems,
        "seeds": seeds,
        "verdict": verdict,
        "__doc__": "Prompts of a file.",
        "__module__": __name__,
    }
    return type(NAME, (base,), body)


def environment(member: str) -> type[PromptEnvironment]:
    """The class without prompts, for checks that need none."""
    if member:
        raise SettingError(f"no environment prompts:{member}; write --data FILE and --reward FUNCTION")
    return PromptEnvironment
