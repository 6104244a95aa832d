"""The rows another trainer generated, packed into one batch, and the position of each row when it comes back in slices.

Knows no trainer and no method.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from turnwise.algebra.objective import Objective
from turnwise.core.batch import Batch
from turnwise.core.levels import TOKEN, Field
from turnwise.core.signals import Signal
from turnwise.recipes.recipe import Recipe


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Some of the generated rows, packed. ``position``: the trajectory of each row in ``batch`` (−1: not contained)."""

    batch: Batch
    position: Tensor  # [all rows]
    mask: Tensor  # [all rows, L] True at sampled tokens
    has_behaviour: (
        bool  # whether behaviour log-probabilities are known; else the current policy is the behaviour policy
    )

    @property
    def tokens(self) -> int:
        return self.batch.tree.count(TOKEN)

    def select(self, rows: Tensor) -> PackedRows:
        """Only these rows, in this order, as far as they are contained."""
        contained = rows[self.position[rows] >= 0]
        position = torch.full_like(self.position, -1)
        position[contained] = torch.arange(contained.numel(), device=position.device)
        return replace(self, batch=self.batch.select(self.position[contained]), position=position)

    def field(self, value: Tensor, rows: Tensor) -> Field:
        """Values (rows, L) as a field, for the batch of exactly these rows."""
        contained = self.position[rows] >= 0
        return Field(self.batch.tree, TOKEN, value[contained][self.mask[rows[contained]][:, : value.shape[1]]])

    def dense(self, value: Field) -> Tensor:
        """A field as a tensor (all rows, L), 0 where it has no value."""
        rows = torch.empty_like(self.position[self.position >= 0])
        rows[self.position[self.position >= 0]] = (self.position >= 0).nonzero().squeeze(1)
        part = torch.zeros((rows.numel(), self.mask.shape[1]), dtype=value.x.dtype, device=self.mask.device)
        part[self.mask[rows]] = value.at(TOKEN).x
        out = torch.zeros(self.mask.shape, dtype=value.x.dtype, device=self.mask.device)
        out[rows] = part
        return out


@dataclass
class AccumulatedStep:
    """An optimiser step being accumulated: its plan, the number of remaining slices, and the statistics so far."""

    objective: Objective
    rows: PackedRows
    remaining: int
    sums: dict[str, Tensor] = field(default_factory=dict)

    def loss(self, rows: Tensor, live: dict[Signal, Tensor]) -> Tensor:
        """The summand of these rows in the loss of the whole step."""
        self.remaining -= 1
        part = self.rows.select(rows)
        if not part.tokens:
            return live[Signal.LOGP].sum() * 0.0  # every process must still run its backward pass
        policy = {name: part.field(value, rows) for name, value in live.items()}
        batch = part.batch if part.has_behaviour else replace(part.batch, behaviour=policy[Signal.LOGP].detach())
        output = self.objective(batch, policy)
        for name, value in output.stats.items():
            self.sums[name] = (
                self.sums.get(name, torch.zeros((), dtype=torch.float64, device=rows.device)) + value.double()
            )
        return output.loss


def plan_step(objective: Objective, rows: PackedRows, slices: int, before_step: dict[Signal, Field]) -> AccumulatedStep:
    """Plan an optimiser step. ``before_step``: signals of the current policy over all of it, where the method plans with them."""
    if rows.tokens:
        batch = rows.batch.put(before_step)
        if Signal.LOGP in before_step and not rows.has_behaviour:
            batch = replace(batch, behaviour=before_step[Signal.LOGP])
        rows = replace(rows, batch=objective.plan(batch))
    return AccumulatedStep(objective, rows, slices)


# ------------------------------------------------------------------ admission


@dataclass(frozen=True)
class ScoredRow:
    """What an admission rule reads of a trajectory."""

    id: str
    reward: float


@dataclass(frozen=True)
class ScoredGroup:
    """What an admission rule reads of a group."""

    trajectories: tuple[ScoredRow, ...]


def admitted_rows(recipe: Recipe, reward: Tensor, scored: Tensor, size: int, first: int) -> Tensor:
    """The rows a method trains on: those with a reward that its admission rule accepts, by groups of ``size`` rows."""
    rewards, has_reward = reward.tolist(), scored.tolist()
    indices: list[int] = []
    for start in range(0, len(rewards), size):
        rows = [k for k in range(start, min(start + size, len(rewards))) if has_reward[k]]
        group = ScoredGroup(tuple(ScoredRow(str(first + k), rewards[k]) for k in rows))
        verdict = recipe.admission(cast(Any, group)) if rows else "nothing to train on"
        if not isinstance(verdict, str):
            indices += [int(row.id) - first for row in verdict.trajectories]
    return torch.tensor(indices, dtype=torch.int64, device=reward.device)


__all__ = ["AccumulatedStep", "PackedRows", "admitted_rows", "plan_step"]
