"""What is recorded with a turn or a trajectory, by name: facts of an environment, a strategy, a buffer or a data file as terms
and as peers, and single rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnwise.algebra.peers import Peers
from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.levels import TRAJECTORY, TURN, Field, Level, Partition, where
from turnwise.errors import SignalError
from turnwise.maths.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


class Fact(Term):
    """A recorded number (or the code of a recorded label) by name: ``Fact("planner", TURN, missing=1.0)``."""

    name: str
    level: Level = TRAJECTORY
    # fills in where it was not recorded; without ``missing`` the fact is required
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


class SameFact(Peers):
    """Trajectories of one group with the same value of a fact: of the trajectory, or the last one recorded by its turns.
    Trajectories without the fact share one class; where no trajectory of the batch has it, equal actions decide."""

    name: str

    def __call__(self, batch: Batch) -> Partition:
        recorded = batch.facts.get(self.name)
        if recorded is not None:
            key = _codes((recorded if recorded.level == TRAJECTORY else last_turn_fact(recorded)).x)
        else:
            key = action_hash(batch).x
        return Partition.by(batch.tree, TRAJECTORY, batch.group, key)


class SameAnswer(Peers):
    """Trajectories of one group that gave the same answer: the fact ``said``, which the run records from the last message of each
    finished episode, in any environment. Those without an answer share one class."""

    requires = frozenset({"fact said"})

    def __call__(self, batch: Batch) -> Partition:
        return SameFact("said")(batch)


def last_turn_fact(fact: Field) -> Field:
    """The value of the last turn of each trajectory that records a fact; NaN where no turn does."""
    index = fact.tree.index(TURN, TRAJECTORY)
    recorded = ~fact.map(torch.isnan)
    last = where(recorded, index, -1).max(TRAJECTORY)
    is_last = recorded & (index >= last)
    return where(last >= 0, where(is_last, fact, 0.0).sum(TRAJECTORY), torch.nan)


def action_hash(batch: Batch) -> Field:
    """A hash of all actions of a trajectory in order: Σ (actionₖ + 1) Mᵏ modulo 2⁶⁴."""
    index = batch.tree.index(TURN, TRAJECTORY).x
    turns = int(index.max()) + 1 if index.numel() else 0
    power = torch.full((turns,), 6364136223846793005, dtype=torch.int64, device=index.device).cumprod(0)
    return Field(batch.tree, TURN, (batch.action.x + 1) * power[index]).sum(TRAJECTORY)


def _codes(x: Tensor) -> Tensor:
    """Equal numbers get equal codes; all NaN share one code."""
    return torch.unique(torch.nan_to_num(x, nan=torch.inf), return_inverse=True)[1]


def named_reward(batch: Batch, name: str | None) -> Field:
    """One reward of each trajectory by name, in float64; None is the return, the sum of all its rewards.

    A trajectory without this reward has 0, and that 0 counts like any other. Only this function decides that."""
    if name is None:
        return batch.reward.sum(TRAJECTORY).to(torch.float64)
    if name not in batch.reward_components:
        raise SignalError(
            f"no trajectory carries a reward named {name!r}; this batch has: {sorted(batch.reward_components)}"
        )
    return batch.reward_components[name].to(torch.float64).map(lambda x: torch.nan_to_num(x, nan=0.0))


def rescale_to_unit(value: Field, bottom: float, top: float) -> Field:
    """A value from [bottom, top] as a number in [0, 1]; values outside are clipped."""
    return ((value - bottom) / (top - bottom)).clamp(0.0, 1.0)
