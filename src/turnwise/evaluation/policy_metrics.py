"""Metrics of a policy that are computed from its probabilities, not from sampled episodes: held-out pairs that it ranks right,
exact numbers of a game such as exploitability, and the answers that a method's own values would choose. Knows no objective.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from turnwise.core.batch import pack
from turnwise.core.levels import TRAJECTORY
from turnwise.core.protocols import Learner
from turnwise.core.records import Group, Origin, Status, Task, Trajectory, Turn
from turnwise.core.signals import Signal
from turnwise.evaluation.evaluator import Evaluation
from turnwise.maths.statistics import wilson

if TYPE_CHECKING:
    from turnwise.recipes.recipe import Recipe
    from turnwise.rollout.renderer import Renderer

GROUPS_PER_BATCH = 64
NOT_EVALUATED: Mapping[str, Any] = {"success": None, "tasks": 0, "samples": 0, "by_difficulty": {}}


# -------------------------------------------------------------- preference pairs


def rank_pairs(learner: Learner, groups: Sequence[Group]) -> dict[str, float]:
    """Share of pairs whose better answer has the higher log-probability, in total and per token, and its mean log-probability."""
    # of each answer: its pair, 1 if it is the better one, log-probabilities in total and per token
    rows: list[tuple[str, float, float, float]] = []
    for i in range(0, len(groups), GROUPS_PER_BATCH):
        some = groups[i : i + GROUPS_PER_BATCH]
        logp = learner.measure(pack(some), frozenset({Signal.LOGP}))[Signal.LOGP]
        answers = [(g.id, t) for g in some for t in g.trajectories]
        for (pair, t), whole, each in zip(answers, logp.sum(TRAJECTORY).x.tolist(), logp.mean(TRAJECTORY).x.tolist()):
            if not t.facts.get("revises"):
                rows.append((pair, float(t.facts.get("chosen", 1.0)), whole, each))
    if not rows:
        return {}
    better = {key: (whole, each) for key, chosen, whole, each in rows if chosen}
    worse = {key: (whole, each) for key, chosen, whole, each in rows if not chosen}
    chosen_logp = [each for _, chosen, _, each in rows if chosen]
    metrics = {"groups": float(len(groups)), "logp": sum(chosen_logp) / max(1, len(chosen_logp))}
    pairs = [(better[key], worse[key]) for key in better if key in worse]
    if pairs:
        metrics["accuracy"] = sum(good[0] > bad[0] for good, bad in pairs) / len(pairs)
        metrics["accuracy_per_token"] = sum(good[1] > bad[1] for good, bad in pairs) / len(pairs)
    return metrics


def as_evaluation(ranking: Mapping[str, float]) -> dict[str, Any]:
    """A ranking in the form of an evaluation summary: a pair ranked right counts as a task solved. Held-out rows that are no
    pairs have a log-probability and no success."""
    if "accuracy" not in ranking:
        return dict(NOT_EVALUATED)
    pairs = int(ranking["groups"])
    bounds = wilson(ranking["accuracy"] * pairs, pairs)
    outcome = {"success": ranking["accuracy"], "interval": [bounds.low, bounds.high], "tasks": pairs, "samples": 1}
    return {**outcome, **dict.fromkeys(("turns", "tool_calls", "tool_errors"), 0.0), "by_difficulty": {}}


# ------------------------------------------------------------------ exact metrics


def exact_metrics(env_class: type[Any], renderer: Renderer, learner: Learner, temperature: float) -> dict[str, float]:
    """The metrics of the learner's policy, by name; empty where the class has none. The class lists what a policy may be asked
    (``policy_questions``) and turns the probabilities of its answers into numbers. A probability is that of the answer's usual
    spelling and the end of the turn."""
    questions: Sequence[Any] = getattr(env_class, "policy_questions", tuple)()
    if not questions:
        return {}
    chances: dict[str, Mapping[str, float]] = {}
    for i in range(0, len(questions), GROUPS_PER_BATCH):
        some = questions[i : i + GROUPS_PER_BATCH]
        groups = []
        for n, question in enumerate(some, start=i):  # a prompt with each answer, as if an expert had given them
            task = Task("question", 0)
            context = tuple(renderer.open([{"role": "user", "content": question.prompt}]).ids)
            turns = [Turn(context, tuple(renderer.encode_turn(a)), temperature=temperature) for a in question.answers]
            answers = (Trajectory(f"{n}.{k}", task, (turn,), origin=Origin.EXPERT) for k, turn in enumerate(turns))
            groups.append(Group(str(n), task, tuple(answers)))
        logp = learner.measure(pack(groups), frozenset({Signal.LOGP}))[Signal.LOGP]
        totals: Iterator[float] = iter(logp.sum(TRAJECTORY).x.tolist())
        chances |= {q.prompt: {answer: math.exp(next(totals)) for answer in q.answers} for q in some}
    return {name: float(value) for name, value in env_class.policy_metrics(chances).items()}


# ---------------------------------------------------------- answers ranked by values


def reranked(recipe: Recipe, learner: Learner, evaluation: Evaluation) -> dict[str, float]:
    """The success and the reward of the answer that is ranked first; empty with one answer for each task."""
    parts = (part for weighted in recipe.penalties if weighted.weight for part in weighted.parts)
    piece: Any = next((part for part in parts if hasattr(part, "rank")), None)
    if piece is None or not evaluation.trajectories or max(map(len, evaluation.trajectories)) < 2:
        return {}
    groups, first = [], list[Any]()
    for n, (task, samples) in enumerate(zip(evaluation.tasks, evaluation.trajectories)):
        # a failed episode has no answer to rank; a task of such ones counts with its first
        usable = tuple(t for t in samples if t.status != Status.FAILED and t.sampled)
        groups += [Group(str(n), task, usable)] if usable else []
        first += [] if usable else [samples[0]]
    batch = pack(groups)
    scores = iter(piece.rank(batch.put(learner.measure(batch, piece.ranks_by))).x.tolist())
    for group in groups:
        ranked = [(next(scores), t) for t in group.trajectories]
        first.append(max(ranked, key=lambda pair: pair[0])[1])
    metrics = {"reranked_reward": sum(t.reward for t in first) / len(first)}
    if evaluation.success is not None:
        metrics = {"reranked_success": sum(bool(t.success) for t in first) / len(first), **metrics}
    return metrics
