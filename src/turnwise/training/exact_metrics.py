"""Metrics of a policy that are computed from its probabilities, not from episodes: exploitability in a game, for instance.

The environment's class lists what a policy may be asked and turns the probabilities of its answers into numbers. Knows neither
the numbers nor the environment. A probability is that of the answer's usual spelling and the end of the turn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from turnwise.core.batch import pack
from turnwise.core.levels import TRAJECTORY
from turnwise.core.protocols import Learner
from turnwise.core.records import Group, Origin, Task, Trajectory, Turn
from turnwise.core.signals import Signal
from turnwise.environments.base import PolicyQuestion, overrides, user_message
from turnwise.rollout.renderer import Renderer

QUESTIONS_PER_BATCH = 64


def has_exact_metrics(env_class: type[Any]) -> bool:
    """Whether the class computes any."""
    return overrides(env_class, "policy_questions")


def exact_metrics(env_class: type[Any], renderer: Renderer, learner: Learner, temperature: float) -> dict[str, float]:
    """The metrics of the learner's policy, by name; empty where the class has none."""
    questions = env_class.policy_questions() if has_exact_metrics(env_class) else ()
    if not questions:
        return {}
    chances = answer_chances(questions, renderer, learner, temperature)
    return {name: float(value) for name, value in env_class.policy_metrics(chances).items()}


def answer_chances(
    questions: Sequence[PolicyQuestion], renderer: Renderer, learner: Learner, temperature: float
) -> dict[str, Mapping[str, float]]:
    """The probability of every answer to every prompt."""
    chances: dict[str, Mapping[str, float]] = {}
    for i in range(0, len(questions), QUESTIONS_PER_BATCH):
        part = questions[i : i + QUESTIONS_PER_BATCH]
        groups = [_group(f"{i + n}", question, renderer, temperature) for n, question in enumerate(part)]
        logp = learner.measure(pack(groups), frozenset({Signal.LOGP}))[Signal.LOGP]
        totals: Iterator[float] = iter(logp.sum(TRAJECTORY).x.tolist())
        chances |= {
            question.prompt: {answer: math.exp(next(totals)) for answer in question.answers} for question in part
        }
    return chances


def _group(key: str, question: PolicyQuestion, renderer: Renderer, temperature: float) -> Group:
    """A prompt with each of its answers, as if an expert had given them."""
    task, context = Task("question", 0), tuple(renderer.open([user_message(question.prompt)]).ids)
    turns = [Turn(context, tuple(renderer.encode_turn(a)), temperature=temperature) for a in question.answers]
    answers = (Trajectory(f"{key}.{n}", task, (turn,), origin=Origin.EXPERT) for n, turn in enumerate(turns))
    return Group(key, task, tuple(answers))
