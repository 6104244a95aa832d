"""Control: in which optimiser steps a batch is used. A generator of parts; between two parts the policy has moved."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from turnwise.algebra.piece import Piece, check, text
from turnwise.algebra.ratio import LOG_RATIO_LIMIT, behaviour
from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, GROUP, TRAJECTORY, TURN, Field, where
from turnwise.core.signals import Signal

Measure = Callable[[Batch, frozenset[Signal]], dict[Signal, Field]]


class Control(Piece):
    """Interface."""

    @property
    def updates(self) -> int:
        """Optimiser steps on each batch, at most: learning-rate schedules count with it."""
        raise NotImplementedError

    def repeated(self, epochs: int, minibatches: int) -> Control:
        """The same with other passes, where the run asks for them (0: as it is)."""
        check(
            not epochs and not minibatches, f"{text(self)} has steps of its own; leave --epochs and --minibatches out"
        )
        return self

    def parts_of(self, batch: Batch, seed: int, measure: Measure) -> Iterator[Batch]:
        """The credited batch, part by part; each part that is yielded becomes one optimiser step."""
        raise NotImplementedError


@dataclass(frozen=True)
class Passes(Control):
    """``epochs`` times over, in ``minibatches`` optimiser steps each: whole groups, in a seeded order."""

    epochs: int = 1
    minibatches: int = 1

    def __post_init__(self) -> None:
        check(
            self.epochs >= 1 and self.minibatches >= 1,
            f"passes of {self.epochs} epochs, {self.minibatches} mini-batches; both must be at least 1",
        )

    @property
    def updates(self) -> int:
        return self.epochs * self.minibatches

    def repeated(self, epochs: int, minibatches: int) -> Control:
        return Passes(epochs or self.epochs, minibatches or self.minibatches)

    def parts_of(self, batch: Batch, seed: int, measure: Measure) -> Iterator[Batch]:
        group_of = batch.tree.parents[2]
        for epoch in range(self.epochs):
            if self.minibatches == 1:
                yield batch
                continue
            order = list(range(batch.tree.count(GROUP)))
            random.Random(f"{seed}/{epoch}").shuffle(order)
            for part in range(min(self.minibatches, len(order))):
                chosen = torch.tensor(sorted(order[part :: self.minibatches]), device=group_of.device)
                yield batch.select(torch.isin(group_of, chosen).nonzero().squeeze(1))


@dataclass(frozen=True)
class CriticsFirst(Control):
    """``passes`` steps over the batch in which only what the penalties cost is learned, then ``epochs`` in which the policy
    learns too; of the first ``warm`` batches only the critics learn.

    A critic that learns from its own later estimates knows of a reward at the end first and of what leads there last: before
    that it prefers whatever ends soon. The policy stays as it is only where no penalty reaches it: critics with a trunk of
    their own, or heads that send nothing back."""

    passes: int = 10
    warm: int = 0
    epochs: int = 1

    def __post_init__(self) -> None:
        check(
            self.passes >= 0 and self.warm >= 0 and self.epochs >= 1 and (self.passes >= 1 or not self.warm),
            f"{self.passes} passes of the critics, {self.warm} batches for them alone, {self.epochs} epochs of both; write at "
            "least 0, 0 and 1, and 1 pass or more where batches are theirs alone",
        )

    @property
    def updates(self) -> int:
        return self.passes + self.epochs

    def repeated(self, epochs: int, minibatches: int) -> Control:
        check(not minibatches, f"{text(self)} takes whole batches; leave --minibatches out")
        return CriticsFirst(self.passes, self.warm, epochs or self.epochs)

    def parts_of(self, batch: Batch, seed: int, measure: Measure) -> Iterator[Batch]:
        still = batch.put(still=batch.tree.full(BATCH, 1.0))
        yield from [still] * self.passes
        yield from [batch] * (self.epochs if float(batch["clock"].item) >= self.warm else 0)


@dataclass(frozen=True)
class LastTurnFirst(Control):
    """One step for each turn index, from the last to the first; the credit of earlier turns is multiplied by how the
    later ones have moved: Mₖ₋₁ = Mₖ · π_new(turn k)/μ(turn k), by the geometric mean over the turn's tokens.

    Turns act as agents that update one after another, so each sees what those after it will do. Turns from index
    ``turns`` − 1 on are updated together."""

    turns: int = 10

    def __post_init__(self) -> None:
        check(self.turns >= 1, f"turns is {self.turns}; write at least 1")

    @property
    def updates(self) -> int:
        return self.turns

    def parts_of(self, batch: Batch, seed: int, measure: Measure) -> Iterator[Batch]:
        index = batch.tree.index(TURN, TRAJECTORY).clamp(high=self.turns - 1)
        credit = batch["advantage"].mean(TRAJECTORY) if batch["advantage"].level < TRAJECTORY else batch["advantage"]
        for k in range(int(index.x.max()) if index.x.numel() else -1, -1, -1):
            here = index.map(lambda x: x == k)  # noqa: B023
            yield batch.put(advantage=credit, focus=here)
            if k:
                logp = measure(batch, frozenset({Signal.LOGP}))[Signal.LOGP]
                step = (logp - behaviour(batch)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).mean(TURN)
                credit = credit * where(here, step, 0.0).sum(TRAJECTORY).exp()


__all__ = ["Control", "CriticsFirst", "LastTurnFirst", "Measure", "Passes"]
