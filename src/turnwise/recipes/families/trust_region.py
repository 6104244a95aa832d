"""Trust regions: other importance ratios, clipping rules and limits on how far the policy moves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from turnwise.algebra.advantage import DivideByBatchStd, Standardise
from turnwise.algebra.aggregate import Mean, Sum
from turnwise.algebra.control import Control, Measure, Passes
from turnwise.algebra.gate import CappedWeight, Clip, ClipByOutcome, Gate, RatioRegression, clipped
from turnwise.algebra.gradient import DivideByClippingBias, Gradient, Grads, Scales, norm
from turnwise.algebra.mask import Mask
from turnwise.algebra.penalty import KL, Penalty, ResetReference, Schedule, Weight, WeightedPenalty
from turnwise.algebra.piece import NOTHING, MicroBatchView, State, StepView
from turnwise.algebra.ratio import LOG_RATIO_LIMIT, Importance, PerToken, Product, Ratio, behaviour, mismatch, moved
from turnwise.algebra.term import Term
from turnwise.algebra.value import Constant, MedianCentred, Outcome
from turnwise.core.batch import Batch
from turnwise.core.columns import Column
from turnwise.core.levels import BATCH, GROUP, TOKEN, TRAJECTORY, TURN, Field, Partition, Tree, where
from turnwise.core.limits import choice, number
from turnwise.core.signals import Signal
from turnwise.data.replay import PastBatches
from turnwise.maths.lazy_torch import torch
from turnwise.recipes.recipe import Kind, Recipe
from turnwise.tasks.pool_samplers import GaussianFrontier

if TYPE_CHECKING:
    from torch import Tensor

KIND = Kind.OBJECTIVE


def so_grpo(clip: float = 0.2, floor: float = 1.0) -> Recipe:
    """SO-GRPO: GRPO with turn-level ratios, and gradients divided by the norm of the clipped part (clipping bias).

    wᵏ = exp( mean over turn k of log ρ );  g = ∇J_clip / max(‖C‖, floor), C = ∇ of the clipped part

    Paper: Stabilizing Off-Policy Training for Long-Horizon LLM Agent (v2 of ST-PPO), arXiv 2511.20718.
    Settings: clip 0.2.
    Deviation: the floor is ours."""
    ratio, gradient = PerToken(Importance(TURN)), DivideByClippingBias(floor)
    return Recipe(
        advantage=Standardise(), ratio=ratio, gate=Clip(clip, clip), gradient=gradient, control=Passes(minibatches=4)
    )


def _earlier_minimum(x: torch.Tensor, tree: Tree) -> torch.Tensor:
    """The smallest earlier value in the same trajectory, 0 for its first token; log₂ n passes instead of a loop."""
    owner = tree.ancestor(TOKEN, TRAJECTORY)
    shifted = lambda v, n, fill: torch.nn.functional.pad(v[:-n], (n, 0), value=fill)  # noqa: E731
    low = torch.where(shifted(owner, 1, -1) == owner, shifted(x, 1, torch.inf), torch.inf) if x.numel() else x
    for shift in (2**n for n in range(max(0, x.numel() - 1).bit_length())):
        same = shifted(owner, shift, -1) == owner
        low = torch.minimum(low, torch.where(same, shifted(low, shift, torch.inf), torch.inf))
    return torch.where(torch.isinf(low), 0.0, low)


class PrefixMinimum(Ratio):
    """ρₜ = sg[min_{i<t} ρᵢ] ρₜ, 1 for the first: the smallest ratio stands for the prefix, so it cannot explode."""

    def __call__(self, view: MicroBatchView) -> Field:
        log_ratio = moved(view)
        least = log_ratio.detach().map(lambda x: _earlier_minimum(x, view.batch.tree))
        return (least + log_ratio).exp()


def minpro(low: float = 0.8, high: float = 1.28) -> Recipe:
    """MinPRO: multiplies the token ratio by the minimum ratio of its prefix, a bounded proxy for the prefix product.

    wₜ = min_{i<t} ρᵢ · ρₜ;  ∇J = token mean of sg[clip(wₜ, low, high)] A ∇ log πₜ

    Paper: A Step Back: Prefix Importance Ratio Stabilizes Policy Optimization, arXiv 2601.22718.
    Settings: rollouts delayed by two or more steps; bounds as CISPO or DAPO (the paper's were not found)."""
    gate = CappedWeight(high, low)
    return Recipe(
        advantage=Standardise(), ratio=PrefixMinimum(), gate=gate, aggregate=Mean(TOKEN), control=Passes(minibatches=4)
    )


class WideningClip(Gate):
    """Clip in log space to [−low·tᵖ, high·tᵖ], dual at dual·tᵖ: the window widens with token index t like a random walk."""

    low: float = 0.025
    high: float = 0.05
    dual: float = 0.05
    power: float = 0.5

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        t = (view.batch.tree.index(TOKEN, TRAJECTORY) + 1).to(rho.x.dtype) ** self.power
        low, high, dual = ((bound * t).exp() for bound in (-self.low, self.high, self.dual))
        return clipped(rho, adv, low, high, dual)


class PrefixProduct(Ratio):
    """ρₜ = sg[Π_{i<t} ρᵢ] ρₜ: the exact weight of a token given its prefix, with the token's own gradient."""

    cap: float = 10.0

    def __call__(self, view: MicroBatchView) -> Field:
        prefix = moved(view).detach().running_sum(TRAJECTORY)
        return (prefix + view.logp - view.logp.detach()).clamp(-LOG_RATIO_LIMIT, self.cap).exp()


def ctpo(low: float = 0.025, high: float = 0.05, dual: float = 0.05, power: float = 0.5) -> Recipe:
    """CTPO: cumulative prefix product as ratio, clipped in log space to a window that grows with the token index.

    ρ̂ₜ = Π_{i≤t} ρᵢ;  clip in log space to [−low·tᵖ, high·tᵖ], for A < 0 also at dual·tᵖ

    Paper: Rethinking Importance Sampling in LLM Policy Optimization: A Cumulative Token Perspective, arXiv 2605.07331.
    Settings: low 0.025, high 0.05, dual 0.05, power 0.5."""
    gate = WideningClip(low, high, dual, power)
    return Recipe(
        advantage=Standardise(), ratio=PrefixProduct(), gate=gate, aggregate=Mean(TOKEN), control=Passes(minibatches=4)
    )


class TotalVariation(Mask):
    """A > 0 needs p − p_μ ≤ high, else p − p_μ ≥ −low: a distance of probabilities, which does not penalise rare tokens more."""

    low: float
    high: float

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        step = view.logp.detach().exp() - behaviour(view.batch).exp()
        return where(adv > 0, step <= self.high, step >= -self.low)


def dppo_tv(low: float = 0.15, high: float = 0.15, cap: float = 20.0) -> Recipe:
    """DPPO (total variation): masks tokens by the change of their *probability*, which does not penalise rare tokens.

    kept where A > 0 and p − p_μ ≤ high, or A ≤ 0 and p − p_μ ≥ −low;  ∇J = token mean of sg[min(ρ, cap)] A ∇ log π

    Paper: Rethinking the Trust Region in LLM Reinforcement Learning, arXiv 2602.04879.
    Settings: cap 20, thresholds of 0.15."""
    gate = CappedWeight(cap).where(TotalVariation(low, high))
    return Recipe(advantage=Standardise(), gate=gate, aggregate=Mean(TOKEN), control=Passes(minibatches=4))


class BinaryKL(Mask):
    """KL of (p_μ, 1 − p_μ) from (p, 1 − p) at most ``limit``, or the update moves back toward p_μ."""

    limit: float

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        p, old = (x.exp().clamp(1e-8, 1 - 1e-8) for x in (view.logp.detach(), behaviour(view.batch)))
        kl = old * (old / p).log() + (1 - old) * ((1 - old) / (1 - p)).log()
        away = where(adv > 0, view.logp.detach() > behaviour(view.batch), view.logp.detach() < behaviour(view.batch))
        return (kl <= self.limit) | ~away


def dppo_kl(limit: float = 0.05, cap: float = 20.0) -> Recipe:
    """DPPO (binary KL): masks tokens by the KL of (p, 1 − p), unless the update moves them back to the sampler.

    kept where KL((p_μ, 1−p_μ) ‖ (p, 1−p)) ≤ limit, or the move is toward p_μ

    Paper: Rethinking the Trust Region in LLM Reinforcement Learning, arXiv 2602.04879.
    Settings: cap 20, a threshold of 0.05."""
    return Recipe(
        advantage=Standardise(),
        gate=CappedWeight(cap).where(BinaryKL(limit)),
        aggregate=Mean(TOKEN),
        control=Passes(minibatches=4),
    )


class BalancedClip(Gate):
    """A clip [low, high] widened at every step until tokens with A > 0 carry at least ``share`` of the objective.

    First the upper bound rises to ``high_end``, then the lower to ``low_end``. ``statistic``: what a token contributes,
    its "gradient" ρ|A| unless clipped, or the "value" |min(ρA, clip(ρ)A)| (which a higher lower bound never decreases)."""

    reads_before_step = frozenset({Signal.LOGP})
    share: float = 0.4
    low: float = number(0.6, least=0, most="low_end")
    high: float = number(1.2, least=1, most="high_end")
    low_end: float = number(0.9, most=1)
    high_end: float = 3.0
    low_step: float = 0.02
    high_step: float = 0.05
    dual: float | None = 3.0
    statistic: str = choice("gradient", "value")

    def plan(self, view: StepView) -> dict[object, Field]:
        rho, adv = view.ratio.at(TOKEN).x, view.advantage.at(TOKEN).x
        low, high, slack = self.low, self.high, 1e-9
        while self._positive_share(rho, adv, low, high) < self.share:
            if high < self.high_end - slack:
                high = min(self.high_end, high + self.high_step)
            elif low < self.low_end - slack:
                low = min(self.low_end, low + self.low_step)
            else:
                break
        full = lambda x: view.batch.tree.full(BATCH, x, rho.dtype)  # noqa: E731
        return {(self, "low"): full(low), (self, "high"): full(high)}

    def _positive_share(self, rho: torch.Tensor, adv: torch.Tensor, low: float, high: float) -> float:
        bounded = torch.where(adv > 0, rho.clamp(max=high), rho.clamp(min=low))
        size = (bounded * adv).abs()
        if self.statistic == "gradient":
            size = torch.where(bounded == rho, size, 0.0)
        total = float(size.sum())
        return float(size[adv > 0].sum()) / total if total > 0 else 1.0

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return clipped(rho, adv, view[self, "low"], view[self, "high"], self.dual)


def bapo(
    share: float = 0.4,
    low: float = 0.6,
    high: float = 1.2,
    low_end: float = 0.9,
    high_end: float = 3.0,
    low_step: float = 0.02,
    high_step: float = 0.05,
    dual: float = 3.0,
    statistic: str = "gradient",
) -> Recipe:
    """BAPO: widens the clip window before each step until positive tokens carry a set share of the objective.

    while Σ_{A>0} e / Σ e < share: raise the upper bound, then the lower;  e = what a token contributes

    Paper: BAPO: Stabilizing Off-Policy RL for LLMs via Balanced Policy Optimization with Adaptive Clipping, arXiv 2510.18927.
    Settings: share 0.4, bounds from 0.6/1.2 to 0.9/3.0, steps 0.02/0.05, dual 3.
    Deviation: statistic "gradient" by default; with the paper's "value" the lower bound cannot help and runs to its end."""
    gate = BalancedClip(share, low, high, low_end, high_end, low_step, high_step, dual, statistic)
    return Recipe(advantage=Standardise(), gate=gate, aggregate=Mean(TOKEN), control=Passes(epochs=2, minibatches=4))


def topr(baseline: float = 0.0) -> Recipe:
    """TOPR (needs negative rewards): no importance weight on good trajectories, a truncated (tapered) sequence ratio on bad ones.

    ∇J = mean of α (R − c) Σₜ ∇ log πₜ,  α = 1 where R ≥ 0, min(π(y)/μ(y), 1) where R < 0

    Paper: Tapered Off-Policy REINFORCE, arXiv 2503.14286.
    Settings: rewards ±1, n 16, no KL; an effective share of 10 to 20 % good ones works best.
    Deviation: environments here reward 0 and 1, so nothing is tapered unless a reward is negative."""
    credit, ratio = Outcome() - Constant(baseline), Product(TRAJECTORY)
    return Recipe(
        advantage=credit, ratio=ratio, gate=ClipByOutcome(), aggregate=Sum(TRAJECTORY), control=Passes(minibatches=4)
    )


class SigmoidGate(Gate):
    """w = (4/τ) σ(τ(ρ − 1)), τ by the sign of A: a soft clip whose gradient decays with the distance from 1."""

    pos: float = number(1.0, above=0)
    neg: float = number(1.05, above=0)

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        tau = where(adv > 0, self.pos, self.neg).to(rho.x.dtype)
        return 4 / tau * (tau * (rho - 1)).map(torch.sigmoid)


def sapo(pos: float = 1.0, neg: float = 1.05) -> Recipe:
    """SAPO: a sigmoid gate instead of clipping; the gradient decays with |ρ − 1|, faster for negative advantages.

    J = 1/G Σᵢ 1/|yᵢ| Σₜ (4/τ) σ(τ(ρₜ − 1)) Aᵢ,  τ by the sign of A

    Paper: Soft Adaptive Policy Optimization, arXiv 2511.20347.
    Settings: pos 1.0, neg 1.05."""
    return Recipe(advantage=Standardise(), gate=SigmoidGate(pos, neg), control=Passes(minibatches=4))


def _rollback(x: Field, budget: float, length: Field) -> Field:
    """g(x, C, T): the identity up to |x| = C, slope −T down to 0 at (1 + 1/T) C, 0 beyond."""
    length = length.clamp(low=1.0)
    back = x.map(torch.sign).detach() * ((length + 1) * budget) - length * x
    size = x.abs().detach()
    return where(size <= budget, x, where(size < (1 + 1 / length) * budget, back, 0.0))


def _clip(x: Field, eps: float) -> Field:
    return x.clamp(-eps, eps)


class Fibration(Ratio):
    """Gₜ = W Fₜ: trajectory drift and token residual, each within its own trust region.

    S± = mean over the trajectory of max(±l, 0);  W = exp( g(S⁺, C⁺) − g(S⁻, C⁻) )
    Fₜ = exp( clip(lₜ − sₜ S^{sₜ}, ±ε) − clip(−sₜ S^{−sₜ}, ±ε) ),  sₜ = sign(lₜ)
    g(x, C) = x up to C, then back to 0 with slope −T, T tokens: a drift beyond its budget has a gradient back.

    ``domains`` splits the drift into that of the domain, of the group inside it and of the trajectory inside that, each
    gated separately. Groups and domains span micro-batches, so the ratio is then computed over the whole step."""

    plus: float = number(0.12, least=0)
    minus: float = number(0.05, least=0)
    eps: float = number(0.04, least=0)
    domains: bool = False

    @property
    def couples_trajectories(self) -> bool:
        return self.domains

    @property
    def reads_before_step(self) -> frozenset[Signal]:
        return frozenset({Signal.LOGP}) if self.domains else NOTHING

    def __call__(self, view: MicroBatchView) -> Field:
        log_ratio = moved(view)
        up = (log_ratio >= 0).detach()
        rises, falls = where(up, log_ratio, 0.0), where(up, 0.0, -log_ratio)  # an unchanged token counts as rising
        base = self._drift(rises, self.plus, view) - self._drift(falls, self.minus, view)
        same_sign = where(up, rises.mean(TRAJECTORY), falls.mean(TRAJECTORY))
        other_sign = where(up, falls.mean(TRAJECTORY), rises.mean(TRAJECTORY))
        sign = where(up, 1.0, -1.0).to(log_ratio.x.dtype)
        residual = _clip(log_ratio - sign * same_sign, self.eps) - _clip(-sign * other_sign, self.eps)
        return (base + residual).exp()

    def _drift(self, part: Field, budget: float, view: MicroBatchView) -> Field:
        """One channel of the base, gated at each of its levels."""
        trajectory, tree = part.mean(TRAJECTORY), part.tree
        length = tree.size(TOKEN, TRAJECTORY).to(part.x.dtype)
        if not self.domains:
            return _rollback(trajectory, budget, length)
        has_tokens = where(length > 0, 1.0, 0.0).to(part.x.dtype)
        domain = Partition.by(tree, TRAJECTORY, view.batch.domain)
        mean = lambda over: (trajectory * has_tokens).sum(over) / has_tokens.sum(over).clamp(low=1.0)  # noqa: E731
        of_group, of_domain = mean(GROUP), mean(domain)
        return (
            _rollback(of_domain, budget, length.sum(domain))
            + _rollback(of_group - of_domain, budget, length.sum(GROUP))
            + _rollback(trajectory - of_group, budget, length)
        )


def fiberpo(plus: float = 0.12, minus: float = 0.05, eps: float = 0.04) -> Recipe:
    """FiberPO: separate trust regions for the drift of a trajectory and for the residual of each token.

    G = W·F, W = exp(g(S⁺) − g(S⁻)), F the clipped residual;  J = mean of 1/T Σₜ Gₜ Aₜ; beyond its budget a drift pulls back

    Paper: Fibration Policy Optimization, arXiv 2603.08239.
    Settings: budgets 0.12/0.05, eps 0.04 in an illustration; none tuned."""
    return Recipe(advantage=Standardise(), ratio=Fibration(plus, minus, eps), control=Passes(minibatches=4))


def fiberpo_domain(plus: float = 0.12, minus: float = 0.05, eps: float = 0.04) -> Recipe:
    """FiberPO-Domain: splits the drift into domain, group and trajectory parts, each with its own gate.

    W = exp Σ± ±[ g(S_D) + g(S_g − S_D) + g(S_τ − S_g) ];  F as in FiberPO

    Paper: Fibration Policy Optimization, arXiv 2603.08239.
    Settings: none published. A domain here is an environment at one difficulty."""
    return replace(fiberpo(), ratio=Fibration(plus, minus, eps, domains=True))


class RatioVariance(Penalty):
    """(ρ − 1)²: the ratio has mean 1, so this is its variance; half of it approximates the KL to the behaviour policy."""

    def __call__(self, view: MicroBatchView) -> Field:
        return (moved(view).exp() - 1) ** 2


class DualVariable(Weight):
    """λ ← max(0, λ + rate (mean (ρ − 1)² − target)) after each step: the multiplier of a bound on the ratio's variance."""

    reads_before_step = frozenset({Signal.LOGP})
    initial: float = 0.04
    target: float = 0.02
    rate: float = 0.01

    def initial_state(self) -> State:
        return {"lambda": self.initial}

    def next_state(self, state: State, view: StepView) -> State:
        variance = float(((moved(view).exp() - 1) ** 2).mean(BATCH).item)
        return {"lambda": max(0.0, state["lambda"] + self.rate * (variance - self.target))}

    def __call__(self, view: StepView) -> Field:
        return view[self, "lambda"]


def r2vpo(weight: float = 0.04, target: float = 0.02, rate: float = 0.01) -> Recipe:
    """R2VPO: no clipping; penalises the variance of the ratio with a Lagrange multiplier.

    J = token mean of ρA − λ(ρ − 1)²;  λ ← max(0, λ + rate (mean (ρ − 1)² − target))

    Paper: Ratio-Variance Regularized Policy Optimization, arXiv 2601.03320.
    Settings: λ about 0.04 (third-party); target and rate ours."""
    penalty = WeightedPenalty(DualVariable(weight, target, rate), RatioVariance())
    return Recipe(advantage=Standardise(), aggregate=Mean(TOKEN), penalties=(penalty,), control=Passes(minibatches=4))


def gbpo(low: float = 0.3, high: float = 0.3, softness: float = 1e-4) -> Recipe:
    """GBPO: regresses the ratio onto a bounded target by whether the return exceeds the group median.

    ρ* = 1 − low + (low + high) σ(((R − median)/(std + ε))/softness);  L = token mean of |ρ − ρ*| |A|

    Paper: Bounded Ratio Reinforcement Learning, arXiv 2604.18578.
    Settings: bounds 0.3, softness 1e-4 recommended (1.0 in its config), 5 to 10 epochs per batch."""
    gate = RatioRegression(MedianCentred(), softness, low, high)
    return Recipe(advantage=Standardise(), gate=gate, aggregate=Mean(TOKEN), control=Passes(minibatches=4))


class ScaleByEffectiveSamples(Gradient):
    """lr ← lr √min(1, (ESS/B) / base), ESS = (Σw)² / Σw² of the trajectories' product ratios π/μ: a small effective sample
    size gives a small step."""

    reads_before_step = frozenset({Signal.LOGP})
    base: float = 1.0

    def plan(self, view: StepView) -> dict[object, Field]:
        tree = view.batch.tree
        has_tokens = (tree.size(TOKEN, TRAJECTORY) > 0).x
        log = moved(view).sum(TRAJECTORY).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).x[has_tokens].double()
        w = (log - log.max()).exp() if log.numel() else log.new_ones(1)  # a common factor cancels
        ess = float(w.sum() ** 2 / ((w**2).sum() + 1e-8))
        return {self: tree.full(BATCH, (min(1.0, ess / w.numel() / self.base)) ** 0.5, torch.float64)}

    def scales(self, view: MicroBatchView, side_gradients: Mapping[str, Grads]) -> Scales:
        return Scales(rate=float(view[self].item))


class MinimumVarianceBaseline(Term):
    """A = R − b*, b* = Σ ω R / Σ ω over the group, with ω = ‖∇ log π‖² (times w² for off-policy data).

    b* minimises the variance of the gradient. A group of one gets 0."""

    compares_peers = True
    # w = π_prox(y)/μ(y), the product over the trajectory
    offpolicy: bool = False
    # divides by the population std of the group
    scale: bool = False
    eps: float = 1e-6

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.GRADIENT_NORM} | ({Signal.PROXIMAL} if self.offpolicy else set()))

    def __call__(self, batch: Batch) -> Field:
        outcome = batch.reward.sum(TRAJECTORY)
        weight = batch[Signal.GRADIENT_NORM] ** 2
        if self.offpolicy:
            log_ratio = batch[Signal.PROXIMAL] - batch.behaviour - batch.mass
            weight = weight * (2 * log_ratio.clamp(-20, 20).sum(TRAJECTORY).clamp(-20, 20)).exp()
        total = weight.sum(GROUP)
        weight = where(total > 0, weight, 1.0)  # all weights are 0: use the plain mean
        baseline = (weight * outcome).sum(GROUP) / weight.sum(GROUP)
        adv = where(outcome.peer_count(GROUP) > 1, outcome - baseline, 0.0)
        return adv / (outcome.std(GROUP, 0) + self.eps) if self.scale else adv


def vcpo(cap: float = 8.0, base: float = 1.0) -> Recipe:
    """VCPO: minimum-variance off-policy baseline, and a learning rate scaled by the effective sample size.

    b* = Σ w²n²R / Σ w²n²;  g = mean of min(w, cap) (R − b*)/std · 1/|y| Σ ∇ log π;  lr ← lr √min(1, (ESS/B)/base)

    Paper: Stable Asynchrony: Variance-Controlled Off-Policy RL for LLMs, arXiv 2602.17616.
    Settings: cap 8, base 1, lag 10, no KL.
    Deviation: weights and norms of the baseline are those before the first update on a batch."""
    return Recipe(
        advantage=MinimumVarianceBaseline(offpolicy=True, scale=True),
        ratio=Product(TRAJECTORY),
        gate=CappedWeight(cap),
        gradient=ScaleByEffectiveSamples(base),
    )


class ScaleBySignalToNoise(Gradient):
    """lr ← lr |g|² / (|g|² + Var), Var from the gradients of ``shares`` equal parts of the groups."""

    shares: int = number(4, least=2, why="a variance needs two")

    def side_losses(
        self, weight: Field, rho: Field, gated: Field, adv: Field, view: MicroBatchView
    ) -> Mapping[str, Tensor]:
        gain = (weight * (gated * adv)).at(TOKEN)
        part = view.batch.group.at(TOKEN).x % self.shares
        return {str(k): self.shares * gain.x[part == k].sum() for k in range(self.shares)}

    def scales(self, view: MicroBatchView, side_gradients: Mapping[str, Grads]) -> Scales:
        nonzero = [g for g in side_gradients.values() if norm(g)]
        if len(nonzero) < 2:
            return Scales()
        mean = [torch.stack(parts).mean(0) for parts in zip(*nonzero)]
        noise = sum(norm([a - b for a, b in zip(g, mean)]) ** 2 for g in nonzero) / len(nonzero) / (len(nonzero) - 1)
        signal = norm(mean) ** 2
        return Scales(rate=signal / (signal + noise) if signal + noise else 1.0)


def oblr_po(clip: float = 0.2, shares: int = 4) -> Recipe:
    """OBLR-PO: minimum-variance baseline, and a learning rate scaled by the signal-to-noise ratio of the gradient.

    b* = Σ n²R / Σ n², n = ‖∇ log π(y)‖;  lr ← lr |g|²/(|g|² + Var)

    Paper: Optimal Baseline and Learning-Rate Policy Optimization, arXiv 2511.23310.
    Settings: constants not found.
    Deviation: the noise is estimated from the gradients of equal shares of the groups."""
    credit, gradient = MinimumVarianceBaseline(), ScaleBySignalToNoise(shares)
    return Recipe(advantage=credit, gate=Clip(clip, clip), aggregate=Sum(TRAJECTORY), gradient=gradient)


class ProximalClip(Gate):
    """Clip to c ± eps, c = sg[π_prox/μ]: off-policy data get a window centred on the policy at the batch's start."""

    reads = frozenset({Signal.PROXIMAL})
    eps: float = 0.2

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        centre = mismatch(view, TOKEN).exp()
        return clipped(rho, adv, centre - self.eps, centre + self.eps)


class StepSchedule(Schedule):
    """scale · max(1 − drop ⌈(t − from)₊ / every⌉, floor), or ``scale`` minus that with ``complement``:
    two of them shift the weight from one reference policy to another in steps."""

    scale: float
    begin: int = 50
    every: int = 10
    drop: float = 0.1
    floor: float = 0.5
    complement: bool = False

    def at(self, t: float) -> float:
        share = max(1 - self.drop * math.ceil(max(t - self.begin, 0) / self.every), self.floor)
        return self.scale * (1 - share if self.complement else share)


def remix(
    clip: float = 0.2, weight: float = 1e-3, begin: int = 50, share: float = 0.4, window: int = 2, reset: int = 50
) -> Recipe:
    """ReMix: replays the last batches, clipped around the policy at batch start; then resets the reference and ends the replay.

    clip(ρ, c ± eps), c = sg[π_k/μ];  λₜ KL(π‖base) + (1 − λₜ) KL(π‖π_{k−1}),  λₜ = max(1 − 0.1⌈(t − 50)₊/10⌉, 0.5)

    Paper: Squeeze the Soaked Sponge: Efficient Off-policy RFT for LLMs, arXiv 2507.06892.
    Settings: two passes, window of 2 policies, replay share 0.4, reset at batch 50 or 100 (0: never), eps 0.2.
    Deviation: a step has all of its fresh groups and so many past ones that they are the replay share of it; no entropy bonus."""
    old = KL("k2", to=Signal.PREVIOUS)
    return Recipe(
        advantage=Standardise(),
        gate=ProximalClip(clip),
        aggregate=Mean(TOKEN),
        penalties=(
            WeightedPenalty(StepSchedule(weight, begin), ResetReference(KL("k2"), reset)),
            WeightedPenalty(StepSchedule(weight, begin, complement=True), old),
        ),
        control=Passes(epochs=2),
        replay=PastBatches(share, window, reset),
    )


class AccuracyWeight(Weight):
    """scale · (1 + tanh(mean reward of the step)) / 2: the more often the policy succeeds, the closer it is held."""

    scale: float = number(least=0)

    def __call__(self, view: StepView) -> Field:
        accuracy = view.batch.reward.sum(TRAJECTORY).mean(BATCH).to(torch.float64)
        return self.scale * (1 + accuracy.map(torch.tanh)) / 2


def fg_expo(beta: float = 0.02, clip: float = 0.2, pool: int = 1024, keep: float = 0.9, width: float = 0.35) -> Recipe:
    """FG-ExPO: a KL weight that grows with the accuracy of the step, and tasks drawn around a success rate of one half.

    J = J_clip − β ½(1 + tanh R̄) k3(π‖π_ref), R̄ the mean reward;  Pr[task] ∝ exp(−(p − ½)²/(2·width²))

    Paper: Frontier-Guided Exploration-Prioritized Policy Optimization, arXiv 2605.11403.
    Settings: beta 0.02, keep 0.9 (of the success rate p at each visit), width 0.35, group of 8.
    Deviation: a step of several mini-batches takes the mean reward of each of them."""
    penalty, sampler = WeightedPenalty(AccuracyWeight(beta), KL("k3")), GaussianFrontier(pool, keep, width)
    return Recipe(advantage=Standardise(), gate=Clip(clip, clip), penalties=(penalty,), sampler=sampler)


PREDICTED = (Signal.PREDICTED_LOGP_CHANGE, Signal.PREDICTED_LOGIT_SQUARE, Signal.PREDICTED_LOGIT_MEAN)


class SmallPredictedChange(Mask):
    """Tokens whose next update, to second order in the output layer, changes objective and policy only a little.

    m_H = A²s₁ + ½A·A²(s₁² − s₂ + s₃²),  m_F = ½A²s₁²;  kept where |m_H| < objective and m_F < policy.
    s₁ = Σv²q, s₂ = Σπv²q², s₃ = Σπvq with v = onehot − π, q = lr·P·h² (P the optimiser's preconditioner)."""

    reads_before_step = frozenset(PREDICTED)
    objective: float = 1e-2
    policy: float = 1e-4

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        s1, s2, s3 = (view[s] for s in PREDICTED)
        a2 = adv * adv
        gain = a2 * s1 + 0.5 * adv * a2 * (s1 * s1 - s2 + s3 * s3)
        return (gain.abs() < self.objective) & (0.5 * a2 * s1 * s1 < self.policy)


def capo(objective: float = 5.0, policy: float = 5.0, clip: float = 0.2) -> Recipe:
    """CAPO (curvature): masks tokens whose predicted second-order change of objective or policy is too large.

    kept where |m_H| < objective and m_F < policy: second-order predictions from the last layer and the optimiser's state

    Paper: Stabilizing Policy Gradients for Sample-Efficient RL in LLM Reasoning, arXiv 2510.00819.
    Settings: on GRPO 1e-2 and 1e-4 at a learning rate of 1.5e-5; fewer than 8 % of tokens are dropped.
    Deviation: thresholds for tiny models at 3e-4 (about one token in twenty is dropped; the authors' would drop half); the
    whole vocabulary instead of its top 50; the learner's own second moments, held above their mean, instead of shadow ones."""
    return Recipe(advantage=Standardise(), gate=Clip(clip, clip), keep=SmallPredictedChange(objective, policy))


class LastTurnFirst(Control):
    """One step for each turn index, from the last to the first; the credit of earlier turns is multiplied by how far the
    later ones moved: Mₖ₋₁ = Mₖ · π_new(turn k)/μ(turn k), by the geometric mean over the turn's tokens.

    Turns are treated as agents updated one after another, so each update accounts for the later ones. Turns from index
    ``turns`` − 1 on are updated together."""

    turns: int = number(10, least=1)

    @property
    def updates(self) -> int:
        return self.turns

    def optimizer_steps(self, batch: Batch, seed: int, measure: Measure) -> Iterator[Batch]:
        index = batch.tree.index(TURN, TRAJECTORY).clamp(high=self.turns - 1)
        credit = batch[Column.ADVANTAGE]
        credit = credit.mean(TRAJECTORY) if credit.level < TRAJECTORY else credit
        for k in range(int(index.x.max()) if index.x.numel() else -1, -1, -1):
            here = index.map(lambda x: x == k)  # noqa: B023
            yield batch.put(advantage=credit, updated_turns=here)
            if k:
                logp = measure(batch, frozenset({Signal.LOGP}))[Signal.LOGP]
                step = (logp - behaviour(batch)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).mean(TURN)
                credit = credit * where(here, step, 0.0).sum(TRAJECTORY).exp()


def see_upo(clip: float = 0.2, beta: float = 0.002, turns: int = 10) -> Recipe:
    """SeeUPO: updates the turns one after another, last turn first, with turn-level ratios; no critic, no group std.

    for k = K … 1: J_k = mean of min(s_k M_k, clip(s_k)M_k) over turn k only;  M_{k−1} = M_k · π_new(k)/π_old(k)

    Paper: SeeUPO: Sequence-Level Agentic-RL with Convergence Guarantees, arXiv 2602.06554.
    Settings: up to 10 turns, clip 0.2, KL 0.002, G 8.
    Deviation: the ratio of a turn is its geometric mean (the theory's product is numerically unsafe)."""
    return Recipe(
        advantage=DivideByBatchStd(Standardise(scale=False)),
        ratio=Importance(TURN),
        gate=Clip(clip, clip),
        penalties=(WeightedPenalty(beta, KL("k3")),),
        control=LastTurnFirst(turns),
    )
