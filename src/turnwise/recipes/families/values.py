"""Values of tokens that learn, rank or steer, and a behaviour policy that corrects what was sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from turnwise.algebra.aggregate import Mean
from turnwise.algebra.control import CriticsFirst
from turnwise.algebra.penalty import KL, Penalty, WeightedPenalty
from turnwise.algebra.piece import MicroBatchView, StepView
from turnwise.algebra.ratio import Importance, OnPolicy
from turnwise.algebra.value import Constant, is_last, token_reward
from turnwise.core.batch import Batch
from turnwise.core.levels import TOKEN, TRAJECTORY, Field
from turnwise.core.limits import number
from turnwise.core.signals import Signal
from turnwise.maths import returns
from turnwise.maths.lazy_torch import torch
from turnwise.recipes.families.actor_critic import ppo
from turnwise.recipes.recipe import Kind, Recipe
from turnwise.rollout.strategies import CorrectedSampling, SamplingCorrection, ValueSteered

KIND = Kind.OBJECTIVE

NEVER = 1_000_000_000  # batches


def following(value: Field, batch: Batch) -> Field:
    """For each token the value at the next token of its trajectory, 0 after the last one."""
    return value.map(lambda x: torch.where(is_last(batch, TOKEN), 0.0, torch.roll(x, -1)))


class ConservativeQError(Penalty):
    """(Q − r − γ Q̄(s′, a*))², Q(s, a) = α (log π(a) − max log π) + V(s), a* the token that the reference would take at s′;
    the bar: before the batch. The policy of Q at temperature α is π itself.

    ``ranks_by`` and ``rank`` order finished answers by Σ Q(s, a) − γ V(s′), the rewards that Q implies."""

    reads = frozenset({Signal.VALUE, Signal.MODE_LOGP, Signal.OLD_VALUE, Signal.REFERENCE_MODE_GAP})
    ranks_by = frozenset({Signal.LOGP, Signal.MODE_LOGP, Signal.VALUE})
    alpha: float = number(1.0, above=0, why="the temperature of Q")
    gamma: float = number(1.0, least=0, most=1)

    def plan(self, view: StepView) -> dict[object, Field]:
        batch = view.batch
        after = following(self.alpha * batch[Signal.REFERENCE_MODE_GAP] + batch[Signal.OLD_VALUE], batch)
        return {self: token_reward(batch).to(after.x.dtype) + self.gamma * after}

    def __call__(self, view: MicroBatchView) -> Field:
        return (self.q(view) - view[self]) ** 2

    def q(self, view: MicroBatchView | Mapping[Signal, Field]) -> Field:
        return self.alpha * (view[Signal.LOGP] - view[Signal.MODE_LOGP]) + view[Signal.VALUE]

    def rank(self, batch: Batch) -> Field:
        """Of several answers the one with the largest number is to be taken. At TRAJECTORY."""
        after = following(batch[Signal.VALUE], batch)
        return (self.q(batch.columns) - self.gamma * after).sum(TRAJECTORY)


def b_coder(
    alpha: float = 0.02, gamma: float = 1.0, imitation: float = 0.001, passes: int = 5, warm: int = 12
) -> Recipe:
    """B-Coder: Q from the policy's logits and a value head; learns by the Bellman operator of a fixed policy; Q ranks answers.

    Q(s, a) = α (log π(a) − max log π) + V(s) → r + γ Q̄(s', a*), a* = argmax π_ref(s');  + imitation · KL(π‖π_ref), k3;
    rank of an answer: Σ Q(s, a) − γ V(s')

    Paper: B-Coder: Value-Based Deep Reinforcement Learning for Program Synthesis, arXiv 2310.03173.
    Settings: all are ours. The value is fitted alone on the first ``warm`` batches, the policy fixed, and by ``passes`` steps
    before each later one; --critic separate fits it faster. The policy of Q at temperature alpha is the model itself, so alpha
    times a gap of log-probabilities (up to 20) must stay within the range of the returns, here 1. imitation acts against alpha².
    With --eval-samples 2 or more, evaluations report the success of the answer that Q ranks first (reranked_success).
    Deviation: the paper's cross-entropy to the model is k3, which has its gradient on the policy's samples; the values of the
    target are those before the batch, not a slow copy's; data are the run's own rollouts, one pass each."""
    return Recipe(
        advantage=Constant(0.0), ratio=OnPolicy(), aggregate=Mean(TOKEN),
        penalties=(WeightedPenalty(1.0, ConservativeQError(alpha, gamma)), WeightedPenalty(imitation, KL())),
        control=CriticsFirst(passes, warm),
    )  # fmt: skip


class ActionValueError(Penalty):
    """½ (Q − G)², Gₜ = rₜ + γ ((1 − λ) Q̄ₜ₊₁ + λ Gₜ₊₁) over the sampled tokens of a trajectory; Q̄: the value before the batch."""

    reads = frozenset({Signal.ACTION_VALUE, Signal.OLD_ACTION_VALUE})
    gamma: float = number(1.0, least=0, most=1)
    lam: float = number(0.95, least=0, most=1)

    def plan(self, view: StepView) -> dict[object, Field]:
        batch, old = view.batch, view.batch[Signal.OLD_ACTION_VALUE]
        last = is_last(batch, TOKEN)
        r = token_reward(batch).to(old.x.dtype) + self.gamma * (1 - self.lam) * following(old, batch)
        return {self: r.map(lambda x: returns.discounted(x, self.gamma * self.lam, last))}

    def __call__(self, view: MicroBatchView) -> Field:
        return 0.5 * (view[Signal.ACTION_VALUE] - view[self]) ** 2


def vas(
    beta: float = 3.0,
    candidates: int = 20,
    gamma: float = 1.0,
    lam: float = 0.95,
    passes: int = 2,
    steered_rollouts: bool = False,
) -> Recipe:
    """VAS: the policy stays as it is; a value of each token learns from its samples, and steers its decoding.

    Q → Gₜ = rₜ + γ ((1 − λ) Q̄ₜ₊₁ + λ Gₜ₊₁);  logit'(a) = logit(a) + β (Q(s, a) − mean over the top k) for the k likeliest tokens

    Paper: Value Augmented Sampling for Language Model Alignment and Personalization, arXiv 2405.06639.
    Settings: beta 3, candidates 20, gamma 1, lambda 0.95, 2 passes. Evaluations are steered; with steered_rollouts rollouts
    are, too.
    Deviation: Q(s, a) is a linear head of the frozen policy's states with an output for each token, where the paper's V(s∘a) is
    a model of its own that reads the token."""
    return Recipe(
        advantage=Constant(0.0), ratio=OnPolicy(), aggregate=Mean(TRAJECTORY),
        penalties=(WeightedPenalty(1.0, ActionValueError(gamma, lam)),),
        control=CriticsFirst(passes, NEVER), strategy=ValueSteered(beta, candidates, steered_rollouts),
    )  # fmt: skip


def props(
    clip: float = 0.2,
    gamma: float = 0.99,
    lam: float = 0.95,
    value_clip: float = 0.5,
    value_weight: float = 1.0,
    wave: int = 2,
    limit: float = 0.3,
    divergence: float = 0.01,
    fits: int = 16,
    rate: float = 3.0,
) -> Recipe:
    """PROPS: PPO on rollouts of a behaviour policy that leans away from what the group has drawn too often.

    φ ← θ, then min over φ of mean max(g, clip(g, 1 ± limit)), g = π_φ/π_θ, until mean(g − 1 − log g) > divergence;
    PPO as if on-policy: ρ = π/π_old, π_old the policy before the update and not φ

    Paper: On-Policy Policy Gradient Reinforcement Learning Without On-Policy Sampling, arXiv 2311.08290.
    Settings: limit 0.3, divergence 0.01, 16 fits, PPO with clip 0.2. A fit every 16 environment steps (here every 2 rollouts of a
    task) with Adam at 1e-3 (here plain steps of rate 3 on a table).
    Deviation: φ is a table of logit shifts for the tokens drawn after each prefix of a task's rollouts; the buffer is the group,
    no older batches."""
    away = CorrectedSampling(wave, SamplingCorrection(limit, divergence, fits, rate))
    return replace(ppo(clip, gamma, lam, value_clip, value_weight), ratio=Importance(proximal=True), strategy=away)
