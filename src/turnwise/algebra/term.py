"""Terms: rewards, values and advantages map a batch to a field; terms add up and scale."""

from __future__ import annotations

from turnwise.algebra.piece import Piece, text
from turnwise.core.batch import Batch
from turnwise.core.levels import Field


class Term(Piece):
    """Interface of everything that maps a batch to a field."""

    @property
    def compares_peers(self) -> bool:
        """Whether this term compares peers, so that a group of one gives it no information."""
        return False

    @property
    def needs_peers(self) -> bool:
        """Whether this term or one inside it compares peers."""
        return any(isinstance(p, Term) and p.compares_peers for p in self.parts)

    def __call__(self, batch: Batch) -> Field:
        raise NotImplementedError

    def __add__(self, other: Term) -> Term:
        return Plus(self, other)

    def __sub__(self, other: Term) -> Term:
        return Plus(self, Times(-1.0, other))

    def __rmul__(self, weight: float) -> Term:
        return Times(float(weight), self)


class Plus(Term):
    """left + right, at the finer of their levels."""

    left: Term
    right: Term

    def __call__(self, batch: Batch) -> Field:
        return self.left(batch) + self.right(batch)

    def as_text(self) -> str:
        if isinstance(self.right, Times) and self.right.weight == -1:
            return f"{text(self.left)} - {text(self.right.term)}"
        return f"{text(self.left)} + {text(self.right)}"


class Times(Term):
    """weight · term."""

    weight: float
    term: Term

    def __call__(self, batch: Batch) -> Field:
        return self.weight * self.term(batch)

    def as_text(self) -> str:
        return f"{self.weight:g} * {text(self.term)}"
