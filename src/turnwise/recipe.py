"""A recipe: one published method as a frozen record of pieces, slot by slot; and the credit of one with the rest of another."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from turnwise.algebra.aggregate import Aggregate, Mean
from turnwise.algebra.control import Control, Passes
from turnwise.algebra.gate import Gate, Open
from turnwise.algebra.gradient import Gradient, Plain
from turnwise.algebra.mask import All, Mask
from turnwise.algebra.objective import Objective
from turnwise.algebra.penalty import Weighted
from turnwise.algebra.piece import text
from turnwise.algebra.ratio import Importance, Ratio
from turnwise.algebra.reward import Environment
from turnwise.algebra.smoothing import LayerNoise
from turnwise.algebra.term import Term
from turnwise.algebra.value import Constant
from turnwise.errors import RecipeError
from turnwise.levels import TRAJECTORY
from turnwise.rollout.strategy import Independent, Strategy
from turnwise.signals import CRITIC, SLOW, UTTERANCE, Signal
from turnwise.tasks.admission import Admission, Everything
from turnwise.tasks.budget import Fixed
from turnwise.tasks.replay import Nothing, Replay
from turnwise.tasks.sampler import Sampler, Uniform


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The slots of a method. What a slot leaves out keeps its default, and ``diff`` shows only what differs."""

    advantage: Term  # who gets the credit?
    ratio: Ratio = field(default_factory=Importance)  # how far has the policy moved, at which level?
    gate: Gate = field(default_factory=Open)  # how does that limit the update?
    penalties: tuple[Weighted, ...] = ()  # what else is optimised?
    aggregate: Aggregate = field(default_factory=lambda: Mean(TRAJECTORY))  # what is averaged over what?
    reward: Term = field(default_factory=Environment)  # what is good?
    sampler: Sampler = field(default_factory=Uniform)  # which task next?
    budget: Fixed = field(default_factory=Fixed)  # how many rollouts?
    strategy: Strategy = field(default_factory=Independent)  # how is a group grown?
    admission: Admission = field(default_factory=Everything)  # which groups are trained on?
    replay: Replay = field(default_factory=Nothing)  # which past data is mixed in?
    keep: Mask = field(default_factory=All)  # which of their tokens?
    control: Control = field(default_factory=Passes)  # in which optimiser steps?
    gradient: Gradient = field(default_factory=Plain)  # how does a gradient become a step?
    smoothing: LayerNoise | None = None  # is the policy smoothed by noise while it learns?

    def __post_init__(self) -> None:
        if self.advantage.compares and self.budget.size < 2:
            raise RecipeError(
                f"{text(self.advantage)} compares the trajectories of a group, but groups have {self.budget.size}; "
                "write --group-size 2 or more, or take a method with a critic (ppo) or without a baseline (reinforce)"
            )

    @property
    def objective(self) -> Objective:
        """The composition to optimise. A penalty of weight 0 is left out, and with it the signals it would need."""
        active = tuple(weighted for weighted in self.penalties if weighted.weight)
        return Objective(
            self.advantage, self.ratio, self.gate, self.aggregate, active, self.reward, self.keep, self.gradient
        )

    @property
    def asks(self) -> frozenset[str]:
        """What environment or data must tell, in words (see ``Piece.wants``)."""
        roots = (self.advantage, self.reward, self.ratio, self.gate, self.keep, *self.penalties)
        return self.replay.wants.union(*(root.asks for root in roots))

    @property
    def critics(self) -> int:
        """How many value heads the pieces ask for."""
        needs = self.objective.needs
        return 2 if needs & {Signal.TWIN, Signal.OLD_TWIN} else int(bool(needs & CRITIC))

    def slots(self) -> dict[str, str]:
        """Each slot and its piece, as a person would write it."""
        return {f.name: text(getattr(self, f.name)) for f in fields(self)}


# ------------------------------------------------------------------ composition

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
