"""Penalties: further losses beside the gain. A penalty is a cost for each token, subtracted from the gain.

A penalty does not know its weight; ``weight.py`` holds weights that change during a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from turnwise.algebra.aggregate import Aggregate
from turnwise.algebra.mask import Mask, covariance, quota
from turnwise.algebra.piece import MicroBatchView, Piece, State, StepView, check
from turnwise.algebra.ratio import LOG_RATIO_LIMIT, Importance, moved
from turnwise.algebra.term import Term
from turnwise.algebra.weight import Weight
from turnwise.core.levels import TOKEN, TRAJECTORY, TURN, Field, where
from turnwise.core.limits import choice, number
from turnwise.core.signals import Signal
from turnwise.maths.divergences import ESTIMATORS
from turnwise.maths.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


class Penalty(Piece):
    """Interface: the cost of a micro-batch, differentiable. One that ``couples_trajectories`` is differentiated by log π over the
    whole step, before the split; it may read no other signal with gradient."""

    couples_trajectories = False

    def __call__(self, view: MicroBatchView) -> Field:
        raise NotImplementedError

    def metrics(self, view: MicroBatchView) -> Mapping[str, Tensor]:
        """Metrics to log, by name: sums over a micro-batch, or over the whole step where it ``couples_trajectories``."""
        return {}


@dataclass(frozen=True)
class WeightedPenalty(Piece):
    """weight · penalty, averaged like the gain or by its own aggregate, over the gain's tokens or its own ``rows`` (each cost is
    divided by its own count). The weight is a number or a ``Weight`` that changes during the run."""

    weight: float | Weight
    penalty: Penalty
    aggregate: Aggregate | None = None
    rows: Mask | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.weight, Weight):  # the message names the penalty: a method may have several
            check(self.weight >= 0, f"the weight of {self.penalty!r} is {self.weight}; write a number >= 0")


@dataclass(frozen=True)
class KL(Penalty):
    """KL(π‖reference) by a single-sample estimator (see maths/divergences.py for bias and gradients).

    ``to``: another frozen policy instead: PREVIOUS, PROXIMAL. ``corrected`` multiplies by the ratio π/μ, so that the gradient
    of k3 (and k1) is that of the reverse KL also on off-policy data."""

    estimator: str = choice(*ESTIMATORS, default="k3")
    to: Signal = Signal.REFERENCE
    corrected: bool = False

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({self.to})

    def __call__(self, view: MicroBatchView) -> Field:
        x = (view[self.to] - view.logp).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        cost = x.map(ESTIMATORS[self.estimator])
        return Importance()(view) * cost if self.corrected else cost


@dataclass(frozen=True)
class SquaredLogRatio(Penalty):
    """(log π − log μ)²: keeps the policy near the behaviour policy."""

    def __call__(self, view: MicroBatchView) -> Field:
        return moved(view) ** 2


@dataclass(frozen=True)
class RatioVariance(Penalty):
    """(ρ − 1)²: the ratio has mean 1, so this is its variance; half of it approximates the KL to the behaviour policy."""

    def __call__(self, view: MicroBatchView) -> Field:
        return (moved(view).exp() - 1) ** 2


@dataclass(frozen=True)
class HighCovarianceDrift(Penalty):
    """|log π − log μ| on the few tokens with the largest (A − mean A)(log π − mean log π), 0 on the others."""

    reads_before_step = frozenset({Signal.LOGP})

    fraction: float = 2e-3

    def plan(self, view: StepView) -> dict[object, Field]:
        cov = covariance(view)
        n = quota(self.fraction, cov)
        selected = torch.zeros_like(cov.x)
        shuffled = torch.argsort(view.batch.uniform_draws().x)  # break ties at random, independently of the packing
        order = shuffled[torch.argsort(cov.x[shuffled].double().round(decimals=9), descending=True, stable=True)]
        selected[order[:n]] = 1.0
        return {self: Field(cov.tree, TOKEN, selected)}

    def __call__(self, view: MicroBatchView) -> Field:
        return view[self] * moved(view).abs()


# -------------------------------------------------------------------- entropy


@dataclass(frozen=True)
class NegativeEntropy(Penalty):
    """−H: the entropy bonus, as a cost."""

    reads = frozenset({Signal.ENTROPY})

    def __call__(self, view: MicroBatchView) -> Field:
        return -view[Signal.ENTROPY]


TURNS = 32  # turn indices with their own mean entropy; later turns share the last


@dataclass(frozen=True)
class EntropyBand(Penalty):
    """scale · ([low·H̄ − H]₊ + [H − high·H̄]₊) with H̄ the mean entropy of past batches at the same turn index: the entropy
    neither explodes nor collapses. The first batch has no cost."""

    reads = frozenset({Signal.ENTROPY, Signal.OLD_ENTROPY})

    low: float = 0.0
    high: float = 2.0
    scale: float = 1.0

    def initial_state(self) -> State:
        return {f"{kind}{k}": 0.0 for k in range(TURNS) for kind in ("sum", "count")}

    def next_state(self, state: State, view: StepView) -> State:
        tree = view.batch.tree
        index = tree.index(TURN, TRAJECTORY).at(TOKEN).x.clamp(max=TURNS - 1)
        entropy = view[Signal.OLD_ENTROPY].x.double()
        sums = torch.zeros(TURNS, dtype=torch.float64, device=index.device).index_add(0, index, entropy).tolist()
        counts = torch.bincount(index, minlength=TURNS).tolist()
        for k in range(TURNS):
            state[f"sum{k}"] += sums[k]
            state[f"count{k}"] += counts[k]
        return state

    def plan(self, view: StepView) -> dict[object, Field]:
        """H̄ for each turn, −1 where no earlier batch had one."""
        tree = view.batch.tree
        past = lambda k: view[self, f"sum{k}"].item / max(1.0, view[self, f"count{k}"].item)  # noqa: E731
        means = [past(k) if view[self, f"count{k}"].item else -1.0 for k in range(TURNS)]
        table = torch.tensor(means, dtype=torch.float64, device=tree.device)
        return {self: Field(tree, TURN, table[tree.index(TURN, TRAJECTORY).x.clamp(max=TURNS - 1)])}

    def __call__(self, view: MicroBatchView) -> Field:
        h, mean = view[Signal.ENTROPY], view[self].to(view[Signal.ENTROPY].x.dtype)
        outside = (self.low * mean - h).clamp(low=0.0) + (h - self.high * mean).clamp(low=0.0)
        return self.scale * where(mean >= 0, outside, 0.0)


# --------------------------------------------------------------------- critics


@dataclass(frozen=True)
class ClippedValueLoss(Penalty):
    """½ max( (v − G)², (clip(v, v_old ± clip) − G)² ): the critic's regression to its target G, with PPO's value clip.

    ``finished``: only on episodes that were not truncated (their return is known), as a mean over those tokens."""

    reads = frozenset({Signal.VALUE, Signal.OLD_VALUE})

    target: Term
    clip: float = number(0.5, above=0, why="inf for off")
    finished: bool = False

    def plan(self, view: StepView) -> dict[object, Field]:
        columns: dict[object, Field] = {self: self.target(view.batch).at(TOKEN)}
        if self.finished:
            ended = where(view.batch.truncated, 0.0, 1.0).at(TOKEN)
            columns[self, "weight"] = ended * (ended.x.numel() / max(1.0, float(ended.x.sum())))
        return columns

    def __call__(self, view: MicroBatchView) -> Field:
        v, old, target = view[Signal.VALUE], view[Signal.OLD_VALUE], view[self]
        near = old + (v - old).clamp(-self.clip, self.clip)
        cost = 0.5 * ((v - target) ** 2).maximum((near - target) ** 2)
        return view[self, "weight"].to(v.x.dtype) * cost if self.finished else cost


@dataclass(frozen=True)
class SquaredValueError(Penalty):
    """(v − G)²: regression of the value head without a clip."""

    reads = frozenset({Signal.VALUE})

    target: Term

    def plan(self, view: StepView) -> dict[object, Field]:
        return {self: self.target(view.batch).at(TOKEN)}

    def __call__(self, view: MicroBatchView) -> Field:
        return (view[Signal.VALUE] - view[self]) ** 2


@dataclass(frozen=True)
class MedianValueError(Penalty):
    """softplus(G − u) − ½(G − u): the second head learns a soft median of the return."""

    reads = frozenset({Signal.SECOND_VALUE})

    target: Term

    def plan(self, view: StepView) -> dict[object, Field]:
        return {self: self.target(view.batch).at(TOKEN)}

    def __call__(self, view: MicroBatchView) -> Field:
        x = view[self] - view[Signal.SECOND_VALUE]
        return x.map(torch.nn.functional.softplus) - 0.5 * x


@dataclass(frozen=True)
class TwoHeadValueError(Penalty):
    """Huber error of two value heads against the outcome, the larger of v and of v clipped around its old value."""

    reads = frozenset({Signal.VALUE, Signal.OLD_VALUE, Signal.SECOND_VALUE, Signal.OLD_SECOND_VALUE})

    target: Term
    clip: float = 0.2
    delta: float = 0.5

    def plan(self, view: StepView) -> dict[object, Field]:
        return {self: self.target(view.batch).at(TOKEN)}

    def __call__(self, view: MicroBatchView) -> Field:
        heads = ((Signal.VALUE, Signal.OLD_VALUE), (Signal.SECOND_VALUE, Signal.OLD_SECOND_VALUE))
        left, right = (self._head(view[new], view[old], view[self]) for new, old in heads)
        return left + right

    def _head(self, v: Field, old: Field, target: Field) -> Field:
        near = old + (v - old).clamp(-self.clip, self.clip)
        return self._huber(v - target).maximum(self._huber(near - target))

    def _huber(self, x: Field) -> Field:
        size = x.abs()
        return where(size <= self.delta, 0.5 * x * x, self.delta * (size - 0.5 * self.delta))


# ------------------------------------------------------------------- imitation


@dataclass(frozen=True)
class NegativeLogLikelihood(Penalty):
    """−log π: without a gain this is supervised learning on the batch."""

    def __call__(self, view: MicroBatchView) -> Field:
        return -view.logp


__all__ = [
    "KL", "ClippedValueLoss", "EntropyBand", "HighCovarianceDrift", "MedianValueError", "NegativeEntropy",
    "NegativeLogLikelihood", "Penalty", "RatioVariance", "SquaredLogRatio", "SquaredValueError", "TwoHeadValueError",
    "WeightedPenalty",
]  # fmt: skip
