"""A recipe: one published method as a frozen record of pieces, slot by slot."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from turnwise.algebra.aggregate import Aggregate, Mean
from turnwise.algebra.gate import Gate, Open
from turnwise.algebra.objective import Objective
from turnwise.algebra.penalty import Weighted
from turnwise.algebra.ratio import Importance, Ratio
from turnwise.algebra.reward import Environment
from turnwise.algebra.term import Term
from turnwise.errors import RecipeError
from turnwise.levels import TRAJECTORY
from turnwise.rollout.strategy import Independent, Strategy
from turnwise.signals import Signal
from turnwise.tasks.admission import Admission, Everything
from turnwise.tasks.budget import Fixed
from turnwise.tasks.sampler import Sampler, Uniform


@dataclass(frozen=True)
class Passes:
    """How a batch is used: ``epochs`` times over, in ``minibatches`` optimiser steps each."""

    epochs: int = 1
    minibatches: int = 1

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.minibatches < 1:
            raise RecipeError(
                f"passes of {self.epochs} epochs, {self.minibatches} mini-batches; both must be at least 1"
            )


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
    control: Passes = field(default_factory=Passes)  # how does the optimiser step?

    def __post_init__(self) -> None:
        if self.advantage.compares and self.budget.size < 2:
            raise RecipeError(
                f"{self.advantage!r} compares the trajectories of a group, but groups have {self.budget.size}; "
                "write --group-size 2 or more, or take a method with a critic (ppo) or without a baseline (reinforce)"
            )

    @property
    def objective(self) -> Objective:
        """The composition to optimise. A penalty of weight 0 is left out, and with it the signals it would need."""
        active = tuple(weighted for weighted in self.penalties if weighted.weight)
        return Objective(self.advantage, self.ratio, self.gate, self.aggregate, active, self.reward)

    @property
    def critic(self) -> bool:
        """Whether some piece asks for values."""
        return bool(self.objective.needs & {Signal.VALUE, Signal.OLD_VALUE})

    def slots(self) -> dict[str, str]:
        """Each slot and its piece, as text."""
        return {f.name: repr(getattr(self, f.name)) for f in fields(self)}
