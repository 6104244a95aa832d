"""Penalties: what else is optimised. A penalty is a cost for each token, subtracted from the gain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from turnwise.algebra.aggregate import Aggregate
from turnwise.algebra.mask import Mask, covariance, quota
from turnwise.algebra.piece import Now, Piece, State, Whole, check
from turnwise.algebra.ratio import LOG_RATIO_LIMIT, Importance, moved
from turnwise.algebra.term import Term
from turnwise.algebra.weight import Weight
from turnwise.core.levels import TOKEN, TRAJECTORY, TURN, Field, where
from turnwise.core.signals import Signal
from turnwise.maths.divergences import ESTIMATORS


class Penalty(Piece):
    """Interface: the cost of a micro-batch, differentiable. One that ``couples`` trajectories is differentiated by log π
    over the whole step, before the cut; it may read no other live signal."""

    couples = False

    def __call__(self, now: Now) -> Field:
        raise NotImplementedError

    def tells(self, now: Now) -> Mapping[str, Tensor]:
        """Numbers for people, by name: sums over a micro-batch, or of the whole step where it ``couples``."""
        return {}


@dataclass(frozen=True)
class Weighted(Piece):
    """weight · penalty, averaged like the gain or in its own way, over the gain's tokens or its own ``rows`` (each cost is
    divided by its own count). The weight is a number, or moves with the run."""

    weight: float | Weight
    penalty: Penalty
    aggregate: Aggregate | None = None
    rows: Mask | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.weight, Weight):
            check(self.weight >= 0, f"the weight of {self.penalty!r} is {self.weight}; write a number >= 0")


@dataclass(frozen=True)
class KL(Penalty):
    """KL(π‖reference) by a single-sample estimator (see maths/divergences.py for bias and gradients).

    ``to``: another frozen policy instead: PREVIOUS, PROXIMAL. ``corrected`` multiplies by the ratio π/μ, which makes the
    gradient of k3 (and k1) that of the reverse KL also on data of another policy."""

    estimator: str = "k3"
    to: Signal = Signal.REFERENCE
    corrected: bool = False

    def __post_init__(self) -> None:
        check(self.estimator in ESTIMATORS, f"no KL estimator {self.estimator!r}; known: {', '.join(ESTIMATORS)}")

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({self.to})

    def __call__(self, now: Now) -> Field:
        x = (now[self.to] - now.logp).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        cost = x.map(ESTIMATORS[self.estimator])
        return Importance()(now) * cost if self.corrected else cost


@dataclass(frozen=True)
class Nearness(Penalty):
    """(log π − log μ)²: stay near the policy that sampled the data."""

    def __call__(self, now: Now) -> Field:
        return moved(now) ** 2


@dataclass(frozen=True)
class RatioVariance(Penalty):
    """(ρ − 1)²: the ratio has mean 1, so this is its variance; half of it approximates the KL to the sampler."""

    def __call__(self, now: Now) -> Field:
        return (moved(now).exp() - 1) ** 2


@dataclass(frozen=True)
class CovarianceDrift(Penalty):
    """|log π − log μ| on the few tokens with the largest (A − mean A)(log π − mean log π), nothing on the others."""

    fraction: float = 2e-3

    @property
    def foresight(self) -> frozenset[Signal]:
        return frozenset({Signal.LOGP})

    def plan(self, whole: Whole) -> dict[object, Field]:
        cov = covariance(whole)
        n = quota(self.fraction, cov)
        chosen = torch.zeros_like(cov.x)
        by_lot = torch.argsort(whole.batch.lots().x)  # equal covariances: by lot, whatever the packing
        order = by_lot[torch.argsort(cov.x[by_lot].double().round(decimals=9), descending=True, stable=True)]
        chosen[order[:n]] = 1.0
        return {self: Field(cov.tree, TOKEN, chosen)}

    def __call__(self, now: Now) -> Field:
        return now[self] * moved(now).abs()


# -------------------------------------------------------------------- entropy


@dataclass(frozen=True)
class LowEntropy(Penalty):
    """−H: the entropy bonus, as a cost."""

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.ENTROPY})

    def __call__(self, now: Now) -> Field:
        return -now[Signal.ENTROPY]


TURNS = 32  # turn indices whose entropy is remembered by itself; later turns share the last


@dataclass(frozen=True)
class EntropyBand(Penalty):
    """scale · ([low·H̄ − H]₊ + [H − high·H̄]₊) with H̄ the mean entropy of past batches at the same turn index: neither runaway nor
    collapse. The first batch has no past and no band."""

    low: float = 0.0
    high: float = 2.0
    scale: float = 1.0

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.ENTROPY, Signal.OLD_ENTROPY})

    def start(self) -> State:
        return {f"{kind}{k}": 0.0 for k in range(TURNS) for kind in ("sum", "count")}

    def advance(self, state: State, whole: Whole) -> State:
        tree = whole.batch.tree
        index = tree.index(TURN, TRAJECTORY).at(TOKEN).x.clamp(max=TURNS - 1)
        entropy = whole[Signal.OLD_ENTROPY].x.double()
        sums = torch.zeros(TURNS, dtype=torch.float64, device=index.device).index_add(0, index, entropy).tolist()
        counts = torch.bincount(index, minlength=TURNS).tolist()
        for k in range(TURNS):
            state[f"sum{k}"] += sums[k]
            state[f"count{k}"] += counts[k]
        return state

    def plan(self, whole: Whole) -> dict[object, Field]:
        """H̄ for each turn, −1 where there is no past."""
        tree = whole.batch.tree
        past = lambda k: whole[self, f"sum{k}"].item / max(1.0, whole[self, f"count{k}"].item)  # noqa: E731
        means = [past(k) if whole[self, f"count{k}"].item else -1.0 for k in range(TURNS)]
        table = torch.tensor(means, dtype=torch.float64, device=tree.device)
        return {self: Field(tree, TURN, table[tree.index(TURN, TRAJECTORY).x.clamp(max=TURNS - 1)])}

    def __call__(self, now: Now) -> Field:
        h, mean = now[Signal.ENTROPY], now[self].to(now[Signal.ENTROPY].x.dtype)
        outside = (self.low * mean - h).clamp(low=0.0) + (h - self.high * mean).clamp(low=0.0)
        return self.scale * where(mean >= 0, outside, 0.0)


# --------------------------------------------------------------------- critics


@dataclass(frozen=True)
class CriticError(Penalty):
    """½ max( (v − G)², (clip(v, v_old ± clip) − G)² ): the critic's regression to its target G, with PPO's value clip.

    ``finished``: only on episodes that no limit cut off (their return is known), as a mean over those tokens."""

    target: Term
    clip: float = 0.5
    finished: bool = False

    def __post_init__(self) -> None:
        check(self.clip > 0, f"the value clip is {self.clip}; write a positive number, or inf for off")

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.VALUE, Signal.OLD_VALUE})

    def plan(self, whole: Whole) -> dict[object, Field]:
        columns: dict[object, Field] = {self: self.target(whole.batch).at(TOKEN)}
        if self.finished:
            ended = where(whole.batch.truncated, 0.0, 1.0).at(TOKEN)
            columns[self, "weight"] = ended * (ended.x.numel() / max(1.0, float(ended.x.sum())))
        return columns

    def __call__(self, now: Now) -> Field:
        v, old, target = now[Signal.VALUE], now[Signal.OLD_VALUE], now[self]
        near = old + (v - old).clamp(-self.clip, self.clip)
        cost = 0.5 * ((v - target) ** 2).maximum((near - target) ** 2)
        return now[self, "weight"].to(v.x.dtype) * cost if self.finished else cost


@dataclass(frozen=True)
class SquaredError(Penalty):
    """(v − G)²: plain regression of the value head."""

    target: Term

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.VALUE})

    def plan(self, whole: Whole) -> dict[object, Field]:
        return {self: self.target(whole.batch).at(TOKEN)}

    def __call__(self, now: Now) -> Field:
        return (now[Signal.VALUE] - now[self]) ** 2


@dataclass(frozen=True)
class MedianError(Penalty):
    """softplus(G − u) − ½(G − u): the second head learns a soft median of the return."""

    target: Term

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.TWIN})

    def plan(self, whole: Whole) -> dict[object, Field]:
        return {self: self.target(whole.batch).at(TOKEN)}

    def __call__(self, now: Now) -> Field:
        x = now[self] - now[Signal.TWIN]
        return x.map(torch.nn.functional.softplus) - 0.5 * x


@dataclass(frozen=True)
class TwinError(Penalty):
    """Huber error of two value heads against the outcome, the larger of v and of v clipped around its old value."""

    target: Term
    clip: float = 0.2
    delta: float = 0.5

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.VALUE, Signal.OLD_VALUE, Signal.TWIN, Signal.OLD_TWIN})

    def plan(self, whole: Whole) -> dict[object, Field]:
        return {self: self.target(whole.batch).at(TOKEN)}

    def __call__(self, now: Now) -> Field:
        heads = ((Signal.VALUE, Signal.OLD_VALUE), (Signal.TWIN, Signal.OLD_TWIN))
        left, right = (self._head(now[new], now[old], now[self]) for new, old in heads)
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
    """−log π: with no gain beside it, supervised learning on the batch."""

    def __call__(self, now: Now) -> Field:
        return -now.logp


__all__ = [
    "KL", "CovarianceDrift", "CriticError", "EntropyBand", "LowEntropy", "MedianError", "Nearness",
    "NegativeLogLikelihood", "Penalty", "RatioVariance", "SquaredError", "TwinError", "Weighted",
]  # fmt: skip
