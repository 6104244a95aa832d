"""A recipe: one published method as a frozen record of pieces, one per slot; and the kinds of methods. Knows no
trainer and no engine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import StrEnum

from turnwise.algebra.aggregate import Aggregate, Mean
from turnwise.algebra.control import Control, Passes
from turnwise.algebra.gate import Gate, NoGate
from turnwise.algebra.gradient import Gradient, LayerNoise, PlainGradient
from turnwise.algebra.mask import AllTokens, Mask
from turnwise.algebra.objective import Objective
from turnwise.algebra.penalty import WeightedPenalty
from turnwise.algebra.piece import text
from turnwise.algebra.ratio import Importance, Ratio
from turnwise.algebra.reward import EnvironmentReward
from turnwise.algebra.term import Term
from turnwise.core.levels import TRAJECTORY
from turnwise.core.signals import TOKEN_CRITIC, Signal
from turnwise.data.replay import NoReplay, Replay
from turnwise.errors import RecipeError
from turnwise.recipes.signatures import Build
from turnwise.rollout.guidance import Guidance, NoGuidance
from turnwise.rollout.strategies import Independent, Precision, Strategy
from turnwise.tasks.admission import Admission, AdmitAll
from turnwise.tasks.budgets import Budget, Fixed
from turnwise.tasks.samplers import Sampler, Uniform


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The slots of a method. An omitted slot keeps its default, and ``diff`` shows only the slots that differ."""

    advantage: Term  # credit of each token, turn or trajectory
    ratio: Ratio = field(default_factory=Importance)  # importance ratio, at which level
    gate: Gate = field(default_factory=NoGate)  # clipping or another limit on the update
    penalties: tuple[WeightedPenalty, ...] = ()  # further losses
    aggregate: Aggregate = field(default_factory=lambda: Mean(TRAJECTORY))  # the average over tokens, trajectories ...
    reward: Term = field(default_factory=EnvironmentReward)  # reward
    sampler: Sampler = field(default_factory=Uniform)  # which task comes next
    budget: Budget = field(default_factory=Fixed)  # tasks per step, rollouts and turns of each
    strategy: Strategy = field(default_factory=Independent)  # how the rollouts of a group are sampled
    guidance: Guidance = field(default_factory=NoGuidance)  # hints and prefixes of solutions
    admission: Admission = field(default_factory=AdmitAll)  # which groups are trained on
    replay: Replay = field(default_factory=NoReplay)  # replayed data
    keep: Mask = field(default_factory=AllTokens)  # which tokens are trained on
    control: Control = field(default_factory=Passes)  # optimiser steps per batch
    gradient: Gradient = field(default_factory=PlainGradient)  # scaling of the gradient
    smoothing: LayerNoise | None = None  # noise on hidden layers while learning
    precision: Precision = field(default_factory=Precision)  # numeric precision
    requires: frozenset[str] = field(default=frozenset(), repr=False)  # beside what its pieces require; no slot

    def __post_init__(self) -> None:
        if self.advantage.needs_peers and self.budget.size < 2:
            raise RecipeError(
                f"{text(self.advantage)} compares the trajectories of a group, but groups have {self.budget.size}; "
                "write --group-size 2 or more, or take a method with a critic (ppo) or without a baseline (reinforce)"
            )

    @property
    def objective(self) -> Objective:
        """The composition to optimise. A penalty of weight 0 is left out together with the signals it reads."""
        active = tuple(weighted for weighted in self.penalties if weighted.weight)
        return Objective(
            self.advantage, self.ratio, self.gate, self.aggregate, active, self.reward, self.keep, self.gradient
        )

    @property
    def requirements(self) -> frozenset[str]:
        """What environment or data must provide, in words (see ``Piece.requires``)."""
        roots = (self.advantage, self.reward, self.ratio, self.gate, self.keep, *self.penalties)
        parts = (self.strategy, self.guidance, self.budget)
        of_rollouts = self.requires.union(*(getattr(part, "requirements", ()) for part in parts))
        return of_rollouts.union(self.replay.requires, *(root.requirements for root in roots))

    @property
    def idle_without(self) -> frozenset[str]:
        """What a part of the method does nothing without (see ``Piece.idle_without``)."""
        parts = (self.strategy, self.replay, self.sampler, *self.objective.pieces)
        return frozenset[str]().union(*(getattr(part, "idle_without", ()) for part in parts))

    @property
    def reads_rewards(self) -> bool:
        """Whether rewards are read while a group grows, so that each trajectory must be scored alone."""
        return self.guidance.reads_rewards or getattr(self.strategy, "reads_rewards", False)

    @property
    def corrects_off_policy(self) -> bool:
        """Whether the loss depends on the distance between the learner and the sampler of the data."""
        others = (self.gate, self.keep, *self.penalties)
        return self.ratio.corrects_off_policy or any(Signal.PROXIMAL in root.signals for root in others)

    @property
    def critics(self) -> int:
        """The number of token-level value heads the pieces read; −1: one for each token of the vocabulary."""
        signals = self.objective.signals
        if signals & {Signal.ACTION_VALUE, Signal.OLD_ACTION_VALUE}:
            return -1
        return 2 if signals & {Signal.SECOND_VALUE, Signal.OLD_SECOND_VALUE} else int(bool(signals & TOKEN_CRITIC))

    def slots(self) -> dict[str, str]:
        """Each slot and its piece as text."""
        return {f.name: text(getattr(self, f.name)) for f in fields(self) if f.repr}


class Kind(StrEnum):
    """The four kinds by which ``turnwise list`` groups methods: which part of the algebra a paper changes. A family declares one,
    a method may declare another."""

    OBJECTIVE = "objective"
    CREDIT = "credit"
    DATA = "data"
    PREFERENCE = "preference"


def declares(kind: Kind) -> Callable[[Build], Build]:
    """Decorator: the method is of another kind than its family's ``KIND``."""

    def mark(build: Build) -> Build:
        build.kind = kind  # type: ignore[attr-defined]
        return build

    return mark


def kind_of(build: Callable[..., object]) -> Kind:
    """The kind of a recipe function: its own, else its family's; a user's recipe that declares none is an objective."""
    family: Kind = getattr(sys.modules[build.__module__], "KIND", Kind.OBJECTIVE)
    return getattr(build, "kind", family)
