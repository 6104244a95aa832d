"""Terms: batch in, field out. Rewards and advantages are terms, and terms add up and scale.

A term declares the signals it reads in ``needs`` and whether it compares peers in ``compares``.
"""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.batch import Batch
from turnwise.errors import RecipeError
from turnwise.levels import Field
from turnwise.signals import Signal


class Term:
    """Interface of everything that maps a batch to a field."""

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset()

    @property
    def compares(self) -> bool:
        """Whether it is meaningless for a group of one."""
        return False

    def __call__(self, batch: Batch) -> Field:
        raise NotImplementedError

    def __add__(self, other: Term) -> Term:
        return Plus(self, other)

    def __rmul__(self, weight: float) -> Term:
        return Times(float(weight), self)


@dataclass(frozen=True)
class Plus(Term):
    """left + right, at the finer of their levels."""

    left: Term
    right: Term

    @property
    def needs(self) -> frozenset[Signal]:
        return self.left.needs | self.right.needs

    @property
    def compares(self) -> bool:
        return self.left.compares or self.right.compares

    def __call__(self, batch: Batch) -> Field:
        return self.left(batch) + self.right(batch)

    def __repr__(self) -> str:
        return f"{self.left!r} + {self.right!r}"


@dataclass(frozen=True)
class Times(Term):
    """weight · term."""

    weight: float
    term: Term

    @property
    def needs(self) -> frozenset[Signal]:
        return self.term.needs

    @property
    def compares(self) -> bool:
        return self.term.compares

    def __call__(self, batch: Batch) -> Field:
        return self.weight * self.term(batch)

    def __repr__(self) -> str:
        return f"{self.weight:g} * {self.term!r}"


def check(ok: bool, message: str) -> None:
    """One line at the door of each piece."""
    if not ok:
        raise RecipeError(message)
