"""Facts: what the environment says of a turn, or a strategy, a buffer or a reader of a trajectory, as a term."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.levels import TRAJECTORY, Field, Level
from turnwise.errors import SignalError


@dataclass(frozen=True)
class Fact(Term):
    """A number (or the number of a label) by name: ``Fact("planner", TURN, missing=1.0)``.

    Where nobody said it, it is ``missing``; without that, somebody has to say it."""

    name: str
    level: Level = TRAJECTORY
    missing: float | None = None

    @property
    def wants(self) -> frozenset[str]:
        kind = "fact" if self.level == TRAJECTORY else "turn fact"
        return frozenset({f"{kind} {self.name}"}) if self.missing is None else frozenset()

    def __call__(self, batch: Batch) -> Field:
        found = batch.facts.get(self.name)
        if found is None and self.missing is not None:
            return batch.tree.full(self.level, self.missing, torch.float64)
        if found is None:
            raise SignalError(f"nobody told the fact {self.name!r} of this batch; told were: {sorted(batch.facts)}")
        value = found if found.level == self.level else found.max(self.level)
        return value if self.missing is None else value.map(lambda x: torch.nan_to_num(x, nan=self.missing))


__all__ = ["Fact"]
