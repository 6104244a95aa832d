"""Facts as terms: numbers that an environment, a strategy, a buffer or a data file records with a turn or a
trajectory."""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.levels import TRAJECTORY, Field, Level
from turnwise.errors import SignalError
from turnwise.maths.lazy_torch import torch


@dataclass(frozen=True)
class Fact(Term):
    """A recorded number (or the code of a recorded label) by name: ``Fact("planner", TURN, missing=1.0)``.

    ``missing`` fills in where it was not recorded; without ``missing`` the fact is required."""

    name: str
    level: Level = TRAJECTORY
    missing: float | None = None

    @property
    def requires(self) -> frozenset[str]:
        kind = "fact" if self.level == TRAJECTORY else "turn fact"
        return frozenset({f"{kind} {self.name}"}) if self.missing is None else frozenset()

    def __call__(self, batch: Batch) -> Field:
        recorded = batch.facts.get(self.name)
        if recorded is None and self.missing is not None:
            return batch.tree.full(self.level, self.missing, torch.float64)
        if recorded is None:
            raise SignalError(
                f"no trajectory of this batch carries the fact {self.name!r}; it has: {sorted(batch.facts)}"
            )
        value = recorded if recorded.level == self.level else recorded.max(self.level)
        return value if self.missing is None else value.map(lambda x: torch.nan_to_num(x, nan=self.missing))


__all__ = ["Fact"]
