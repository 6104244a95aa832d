"""Any credit with any objective: the credit of one recipe in everything else of another. Knows no method's name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from turnwise.algebra.mask import All
from turnwise.algebra.penalty import Weighted
from turnwise.algebra.piece import text
from turnwise.algebra.value import Constant
from turnwise.core.signals import CRITIC, SLOW, UTTERANCE, Signal
from turnwise.errors import RecipeError
from turnwise.recipes.recipe import Recipe

VALUES = CRITIC | frozenset(UTTERANCE) | frozenset(SLOW)
BROUGHT = ("demonstrations", "replay", "pairs", "teacher")  # data that only some methods know what to do with


def composed(objective: Recipe, credit: Recipe) -> Recipe:
    """The credit of one method in the objective of another.

    From ``credit``: the advantage, and what it lives on: its reward, strategy, replay, sampler and group size where they
    are not the default, its ``keep`` beside the objective's, and the penalties that train a critic it reads. Everything
    else is the objective's; its own critic goes, unless its ratio, gate or masks read one.
    """
    _can_lend(credit)
    _can_take(objective, credit)
    plain = Recipe(advantage=credit.advantage)
    taken = {
        slot: getattr(credit, slot) if getattr(credit, slot) != getattr(plain, slot) else getattr(objective, slot)
        for slot in ("reward", "strategy", "replay", "sampler")
    }
    size = credit.budget.size if credit.budget.size != plain.budget.size else objective.budget.size
    masks = [mask for mask in (objective.keep, credit.keep) if mask != All()]
    return replace(
        objective,
        advantage=credit.advantage,
        penalties=_penalties(objective, credit),
        budget=replace(objective.budget, size=size),
        keep=masks[0] & masks[1] if len(masks) == 2 and masks[0] != masks[1] else (masks or [All()])[0],
        **taken,
    )


def _penalties(objective: Recipe, credit: Recipe) -> tuple[Weighted, ...]:
    own = [w for w in objective.penalties if not w.needs & VALUES]
    critic = [w for w in credit.penalties if w.needs & VALUES]
    rest = (objective.ratio, objective.gate, objective.keep, objective.gradient, *own)
    if not critic and any(root.needs & VALUES for root in rest):
        critic = [w for w in objective.penalties if w.needs & VALUES]
    return (*own, *critic)


def _brought(*roots: Any) -> set[str]:
    """Of whose data these pieces are told."""
    asked = frozenset[str]().union(*(root.asks for root in roots))
    teacher = any(Signal.TEACHER in root.needs for root in roots)
    return {word for word in BROUGHT if word in asked} | ({"teacher"} if teacher else set())


def _can_lend(credit: Recipe) -> None:
    rest = [w for w in credit.penalties if w.weight and not w.needs & VALUES]
    if isinstance(credit.advantage, Constant):
        where = ", ".join(type(w.penalty).__name__ for w in rest) or text(credit.advantage)
        raise RecipeError(f"its credit lives in its loss ({where}) and cannot be lent: take it as the method itself")
    lost = sorted(_brought(credit.ratio, credit.gate, *rest) - _brought(credit.advantage, credit.reward))
    if lost:
        raise RecipeError(
            f"what it learns from {' and '.join(lost)} lives in its loss and cannot be lent: take it as the method itself"
        )


def _can_take(objective: Recipe, credit: Recipe) -> None:
    if isinstance(objective.advantage, Constant):
        raise RecipeError("the method has no advantage for a credit to replace: what it learns lives in its loss")
    orphaned = sorted(_brought(objective.advantage, objective.reward) - _brought(credit.advantage, credit.reward))
    if orphaned:
        raise RecipeError(
            f"the method credits {' and '.join(orphaned)} in its own way, which this credit does not know"
        )
    for slot in ("strategy", "replay"):
        ours, theirs, default = (getattr(r, slot) for r in (objective, credit, Recipe(advantage=credit.advantage)))
        if ours != default and theirs != default and ours != theirs:
            raise RecipeError(f"both bring a {slot} of their own: {text(ours)} and {text(theirs)}")
