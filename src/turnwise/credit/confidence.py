"""Credit and clipping by how sure the policy was when it sampled: p of a token is its behaviour probability."""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.algebra.adaptive_clip import clipped
from turnwise.algebra.gate import Gate
from turnwise.algebra.piece import MicroBatchView
from turnwise.algebra.ratio import behaviour
from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, GROUP, TOKEN, TRAJECTORY, Field, where
from turnwise.core.limits import number
from turnwise.core.signals import Signal
from turnwise.maths.lazy_torch import torch

EPS = 1e-8


@dataclass(frozen=True)
class UncertaintyShaped(Term):
    """A(1 + boost·S) + bonus·(S − mean of S in the group), S = clip(by_entropy·z(H) + by_doubt·z(1 − p), ±most): tokens at which
    the policy was uncertain weigh more. z standardises over all sampled tokens of the batch."""

    reads = frozenset({Signal.OLD_ENTROPY})

    term: Term
    boost: float = 0.1
    bonus: float = 0.0
    by_entropy: float = 1.0
    by_doubt: float = 1.0
    most: float = number(2.0, above=0)

    def __call__(self, batch: Batch) -> Field:
        doubt = 1 - behaviour(batch).exp()
        s = self.by_entropy * standardised(batch[Signal.OLD_ENTROPY]) + self.by_doubt * standardised(doubt)
        s = s.clamp(-self.most, self.most)
        return self.term(batch).at(TOKEN) * (1 + self.boost * s) + self.bonus * (s - s.mean(GROUP))


def standardised(value: Field) -> Field:
    """(x − mean) / √(var + 1e-8) over the batch; 0 for a single item."""
    if not value.x.numel():
        return value
    return (value - value.mean(BATCH)) / (value.std(BATCH) ** 2 + EPS) ** 0.5


@dataclass(frozen=True)
class TailConfidenceClip(Gate):
    """Clip to 1 ± ε with one ε for each trajectory: ε = least + (most − least)·σ(steep·(1 − c)), c the mean p of its last
    ``tail`` tokens. The less sure its end was, the wider the window."""

    least: float = number(0.05, least=0, most="most")
    most: float = number(0.2, most=1)
    steep: float = 4.0
    tail: int = number(16, least=1)

    def bound(self, batch: Batch) -> Field:
        """ε of each trajectory."""
        tree, p = batch.tree, behaviour(batch).exp()
        last = tree.size(TOKEN, TRAJECTORY) - tree.index(TOKEN, TRAJECTORY) <= self.tail
        count = where(last, p * 0 + 1, 0.0).sum(TRAJECTORY).clamp(low=1.0)
        sure = where(last, p, 0.0).sum(TRAJECTORY) / count
        return self.least + (self.most - self.least) * (self.steep * (1 - sure)).map(torch.sigmoid)

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        eps = self.bound(view.batch).to(rho.x.dtype)
        return clipped(rho, adv, 1 - eps, 1 + eps)


__all__ = ["TailConfidenceClip", "UncertaintyShaped"]
