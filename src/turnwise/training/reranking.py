"""Which of several answers a method's own values would take, and how often that one succeeds. Knows no formula."""

from __future__ import annotations

from typing import Any

from turnwise.core.batch import pack
from turnwise.core.protocols import Learner
from turnwise.core.records import Group, Status
from turnwise.evaluation.metrics import Evaluation
from turnwise.recipes.recipe import Recipe


def ranking_piece(recipe: Recipe) -> Any | None:
    """The piece that ranks finished answers, if the method has one."""
    parts = (part for weighted in recipe.penalties if weighted.weight for part in weighted.parts)
    return next((part for part in parts if hasattr(part, "rank")), None)


def reranked(recipe: Recipe, learner: Learner, evaluation: Evaluation) -> dict[str, float]:
    """The success and the reward of the answer that is ranked first; empty with one answer for each task."""
    piece = ranking_piece(recipe)
    if piece is None or not evaluation.trajectories or max(map(len, evaluation.trajectories)) < 2:
        return {}
    groups, first = [], list[Any]()
    for n, (task, samples) in enumerate(zip(evaluation.tasks, evaluation.trajectories)):
        usable = tuple(t for t in samples if t.status != Status.FAILED and t.sampled)
        groups += [Group(str(n), task, usable)] if usable else []
        first += [] if usable else [samples[0]]
    batch = pack(groups)
    scores = iter(piece.rank(batch.put(learner.measure(batch, piece.ranks_by))).x.tolist())
    for group in groups:
        ranked = [(next(scores), t) for t in group.trajectories]
        first.append(max(ranked, key=lambda pair: pair[0])[1])
    success = (
        {} if evaluation.success is None else {"reranked_success": sum(bool(t.success) for t in first) / len(first)}
    )
    return {**success, "reranked_reward": sum(t.reward for t in first) / len(first)}


__all__ = ["ranking_piece", "reranked"]
