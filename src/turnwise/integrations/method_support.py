"""Which methods another trainer can run: what a recipe asks for, beside what that trainer can measure and do.

Nothing here knows a trainer or a method's name; a method is judged by its pieces alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from turnwise.algebra.control import Passes
from turnwise.algebra.gradient import Plain
from turnwise.algebra.mask import Informative
from turnwise.algebra.penalty import Penalty
from turnwise.algebra.piece import Piece
from turnwise.algebra.term import Term
from turnwise.algebra.value import FromMedian, Outcome
from turnwise.core.levels import GROUP
from turnwise.core.signals import CRITIC, SLOW, UTTERANCE, Signal
from turnwise.errors import RecipeError
from turnwise.recipes.recipe import Recipe

WHY = {  # what nobody measures outside our own learner
    Signal.VALUE: "a critic (a value head beside the policy)",
    Signal.TWIN: "a second critic",
    Signal.ANSWER: "the gold answer's likelihood at every turn",
    Signal.GRADIENT_NORM: "the gradient norm of every single trajectory",
    Signal.HELLINGER: "the Hellinger distance to the reference over the whole vocabulary",
    Signal.PUSH: "the optimiser's curvature in the last layer",
    Signal.PREVIOUS: "log-probabilities under the weights before the last training step",
    Signal.BLIND: "log-probabilities with the environment's words masked",
    Signal.TEACHER: "a teacher's log-probabilities",
    Signal.HITS: "candidates drawn at every token",
    Signal.RANK: "the effective rank of the hidden states",
    Signal.DEVIATION: "how far hidden states lie from the flow of good ones",
    Signal.PROBE: "a probe of the hidden states",
    Signal.Q: "a critic of whole turns",
}
KIN = {
    Signal.OLD_VALUE: Signal.VALUE,
    Signal.OLD_TWIN: Signal.TWIN,
    Signal.PUSH_SQUARE: Signal.PUSH,
    Signal.PUSH_MEAN: Signal.PUSH,
    Signal.RIVALS: Signal.HITS,
    Signal.RANK_SPEED: Signal.RANK,
    Signal.RANK_PUSH: Signal.RANK,
    **dict.fromkeys((*UTTERANCE[1:], *SLOW), Signal.Q),
}
DEFAULT = Recipe(advantage=Outcome())


def roots(recipe: Recipe) -> Iterator[Piece]:
    yield from (recipe.advantage, recipe.reward, recipe.ratio, recipe.gate, recipe.keep, recipe.gradient)
    yield from (weighted for weighted in recipe.penalties if weighted.weight)


def lacks(recipe: Recipe, has: frozenset[Signal]) -> list[str]:
    """In words, everything a recipe needs and a trainer with these signals cannot give."""
    missing = {KIN.get(s, s) for s in recipe.objective.needs - has}
    if missing & CRITIC:
        missing -= {Signal.TWIN}
    found = [f"it needs {WHY.get(s, str(s))}" for s in sorted(missing)]
    if not isinstance(recipe.gradient, Plain):
        found.append(f"it scales the finished gradient by further gradients or a rate of its own ({recipe.gradient!r})")
    if not isinstance(recipe.control, Passes):
        found.append(f"it has optimiser steps of its own ({recipe.control!r})")
    if recipe.smoothing is not None:
        found.append(f"it puts learned noise into every layer ({recipe.smoothing!r})")
    if recipe.precision.learner:
        found.append(f"it rounds what the learner's layers multiply ({recipe.precision!r})")
    if type(recipe.strategy) is not type(DEFAULT.strategy):
        found.append(f"it grows its groups in its own way ({recipe.strategy!r})")
    return found + [f"it {reason}" for reason in untold(recipe, roots(recipe))]


def untold(recipe: Recipe, within: Iterable[Piece]) -> list[str]:
    """In words, what a recipe reads that padded tensors of tokens and rewards do not tell."""
    pieces = {p for root in within for p in root.parts}
    found = [f"must be told: {', '.join(sorted(told))}"] if (told := {w for p in pieces for w in p.wants}) else []
    if any(type(p).recall is not Piece.recall for p in pieces):
        found.append("remembers something of every task, and tasks have no names there")
    if any(isinstance(p, Penalty) and p.couples for p in pieces):
        found.append("has a loss that reaches across trajectories")
    if type(recipe.replay) is not type(DEFAULT.replay):
        found.append(f"mixes in what was collected earlier ({recipe.replay!r})")
    return found


def require(recipe: Recipe, name: str, has: frozenset[Signal], trainer: str) -> None:
    reasons = lacks(recipe, has)
    if reasons:
        command = f"turnwise train {name}" if name else "turnwise.train"
        raise RecipeError(
            f"{name or 'this recipe'} cannot be trained inside {trainer}: {'; '.join(reasons)}. Use `{command}`, which can."
        )


def spans_groups(recipe: Recipe) -> bool:
    """Whether a step's plan compares or averages whole groups, so that no group may lie in two optimiser steps."""
    aggregates = [recipe.aggregate, *(w.aggregate for w in recipe.penalties if w.weight)]
    planned = [recipe.ratio, recipe.gate, recipe.keep, *(w for w in recipe.penalties if w.weight)]
    pieces = [part for root in planned for part in root.parts]
    return (
        recipe.ratio.couples
        or any(getattr(a, "over", None) == GROUP for a in aggregates)
        or any(isinstance(p, Informative | FromMedian) or (isinstance(p, Term) and p.judges) for p in pieces)
    )


__all__ = ["lacks", "require", "spans_groups"]
