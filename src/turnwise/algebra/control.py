"""Control: the optimiser steps that one batch is used for. A control yields one batch per step; between two of them the policy is
updated. It does not know the loss.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from turnwise.algebra.piece import Piece, check, text
from turnwise.core.batch import Batch
from turnwise.core.columns import Column
from turnwise.core.levels import BATCH, GROUP, Field
from turnwise.core.limits import number
from turnwise.core.signals import Signal
from turnwise.maths.lazy_torch import torch

Measure = Callable[[Batch, frozenset[Signal]], dict[Signal, Field]]


class Control(Piece):
    """Interface."""

    @property
    def updates(self) -> int:
        """Largest number of optimiser steps per batch; learning-rate schedules use it."""
        raise NotImplementedError

    def with_passes(self, epochs: int, minibatches: int) -> Control:
        """The same with the epochs and mini-batches of the run's settings (0: unchanged)."""
        check(not epochs and not minibatches, f"{text(self)} has its own steps; leave --epochs, --minibatches out")
        return self

    def optimizer_steps(self, batch: Batch, seed: int, measure: Measure) -> Iterator[Batch]:
        """Parts of the credited batch; each one that is yielded becomes one optimiser step."""
        raise NotImplementedError


class Passes(Control):
    """``epochs`` passes over the batch of ``minibatches`` optimiser steps each: whole groups, in a seeded order."""

    epochs: int = number(1, least=1)
    minibatches: int = number(1, least=1)

    @property
    def updates(self) -> int:
        return self.epochs * self.minibatches

    def with_passes(self, epochs: int, minibatches: int) -> Control:
        return Passes(epochs or self.epochs, minibatches or self.minibatches)

    def optimizer_steps(self, batch: Batch, seed: int, measure: Measure) -> Iterator[Batch]:
        group_of = batch.tree.parents[2]
        for epoch in range(self.epochs):
            if self.minibatches == 1:
                yield batch
                continue
            order = list(range(batch.tree.count(GROUP)))
            random.Random(f"{seed}/{epoch}").shuffle(order)
            for part in range(min(self.minibatches, len(order))):
                groups = torch.tensor(sorted(order[part :: self.minibatches]), device=group_of.device)
                yield batch.select(torch.isin(group_of, groups).nonzero().squeeze(1))


class CriticsFirst(Control):
    """``passes`` steps over the batch that minimise only the penalties, then ``epochs`` that update the policy too; on the
    first ``warm`` batches only the critics are trained.

    A bootstrapped critic learns the value of states near the end first and of early states last; until then it prefers actions
    that end the episode soon. No penalty moves the policy in the steps of the critics."""

    passes: int = number(10, least=0)
    warm: int = number(0, least=0)
    epochs: int = number(1, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        critics_learn = self.passes >= 1 or not self.warm
        check(
            critics_learn,
            f"{self.warm} batches are for the critics only, and they have no pass; write passes=1 or more",
        )

    @property
    def updates(self) -> int:
        return self.passes + self.epochs

    def with_passes(self, epochs: int, minibatches: int) -> Control:
        check(not minibatches, f"{text(self)} takes whole batches; leave --minibatches out")
        return CriticsFirst(self.passes, self.warm, epochs or self.epochs)

    def optimizer_steps(self, batch: Batch, seed: int, measure: Measure) -> Iterator[Batch]:
        critics_only = batch.put(freeze_policy=batch.tree.full(BATCH, 1.0))
        yield from [critics_only] * self.passes
        yield from [batch] * (self.epochs if float(batch[Column.BATCH_INDEX].item) >= self.warm else 0)
