"""Penalties: what else is optimised. A penalty is a cost for each token, subtracted from the gain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from turnwise.algebra.aggregate import Aggregate
from turnwise.algebra.ratio import LOG_RATIO_LIMIT
from turnwise.algebra.term import Term, check
from turnwise.batch import Batch
from turnwise.levels import TOKEN, Field
from turnwise.maths.divergences import ESTIMATORS
from turnwise.signals import Signal


class Penalty(Protocol):
    @property
    def needs(self) -> frozenset[Signal]: ...

    def plan(self, batch: Batch) -> Field | None:
        """What must be known of the whole step before it is cut into micro-batches."""
        ...

    def __call__(self, batch: Batch, policy: Mapping[Signal, Field], planned: Field | None) -> Field: ...


@dataclass(frozen=True)
class Weighted:
    """weight · penalty, averaged like the gain or in its own way."""

    weight: float
    penalty: Penalty
    aggregate: Aggregate | None = None

    def __post_init__(self) -> None:
        check(self.weight >= 0, f"the weight of {self.penalty!r} is {self.weight}; write a number >= 0")


@dataclass(frozen=True)
class KL:
    """KL(π‖reference) by a single-sample estimator (see maths/divergences.py for bias and gradients)."""

    estimator: str = "k3"

    def __post_init__(self) -> None:
        check(self.estimator in ESTIMATORS, f"no KL estimator {self.estimator!r}; known: {', '.join(ESTIMATORS)}")

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset({Signal.REFERENCE})

    def plan(self, batch: Batch) -> None:
        return None

    def __call__(self, batch: Batch, policy: Mapping[Signal, Field], planned: Field | None) -> Field:
        x = (batch[Signal.REFERENCE] - policy[Signal.LOGP]).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return x.map(ESTIMATORS[self.estimator])


@dataclass(frozen=True)
class LowEntropy:
    """−H: the entropy bonus, as a cost."""

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset({Signal.ENTROPY})

    def plan(self, batch: Batch) -> None:
        return None

    def __call__(self, batch: Batch, policy: Mapping[Signal, Field], planned: Field | None) -> Field:
        return -policy[Signal.ENTROPY]


@dataclass(frozen=True)
class CriticError:
    """½ max( (v − G)², (clip(v, v_old ± clip) − G)² ): the critic's regression to its target G, with PPO's value clip."""

    target: Term
    clip: float = 0.5

    def __post_init__(self) -> None:
        check(self.clip > 0, f"the value clip is {self.clip}; write a positive number, or inf for off")

    @property
    def needs(self) -> frozenset[Signal]:
        return self.target.needs | {Signal.VALUE, Signal.OLD_VALUE}

    def plan(self, batch: Batch) -> Field:
        return self.target(batch).at(TOKEN)

    def __call__(self, batch: Batch, policy: Mapping[Signal, Field], planned: Field | None) -> Field:
        assert planned is not None
        v, old = policy[Signal.VALUE], batch[Signal.OLD_VALUE]
        near = old + (v - old).clamp(-self.clip, self.clip)
        return 0.5 * ((v - planned) ** 2).maximum((near - planned) ** 2)


@dataclass(frozen=True)
class NegativeLogLikelihood:
    """−log π: with no gain beside it, supervised learning on the batch."""

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset()

    def plan(self, batch: Batch) -> None:
        return None

    def __call__(self, batch: Batch, policy: Mapping[Signal, Field], planned: Field | None) -> Field:
        return -policy[Signal.LOGP]


__all__ = ["KL", "CriticError", "LowEntropy", "NegativeLogLikelihood", "Penalty", "Weighted"]
