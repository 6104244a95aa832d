"""Distillation on the policy's own tokens: what a teacher makes of them, whom to trust it with, and one-token rollouts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from turnwise.algebra.penalty import Penalty
from turnwise.algebra.piece import Now, check
from turnwise.algebra.ratio import behaviour
from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.levels import GROUP, TRAJECTORY, Field, where
from turnwise.core.signals import Signal
from turnwise.credit.selectors import Rows


@dataclass(frozen=True)
class TeacherGap(Term):
    """λ(log T − log π_ref) − (log π_old − log π_ref) of each token; λ = 1 is log T − log π_old and needs no reference.

    π_old sampled the data, or with ``proximal`` is the policy at the start of this batch. λ > 1 goes beyond the teacher."""

    lam: float = 1.0
    proximal: bool = False

    @property
    def reads(self) -> frozenset[Signal]:
        anchors = {Signal.REFERENCE: self.lam != 1, Signal.PROXIMAL: self.proximal}
        return frozenset({Signal.TEACHER, *(s for s, used in anchors.items() if used)})

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"teacher"})

    def __call__(self, batch: Batch) -> Field:
        teacher = batch[Signal.TEACHER]
        old = batch[Signal.PROXIMAL] if self.proximal else behaviour(batch)
        if self.lam == 1:
            return teacher - old
        reference = batch[Signal.REFERENCE]
        return self.lam * (teacher - reference) - (old - reference)


@dataclass(frozen=True)
class ByPerplexity(Term):
    """w · term, w = PPL^{±1/τ} / Σ over the ``rows`` of a group, 0 on other rows; PPL = exp(−mean log-probability).

    ``rare``: what is surprising weighs more (+), else what is plausible does (−). ``of`` whom: PROXIMAL is the policy at
    the start of this batch, TEACHER the teacher."""

    term: Term
    rows: Rows
    of: Signal = Signal.PROXIMAL
    rare: bool = True
    tau: float = 1.0

    def __post_init__(self) -> None:
        check(self.tau > 0, f"tau is {self.tau}; write a positive number")

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({self.of})

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"teacher"} if self.of is Signal.TEACHER else set())

    def __call__(self, batch: Batch) -> Field:
        mean, mine = batch[self.of].mean(TRAJECTORY), self.rows.of(batch)
        score = (-mean if self.rare else mean) / self.tau
        top = where(mine, score, -torch.inf).max(GROUP)
        size = where(mine, (score - top).exp(), 0.0)
        total = size.sum(GROUP)
        return size / where(total > 0, total, 1.0) * self.term(batch)


@dataclass(frozen=True)
class OneTokenRollouts(Penalty):
    """−(hits·log π(y) + negative·Σ log π(a))/K: of K candidates drawn at each token those that are the token itself earn 1,
    the others (their Σ is the signal RIVALS) ``negative``."""

    candidates: int = 256
    negative: float = -0.1

    def __post_init__(self) -> None:
        check(self.candidates >= 1, f"candidates is {self.candidates}; write at least 1")
        check(self.negative <= 0, f"negative is {self.negative}; write 0 or less: it is what a wrong token earns")

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.HITS, Signal.RIVALS})

    def __call__(self, now: Now) -> Field:
        hits = now[Signal.HITS].to(now.logp.x.dtype)
        return -(hits * now.logp + self.negative * now[Signal.RIVALS]) / self.candidates


__all__ = ["ByPerplexity", "OneTokenRollouts", "TeacherGap"]
