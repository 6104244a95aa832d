"""Compose two recipes: the credit of one with the objective of the other. Knows no method's name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from turnwise.algebra.mask import AllTokens
from turnwise.algebra.penalty import WeightedPenalty
from turnwise.algebra.piece import text
from turnwise.algebra.value import Constant
from turnwise.core.signals import TOKEN_CRITIC, TURN_CRITIC, TURN_CRITIC_TARGET, Signal
from turnwise.errors import RecipeError
from turnwise.recipes.recipe import Recipe

CRITIC_SIGNALS = TOKEN_CRITIC | frozenset(TURN_CRITIC) | frozenset(TURN_CRITIC_TARGET)
EXTERNAL_DATA = ("demonstrations", "replay", "pairs", "teacher")  # data that a method must handle itself


def compose(objective: Recipe, credit: Recipe) -> Recipe:
    """The credit of one method with the objective of another.

    From ``credit``: the advantage and what it depends on, that is reward, strategy, replay, sampler and group size
    where they are not the default, its ``keep`` in addition to the objective's, and the penalties that train a critic
    it reads. Everything else comes from ``objective``; the objective's own critic is dropped unless its ratio, gate or
    masks read one."""
    # refuse a credit that is part of its method's loss
    losses = [w for w in credit.penalties if w.weight and not w.signals & CRITIC_SIGNALS]
    if isinstance(credit.advantage, Constant):
        location = ", ".join(type(w.penalty).__name__ for w in losses) or text(credit.advantage)
        raise RecipeError(
            f"its credit is part of its loss ({location}) and cannot be separated; train with the method itself"
        )
    in_loss = sorted(
        _external_data(credit.ratio, credit.gate, *losses) - _external_data(credit.advantage, credit.reward)
    )
    if in_loss:
        raise RecipeError(
            f"what it learns from {' and '.join(in_loss)} is part of its loss and cannot be separated; "
            "train with the method itself"
        )
    _check_objective(objective, credit)
    default = Recipe(advantage=credit.advantage)
    from_credit = {
        slot: getattr(credit, slot) if getattr(credit, slot) != getattr(default, slot) else getattr(objective, slot)
        for slot in ("reward", "strategy", "guidance", "replay", "sampler")
    }
    size = credit.budget.size if credit.budget.size != default.budget.size else objective.budget.size
    masks = [mask for mask in (objective.keep, credit.keep) if mask != AllTokens()]
    return replace(
        objective,
        advantage=credit.advantage,
        penalties=_penalties(objective, credit),
        budget=objective.budget.of(objective.budget.groups, size),
        keep=masks[0] & masks[1] if len(masks) == 2 and masks[0] != masks[1] else (masks or [AllTokens()])[0],
        **from_credit,
    )


def _penalties(objective: Recipe, credit: Recipe) -> tuple[WeightedPenalty, ...]:
    without_critic = [w for w in objective.penalties if not w.signals & CRITIC_SIGNALS]
    critic = [w for w in credit.penalties if w.signals & CRITIC_SIGNALS]
    readers = (objective.ratio, objective.gate, objective.keep, objective.gradient, *without_critic)
    if not critic and any(root.signals & CRITIC_SIGNALS for root in readers):
        critic = [w for w in objective.penalties if w.signals & CRITIC_SIGNALS]
    return (*without_critic, *critic)


def _external_data(*roots: Any) -> set[str]:
    """Which kinds of external data these pieces require."""
    required = frozenset[str]().union(*(root.requirements for root in roots))
    teacher = any(Signal.TEACHER in root.signals for root in roots)
    return {name for name in EXTERNAL_DATA if name in required} | ({"teacher"} if teacher else set())


def _check_objective(objective: Recipe, credit: Recipe) -> None:
    """Refuse an objective that this credit cannot serve."""
    if isinstance(objective.advantage, Constant):
        raise RecipeError(
            "the method has no advantage for a credit to replace: its learning signal is part of its loss"
        )
    unsupported = sorted(
        _external_data(objective.advantage, objective.reward) - _external_data(credit.advantage, credit.reward)
    )
    if unsupported:
        raise RecipeError(f"the method's own advantage handles {' and '.join(unsupported)}, which this credit does not")
    for slot in ("strategy", "replay"):
        ours, theirs, default = (getattr(r, slot) for r in (objective, credit, Recipe(advantage=credit.advantage)))
        if ours != default and theirs != default and ours != theirs:
            raise RecipeError(f"both methods define a {slot}: {text(ours)} and {text(theirs)}")
