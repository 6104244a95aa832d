"""The rows another trainer generated, as one batch of ours, and where each row stands in it when it comes back in slices."""

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
class Held:
    """Some of the generated rows, packed. ``place`` says where each of them stands (−1: not here)."""

    batch: Batch
    place: Tensor  # [all rows]
    mask: Tensor  # [all rows, L] the sampled tokens
    sampled: bool  # whether log-probabilities under the sampling policy are known; else it is the present one

    @property
    def tokens(self) -> int:
        return self.batch.tree.count(TOKEN)

    def select(self, rows: Tensor) -> Held:
        """Only these rows, in this order; what is not here stays out."""
        here = rows[self.place[rows] >= 0]
        place = torch.full_like(self.place, -1)
        place[here] = torch.arange(here.numel(), device=place.device)
        return replace(self, batch=self.batch.select(self.place[here]), place=place)

    def field(self, value: Tensor, rows: Tensor) -> Field:
        """Values (rows, L) as a field, for the batch of exactly these rows."""
        here = self.place[rows] >= 0
        return Field(self.batch.tree, TOKEN, value[here][self.mask[rows[here]][:, : value.shape[1]]])

    def dense(self, value: Field) -> Tensor:
        """A field as (all rows, L), 0 where there is none."""
        rows = torch.empty_like(self.place[self.place >= 0])
        rows[self.place[self.place >= 0]] = (self.place >= 0).nonzero().squeeze(1)
        part = torch.zeros((rows.numel(), self.mask.shape[1]), dtype=value.x.dtype, device=self.mask.device)
        part[self.mask[rows]] = value.at(TOKEN).x
        out = torch.zeros(self.mask.shape, dtype=value.x.dtype, device=self.mask.device)
        out[rows] = part
        return out


@dataclass
class Step:
    """An optimiser step under way: its plan, how many slices are to come, and what was counted so far."""

    objective: Objective
    held: Held
    left: int
    sums: dict[str, Tensor] = field(default_factory=dict)

    def loss(self, rows: Tensor, live: dict[Signal, Tensor]) -> Tensor:
        """The share of these rows in the loss of the whole step."""
        self.left -= 1
        mine = self.held.select(rows)
        if not mine.tokens:
            return live[Signal.LOGP].sum() * 0.0  # backward passes must still meet on every process
        policy = {name: mine.field(value, rows) for name, value in live.items()}
        batch = mine.batch if mine.sampled else replace(mine.batch, behaviour=policy[Signal.LOGP].detach())
        found = self.objective(batch, policy)
        for name, value in found.stats.items():
            self.sums[name] = (
                self.sums.get(name, torch.zeros((), dtype=torch.float64, device=rows.device)) + value.double()
            )
        return found.loss


def begin(objective: Objective, held: Held, slices: int, foreseen: dict[Signal, Field]) -> Step:
    """Plan an optimiser step. ``foreseen``: signals of the present policy over all of it, where the method plans with them."""
    if held.tokens:
        batch = held.batch.put(foreseen)
        if Signal.LOGP in foreseen and not held.sampled:
            batch = replace(batch, behaviour=foreseen[Signal.LOGP])
        held = replace(held, batch=objective.plan(batch))
    return Step(objective, held, slices)


# ------------------------------------------------------------------ admission


@dataclass(frozen=True)
class Answer:
    """What an admission rule looks at."""

    id: str
    reward: float


@dataclass(frozen=True)
class Answers:
    trajectories: tuple[Answer, ...]


def admitted(recipe: Recipe, reward: Tensor, scored: Tensor, size: int, first: int) -> Tensor:
    """The rows a method trains on: those with a reward that its admission lets in, group by group of ``size``."""
    rewards, has = reward.tolist(), scored.tolist()
    kept: list[int] = []
    for begins in range(0, len(rewards), size):
        rows = [k for k in range(begins, min(begins + size, len(rewards))) if has[k]]
        answers = Answers(tuple(Answer(str(first + k), rewards[k]) for k in rows))
        found = recipe.admission(cast(Any, answers)) if rows else "nothing to train on"
        if not isinstance(found, str):
            kept += [int(answer.id) - first for answer in found.trajectories]
    return torch.tensor(kept, dtype=torch.int64, device=reward.device)


__all__ = ["Held", "Step", "admitted", "begin"]
