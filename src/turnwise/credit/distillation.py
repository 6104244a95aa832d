"""Distillation on the policy's own samples: a teacher's log-ratio as advantage, perplexity weights, and one-token
rollouts."""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.algebra.penalty import Penalty
from turnwise.algebra.piece import MicroBatchView
from turnwise.algebra.ratio import behaviour
from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.levels import GROUP, TRAJECTORY, Field, where
from turnwise.core.limits import number
from turnwise.core.signals import Signal
from turnwise.credit.selectors import Selector
from turnwise.maths.lazy_torch import torch


@dataclass(frozen=True)
class TeacherLogRatio(Term):
    """λ(log T − log π_ref) − (log π_old − log π_ref) per token; λ = 1 is log T − log π_old and needs no reference.

    π_old is the sampler or, with ``proximal``, the policy at the start of this batch. λ > 1 extrapolates beyond the
    teacher."""

    requires = frozenset({"teacher"})

    lam: float = 1.0
    proximal: bool = False

    @property
    def reads(self) -> frozenset[Signal]:
        anchors = {Signal.REFERENCE: self.lam != 1, Signal.PROXIMAL: self.proximal}
        return frozenset({Signal.TEACHER, *(s for s, used in anchors.items() if used)})

    def __call__(self, batch: Batch) -> Field:
        teacher = batch[Signal.TEACHER]
        old = batch[Signal.PROXIMAL] if self.proximal else behaviour(batch)
        if self.lam == 1:
            return teacher - old
        reference = batch[Signal.REFERENCE]
        return self.lam * (teacher - reference) - (old - reference)


@dataclass(frozen=True)
class PerplexityWeighted(Term):
    """w · term, w = PPL^{±1/τ} / Σ over the selected trajectories of a group, 0 elsewhere; PPL = exp(−mean
    log-probability).

    ``favour_high``: a higher perplexity weighs more (+), else a lower one (−). ``signal``: whose log-probability,
    PROXIMAL for the policy at the start of this batch, TEACHER for the teacher."""

    term: Term
    selector: Selector
    signal: Signal = Signal.PROXIMAL
    favour_high: bool = True
    tau: float = number(1.0, above=0)

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({self.signal})

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"teacher"} if self.signal is Signal.TEACHER else set())

    def __call__(self, batch: Batch) -> Field:
        mean, selected = batch[self.signal].mean(TRAJECTORY), self.selector.select(batch)
        score = (-mean if self.favour_high else mean) / self.tau
        top = where(selected, score, -torch.inf).max(GROUP)
        weight = where(selected, (score - top).exp(), 0.0)
        total = weight.sum(GROUP)
        return weight / where(total > 0, total, 1.0) * self.term(batch)


@dataclass(frozen=True)
class OneTokenRolloutLoss(Penalty):
    """−(matches · log π(y) + negative · Σ log π(a))/K: of K candidates drawn at each token those equal to the token
    earn 1, the others ``negative``; their Σ is the signal CANDIDATE_LOGP."""

    reads = frozenset({Signal.CANDIDATE_MATCHES, Signal.CANDIDATE_LOGP})

    candidates: int = number(256, least=1)
    negative: float = number(-0.1, most=0, why="it is what a wrong token earns")

    @property
    def draws_candidates(self) -> int:
        return self.candidates

    def __call__(self, view: MicroBatchView) -> Field:
        hits = view[Signal.CANDIDATE_MATCHES].to(view.logp.x.dtype)
        return -(hits * view.logp + self.negative * view[Signal.CANDIDATE_LOGP]) / self.candidates


__all__ = ["OneTokenRolloutLoss", "PerplexityWeighted", "TeacherLogRatio"]
