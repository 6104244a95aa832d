"""Preferences: how each side of a pair is scored, and what a wrong order costs.

Costs reach across trajectories: they are differentiated over the whole step, before it is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from turnwise.algebra.penalty import Penalty
from turnwise.algebra.piece import NOTHING, Now, Piece, check
from turnwise.algebra.ratio import behaviour
from turnwise.core.levels import GROUP, TRAJECTORY, Field, where
from turnwise.core.signals import Signal
from turnwise.credit.pairs import Pairs, ToldPairs
from turnwise.errors import nearest

# ---------------------------------------------------------------------- scores


class Score(Piece):
    """Interface: one differentiable number for each trajectory."""

    def __call__(self, now: Now) -> Field:
        raise NotImplementedError


@dataclass(frozen=True)
class LogRatio(Score):
    """s = Σₜ log π − log π_ref, the implicit reward. ``mean``: over the tokens, not their sum; ``reference`` False: log π."""

    mean: bool = False
    reference: bool = True

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.REFERENCE}) if self.reference else NOTHING

    def __call__(self, now: Now) -> Field:
        x = now.logp - now[Signal.REFERENCE] if self.reference else now.logp
        return x.mean(TRAJECTORY) if self.mean else x.sum(TRAJECTORY)


@dataclass(frozen=True)
class BetweenAnchors(Score):
    """s = Σₜ log π − (τ/η) log π_ref − (1 − τ/η) log μ: a reference between the frozen policy and the sampler μ."""

    eta: float
    tau: float

    def __post_init__(self) -> None:
        check(0 <= self.tau <= self.eta and self.eta > 0, f"need 0 <= tau <= eta, got tau {self.tau}, eta {self.eta}")

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.REFERENCE}) if self.tau else NOTHING

    def __call__(self, now: Now) -> Field:
        share = self.tau / self.eta
        x = now.logp - (1 - share) * behaviour(now.batch)
        return (x - share * now[Signal.REFERENCE] if self.tau else x).sum(TRAJECTORY)


# ---------------------------------------------------------------------- losses


class PairLoss:
    """Interface: the cost of each pair, of the scores w of the chosen (good) and l of the rejected (bad)."""

    def __call__(self, good: Tensor, bad: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class Logistic(PairLoss):
    """−log σ(β(w − l) − margin)."""

    beta: float
    margin: float = 0.0

    def __post_init__(self) -> None:
        check(self.beta > 0, f"beta is {self.beta}; write a positive number")

    def __call__(self, good: Tensor, bad: Tensor) -> Tensor:
        return -logsigmoid(self.beta * (good - bad) - self.margin)


@dataclass(frozen=True)
class Hinge(PairLoss):
    """max(0, 1 − β(w − l))."""

    beta: float

    def __call__(self, good: Tensor, bad: Tensor) -> Tensor:
        return (1 - self.beta * (good - bad)).clamp(min=0.0)


@dataclass(frozen=True)
class Square(PairLoss):
    """(w − l − 1/(2β))²: the margin has a target."""

    beta: float

    def __post_init__(self) -> None:
        check(self.beta > 0, f"beta is {self.beta}; write a positive number")

    def __call__(self, good: Tensor, bad: Tensor) -> Tensor:
        return (good - bad - 1 / (2 * self.beta)) ** 2


@dataclass(frozen=True)
class Apart(PairLoss):
    """−log σ(βw − shift) − log σ(shift − βl): each side is judged by itself."""

    beta: float
    shift: float = 0.0

    def __call__(self, good: Tensor, bad: Tensor) -> Tensor:
        return -logsigmoid(self.beta * good - self.shift) - logsigmoid(self.shift - self.beta * bad)


@dataclass(frozen=True)
class TwoSquares(PairLoss):
    """(w − 1/(2β))² + (l + 1/(2β))²: each side has a target."""

    beta: float

    def __post_init__(self) -> None:
        check(self.beta > 0, f"beta is {self.beta}; write a positive number")

    def __call__(self, good: Tensor, bad: Tensor) -> Tensor:
        return (good - 0.5 / self.beta) ** 2 + (bad + 0.5 / self.beta) ** 2


@dataclass(frozen=True)
class Smoothed(PairLoss):
    """(1 − ε) ℓ(w, l) + ε ℓ(l, w): some labels may be wrong, so none is believed altogether."""

    loss: PairLoss
    eps: float

    def __post_init__(self) -> None:
        check(0 <= self.eps <= 1, f"the smoothing is {self.eps}; write a number in [0, 1]")

    def __call__(self, good: Tensor, bad: Tensor) -> Tensor:
        right = self.loss(good, bad)
        return (1 - self.eps) * right + self.eps * self.loss(bad, good) if self.eps else right


@dataclass(frozen=True)
class Unflipped(PairLoss):
    """((1 − ε) ℓ(d) − ε ℓ(−d))/(1 − 2ε), d = w − l held within ±bound: on average over labels flipped at rate ε it is the
    loss of the true ones. Without a bound it falls for ever."""

    loss: PairLoss
    flip: float = 0.1
    bound: float = torch.inf

    def __post_init__(self) -> None:
        check(0 <= self.flip < 0.5, f"flip is {self.flip}; write a rate in [0, 0.5)")
        check(self.bound > 0, f"bound is {self.bound}; write a positive number, or inf for none")

    def __call__(self, good: Tensor, bad: Tensor) -> Tensor:
        d = (good - bad).clamp(-self.bound, self.bound)
        zero = torch.zeros_like(d)
        return ((1 - self.flip) * self.loss(d, zero) - self.flip * self.loss(zero, d)) / (1 - 2 * self.flip)


# --------------------------------------------------------------------- the cost


def sides(score: Field, sign: Field) -> tuple[Field, Field]:
    """The scores of chosen and rejected, at GROUP; 0 where there is no pair."""
    side = lambda keep: where(keep, score, 0.0).sum(GROUP)  # noqa: E731
    return side(sign > 0), side(sign < 0)


@dataclass(frozen=True)
class Preferred(Penalty):
    """loss(s(chosen), s(rejected)) of each pair. At GROUP; average it by group over the rows of ``pairs``."""

    loss: PairLoss
    score: Score = field(default_factory=LogRatio)
    pairs: Pairs = field(default_factory=ToldPairs)

    couples = True

    def __call__(self, now: Now) -> Field:
        good, bad = sides(self.score(now), self.pairs.sign(now.batch))
        return Field(good.tree, GROUP, self.loss(good.x, bad.x))

    def tells(self, now: Now) -> Mapping[str, Tensor]:
        return averages(ranking(now, self.pairs, self.score))


@torch.no_grad()
def ranking(now: Now, pairs: Pairs, score: Score) -> dict[str, Field]:
    """Of each group, at GROUP: ``pairs``, 1 where it is one; then the ``margin`` of the score and whether the order is right
    by the score (``accuracy``, of the implicit reward) and by log π, summed (``ranking``) and per token (``ranking/mean``).

    The first two may be fine while the policy still says the rejected more often: what it will sample is the ranking."""
    sign = pairs.sign(now.batch)
    right = lambda one: where(one, 1.0, 0.0)  # noqa: E731
    good, bad = sides(score(now), sign)
    out = {"pairs": right(sign > 0).sum(GROUP), "margin": good - bad, "accuracy": right(good > bad)}
    for name, mean in (("ranking", False), ("ranking/mean", True)):
        good, bad = sides(LogRatio(mean, reference=False)(now), sign)
        out[name] = right(good >= bad)
    return out


def averages(found: Mapping[str, Field]) -> dict[str, Tensor]:
    """What ``ranking`` found, as means over the pairs; nothing without a pair."""
    there = found["pairs"].x > 0
    names = [name for name in found if name != "pairs"] if bool(there.any()) else []
    return {f"preference/{name}": found[name].x[there].mean() for name in names}


def ideal_ranking(now: Now, pairs: Pairs, beta: float, agree: float) -> Field:
    """1 where even the optimum of the logistic loss ranks a pair right, at GROUP: π_ref(w)/π_ref(l) · (α/(1 − α))^{1/β} > 1,
    α = ``agree`` the share of raters who prefer the chosen."""
    check(0 < agree < 1 and beta > 0, f"need 0 < agree < 1 and beta > 0, got {agree}, {beta}")
    good, bad = sides(now[Signal.REFERENCE].sum(TRAJECTORY), pairs.sign(now.batch))
    pull = math.log(agree / (1 - agree)) / beta
    return where(good - bad + pull > 0, 1.0, 0.0)


# ------------------------------------------------------------------------ kinds

KINDS: dict[str, tuple[Callable[[float], PairLoss], Score]] = {
    "sigmoid": (Logistic, LogRatio()),
    "hinge": (Hinge, LogRatio()),
    "ipo": (Square, LogRatio(mean=True)),
    "bco": (Apart, LogRatio()),
    "sppo": (TwoSquares, LogRatio()),
}


def preferred(kind: str, beta: float, smoothing: float, pairs: Pairs) -> Preferred:
    """The usual losses by name, on the implicit reward."""
    check(kind in KINDS, f"no kind {kind!r}; {nearest(kind, KINDS)}")
    loss, score = KINDS[kind]
    return Preferred(Smoothed(loss(beta), smoothing), score, pairs)


__all__ = [
    "KINDS", "Apart", "BetweenAnchors", "Hinge", "LogRatio", "Logistic", "PairLoss", "Preferred", "Score", "Smoothed",
    "Square", "TwoSquares", "Unflipped", "averages", "ideal_ranking", "preferred", "ranking", "sides",
]  # fmt: skip
