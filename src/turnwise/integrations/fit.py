"""Which methods another trainer can run: what a recipe asks for, beside what that trainer can measure and do.

Nothing here knows a trainer or a method's name; a method is judged by its pieces alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from turnwise.algebra.control import Passes
from turnwise.algebra.gradient import Plain
from turnwise.algebra.mask import Informative
from turnwise.algebra.peers import Same
from turnwise.algebra.piece import Piece
from turnwise.algebra.term import Term
from turnwise.algebra.value import FromMedian, Outcome
from turnwise.credit.trajectories import EarlyTools
from turnwise.errors import RecipeError
from turnwise.levels import GROUP
from turnwise.recipe import Recipe
from turnwise.signals import CRITIC, Signal

WHY = {  # what nobody measures outside our own learner
    Signal.VALUE: "a critic (a value head beside the policy)",
    Signal.TWIN: "a second critic",
    Signal.ANSWER: "the gold answer's likelihood at every turn",
    Signal.GRADIENT_NORM: "the gradient norm of every single trajectory",
    Signal.HELLINGER: "the Hellinger distance to the reference over the whole vocabulary",
    Signal.PUSH: "the optimiser's curvature in the last layer",
    Signal.PREVIOUS: "log-probabilities under the weights before the last training step",
}
KIN = {
    Signal.OLD_VALUE: Signal.VALUE,
    Signal.OLD_TWIN: Signal.TWIN,
    Signal.PUSH_SQUARE: Signal.PUSH,
    Signal.PUSH_MEAN: Signal.PUSH,
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
    if type(recipe.strategy) is not type(DEFAULT.strategy):
        found.append(f"it grows its groups in its own way ({recipe.strategy!r})")
    for piece in {p for root in roots(recipe) for p in root.parts}:
        if isinstance(piece, EarlyTools):
            found.append("it credits by tool calls and the environment's verdict, which are not recorded there")
        peers = getattr(piece, "peers", None)
        if isinstance(peers, Same) and "state" in peers.what:
            found.append(f"it compares turns taken in the same state ({peers!r}), and states are not recorded there")
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
