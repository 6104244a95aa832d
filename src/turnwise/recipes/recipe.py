"""A recipe: one published method as a frozen record of pieces, slot by slot."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from turnwise.algebra.aggregate import Aggregate, Mean
from turnwise.algebra.control import Control, Passes
from turnwise.algebra.gate import Gate, Open
from turnwise.algebra.gradient import Gradient, Plain
from turnwise.algebra.layer_noise import LayerNoise
from turnwise.algebra.mask import All, Mask
from turnwise.algebra.objective import Objective
from turnwise.algebra.penalty import Weighted
from turnwise.algebra.piece import text
from turnwise.algebra.ratio import Importance, Ratio
from turnwise.algebra.reward import Environment
from turnwise.algebra.term import Term
from turnwise.core.levels import TRAJECTORY
from turnwise.core.signals import CRITIC, Signal
from turnwise.data.replay import Nothing, Replay
from turnwise.errors import RecipeError
from turnwise.rollout.precision import Precision
from turnwise.rollout.strategies import Independent, Strategy
from turnwise.tasks.admission import Admission, Everything
from turnwise.tasks.budgets import Fixed
from turnwise.tasks.samplers import Sampler, Uniform


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
    precision: Precision = field(default_factory=Precision)  # in which numbers?

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
        grown = getattr(self.strategy, "asks", frozenset[str]())
        return grown.union(self.replay.wants, *(root.asks for root in roots))

    @property
    def corrects(self) -> bool:
        """Whether its loss looks at how far the learner is from what sampled the data."""
        weighing = (self.gate, self.keep, *self.penalties)
        return self.ratio.corrects or any(Signal.PROXIMAL in root.needs for root in weighing)

    @property
    def critics(self) -> int:
        """How many value heads the pieces ask for."""
        needs = self.objective.needs
        return 2 if needs & {Signal.TWIN, Signal.OLD_TWIN} else int(bool(needs & CRITIC))

    def slots(self) -> dict[str, str]:
        """Each slot and its piece, as a person would write it."""
        return {f.name: text(getattr(self, f.name)) for f in fields(self)}
