"""Actor-critic methods: a value head estimates the return before each token."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from turnwise.algebra.advantage import Whiten
from turnwise.algebra.aggregate import Mean
from turnwise.algebra.control import Passes
from turnwise.algebra.gate import Clip, RatioRegression
from turnwise.algebra.gradient import DivideByClippingBias
from turnwise.algebra.penalty import KL, ClippedValueLoss, Penalty, Weight, WeightedPenalty
from turnwise.algebra.piece import MicroBatchView, State, StepView
from turnwise.algebra.ratio import LOG_RATIO_LIMIT, Importance, PerToken
from turnwise.algebra.reward import NegativeReferenceKL, OnLastToken, RunningNormalised
from turnwise.algebra.term import Term
from turnwise.algebra.value import GAE, LambdaReturn, Measured, Outcome, ReturnToGo
from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, TOKEN, TRAJECTORY, TURN, Field, where
from turnwise.core.limits import number
from turnwise.core.records import Group, Limit, Stop
from turnwise.core.signals import Signal
from turnwise.core.stateful import remember
from turnwise.maths.divergences import k2
from turnwise.maths.lazy_torch import torch
from turnwise.recipes.recipe import Kind, Recipe
from turnwise.rollout.guidance import Growing, Guidance, LiveGuidance
from turnwise.rollout.strategies import GroupRequest, Strategy
from turnwise.rollout.support import Support
from turnwise.tasks.samplers import Begun

KIND = Kind.OBJECTIVE


def ppo(
    clip: float = 0.2,
    gamma: float = 1.0,
    lam: float = 0.95,
    value_clip: float = 0.5,
    value_weight: float = 1.0,
    dual: float | None = None,
) -> Recipe:
    """PPO: GAE from a value head over the sampled tokens of all turns, clipped token ratio, clipped value loss.

    J = 1/N Σₜ min(ρₜAₜ, clip(ρₜ, 1±clip)Aₜ) − c ½ 1/N Σₜ max((v−G)², (clip(v, v_old±value_clip)−G)²)

    Paper: Proximal Policy Optimization Algorithms, arXiv 1707.06347; dual clip from arXiv 1912.09729.
    Settings: clip 0.2, gamma 1, lambda 0.95 to 1, value clip 0.5, advantages whitened over the batch, dual clip 3 or off."""
    return Recipe(
        advantage=Whiten(GAE(gamma, lam)),
        gate=Clip(clip, clip, dual),
        aggregate=Mean(TOKEN),
        penalties=(WeightedPenalty(value_weight, ClippedValueLoss(LambdaReturn(gamma, lam), value_clip), Mean(TOKEN)),),
        control=Passes(minibatches=4),
    )


def turn_ppo(
    clip: float = 0.2, gamma: float = 1.0, lam: float = 1.0, value_clip: float = 0.5, value_weight: float = 1.0
) -> Recipe:
    """Turn-PPO: PPO with turn-level importance ratios; each token keeps its own advantage.

    wᵏ = exp( 1/nₖ Σ_{t∈turn k} log ρₜ );  wₜ = sg[wᵏ] · πₜ/sg[πₜ];  J = mean over trajectories of 1/|y| Σₜ clipped(wₜ, Aₜ)

    Paper: ST-PPO: Stabilized Off-Policy PPO for Multi-Turn Agents Training, arXiv 2511.20718 (its first ingredient).
    Settings: clip 0.2, gamma and lambda 1, several epochs of mini-batches.
    Deviation: the paper leaves open whether the turn ratio is differentiated as a whole; here each token has its own gradient."""
    tokens = ppo(clip, gamma, lam, value_clip, value_weight)
    return replace(tokens, ratio=PerToken(Importance(TURN)), aggregate=Mean(TRAJECTORY))


def st_ppo(
    clip: float = 0.2,
    gamma: float = 1.0,
    lam: float = 1.0,
    value_clip: float = 0.5,
    value_weight: float = 1.0,
    floor: float = 1.0,
) -> Recipe:
    """ST-PPO: Turn-PPO with gradients divided by the norm of the clipped part (clipping-bias correction).

    wₜ = sg[wᵏ] · πₜ/sg[πₜ];  C = ∇ of the clipped part;  g = ∇J_clip / max(‖C‖, floor), unchanged where nothing is clipped

    Paper: ST-PPO: Stabilized Off-Policy PPO for Multi-Turn Agents Training, arXiv 2511.20718.
    Settings: clip 0.2, gamma and lambda 1, several epochs of mini-batches.
    Deviation: the floor is ours (with 1 the gradient only ever shrinks); each token has its own gradient inside a turn."""
    return replace(turn_ppo(clip, gamma, lam, value_clip, value_weight), gradient=DivideByClippingBias(floor))


def s_ppo(
    clip: float = 0.2,
    gamma: float = 1.0,
    lam: float = 1.0,
    value_clip: float = 0.5,
    value_weight: float = 1.0,
    floor: float = 1.0,
) -> Recipe:
    """S-PPO: token-level PPO with gradients divided by the norm of the clipped part (clipping-bias correction).

    C = ∇ of the clipped part;  g = ∇J_clip / max(‖C‖, floor), unchanged where nothing is clipped

    Paper: ST-PPO: Stabilized Off-Policy PPO for Multi-Turn Agents Training, arXiv 2511.20718 (its second ingredient).
    Settings: clip 0.2, gamma and lambda 1, several epochs of mini-batches.
    Deviation: the floor is ours."""
    tokens = ppo(clip, gamma, lam, value_clip, value_weight)
    return replace(tokens, aggregate=Mean(TRAJECTORY), gradient=DivideByClippingBias(floor))


class ValueRegression(Penalty):
    """Interface: the error of value heads against ``target``, which is planned."""

    target: Term

    def plan(self, view: StepView) -> dict[object, Field]:
        return {self: self.target(view.batch).at(TOKEN)}


class SquaredValueError(ValueRegression):
    """(v − G)²: regression of the value head without a clip."""

    reads = frozenset({Signal.VALUE})

    def __call__(self, view: MicroBatchView) -> Field:
        return (view[Signal.VALUE] - view[self]) ** 2


class MedianValueError(ValueRegression):
    """softplus(G − u) − ½(G − u): the second head learns a soft median of the return."""

    reads = frozenset({Signal.SECOND_VALUE})

    def __call__(self, view: MicroBatchView) -> Field:
        x = view[self] - view[Signal.SECOND_VALUE]
        return x.map(torch.nn.functional.softplus) - 0.5 * x


def bpo(
    eps: float = 0.3,
    softness: float = 1e-3,
    value_weight: float = 0.5,
    median_weight: float = 0.5,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> Recipe:
    """BPO: regresses the ratio onto a bounded target, 1 ± eps by the sign of Q − median, instead of clipping.

    ρ* = 1 − eps + 2 eps σ((Q − U)/softness);  L = |ρ − ρ*| |Q − V| + ½(V − Q)² + ½(softplus(Q − U) − ½(Q − U))

    Paper: Bounded Ratio Reinforcement Learning, arXiv 2604.18578.
    Settings: softness 1e-3, eps 0.3, gradient clip 1.
    Deviation: no entropy term; Q is the lambda-return."""
    q = LambdaReturn(gamma, lam)
    return Recipe(
        advantage=GAE(gamma, lam),
        gate=RatioRegression(LambdaReturn(gamma, lam) - Measured(Signal.OLD_SECOND_VALUE), softness, eps, eps),
        aggregate=Mean(TOKEN),
        penalties=(
            WeightedPenalty(value_weight, SquaredValueError(q)),
            WeightedPenalty(median_weight, MedianValueError(q)),
        ),
        control=Passes(minibatches=4),
    )


@dataclass
class _Windows(LiveGuidance):
    # by task key: of each unfinished episode its id and the ids of its turns, the last one up to where it was cut
    left: dict[str, list[list[Any]]] = field(default_factory=dict)
    saved = ("counts", "left")

    def begin(self, request: GroupRequest, strategy: Strategy) -> Growing:
        request = replace(request, play=partial(request.play, max_tokens=self.rule.length))
        begun = self.left.get(request.task.key, [])[: request.size]
        if not begun:
            return strategy.begin(request)
        supports = [Support(taken=tuple(map(tuple, turns)), name=name) for name, turns in begun]
        plain: list[dict[str, Any]] = [{}] * (request.size - len(begun))
        played = request.play_each(request.sessions(), [*({"support": s} for s in supports), *plain])

        async def grown() -> Group:
            return request.grown(await played)

        return grown()

    def observe(self, group: Group) -> None:
        before = {f"continues {name}": turns for name, turns in self.left.pop(group.task.key, [])}
        known = (t for t in group.trajectories if not t.guidance or t.guidance in before)
        unfinished = [t for t in known if t.limit == Limit.TOKENS]
        self.count("windows", len(group.trajectories))
        self.count("windows_cut", len(unfinished))
        left = []
        for t in unfinished:
            *whole, start = before.get(t.guidance, [[]])
            first, *later = (list(turn.tokens) for turn in t.turns)
            # a window that ended with a turn begins the next one
            rest: list[list[int]] = [] if t.turns[-1].stop == Stop.WINDOW else [[]]
            left.append([t.id, [*whole, [*start, *first], *later, *rest]])
        if left:
            remember(self.left, group.task.key, left)


class Windows(Guidance):
    """An episode ends after ``length`` sampled tokens, inside a turn if need be. When its task comes back (``Begun``), the group
    goes on from there under the present policy: what was sampled before is played again and is context, so each token is
    trained on once. Places of finished episodes begin at the prompt."""

    live = _Windows
    length: int = number(32, least=1)


def t_ppo(
    clip: float = 0.2, gamma: float = 1.0, lam: float = 0.95, value_weight: float = 1.0, window: int = 32
) -> Recipe:
    """T-PPO: episodes are trained on by windows; what is cut bootstraps from the critic and goes on in the next step.

    unfinished: V(s_l) := V(s_{l−1}) in GAE;  critic: Monte-Carlo returns of finished episodes

    Paper: Truncated Proximal Policy Optimization, arXiv 2506.15050.
    Settings: clip 0.2; windows of 8k of 24k tokens (recalled).
    Deviation: the critic learns from the last window of a finished episode, not from all its tokens: those before are context. A
    group comes back as a whole, and the places of its finished episodes begin again. Advantages not whitened. Write window=8192
    or so for answers of thousands of tokens."""
    target = ReturnToGo(gamma, TOKEN)
    return Recipe(
        sampler=Begun(),
        guidance=Windows(window),
        advantage=GAE(gamma, lam, bootstrap=True),
        gate=Clip(clip, clip),
        aggregate=Mean(TOKEN),
        penalties=(WeightedPenalty(value_weight, ClippedValueLoss(target, math.inf, finished=True)),),
    )


def ppo_max(
    eta: float = 0.05,
    clip: float = 0.2,
    gamma: float = 1.0,
    lam: float = 0.95,
    value_clip: float = 0.5,
    value_weight: float = 1.0,
    limit: float = 10.0,
    centre: bool = True,
) -> Recipe:
    """PPO-max: PPO with the reward normalised by its running mean and std, clipped, and a k1 KL in the reward.

    R ← clip((R − mean)/std, ±limit);  rₜ = R·1[last] − η (log π_old − log π_ref);  GAE, clip, value clip

    Paper: Secrets of RLHF in Large Language Models Part I: PPO, arXiv 2307.04964.
    Settings: eta 0.05, gamma 1, lambda 0.95, clip 0.2. centre=False is the released script: it only divides by the std.
    Deviation: the critic starts from the policy's states, not from a reward model; no language-model loss in addition."""
    return Recipe(
        advantage=Whiten(GAE(gamma, lam)),
        gate=Clip(clip, clip),
        aggregate=Mean(TOKEN),
        reward=OnLastToken(RunningNormalised(limit, centre)) + eta * NegativeReferenceKL(),
        penalties=(WeightedPenalty(value_weight, ClippedValueLoss(LambdaReturn(gamma, lam), value_clip)),),
    )


class TwoHeadValueError(ValueRegression):
    """Huber error of two value heads against the outcome, the larger of v and of v clipped around its old value."""

    reads = frozenset({Signal.VALUE, Signal.OLD_VALUE, Signal.SECOND_VALUE, Signal.OLD_SECOND_VALUE})
    clip: float = 0.2
    delta: float = 0.5

    def __call__(self, view: MicroBatchView) -> Field:
        def huber(x: Field) -> Field:
            return where(x.abs() <= self.delta, 0.5 * x * x, self.delta * (x.abs() - 0.5 * self.delta))

        def head(new: Signal, old: Signal) -> Field:
            near = view[old] + (view[new] - view[old]).clamp(-self.clip, self.clip)
            return huber(view[new] - view[self]).maximum(huber(near - view[self]))

        return head(Signal.VALUE, Signal.OLD_VALUE) + head(Signal.SECOND_VALUE, Signal.OLD_SECOND_VALUE)


class SoftMinValue(Term):
    """V = −a (logsumexp(−v/a) − log 2) of two value heads, before the first token of a trajectory: between min and mean."""

    reads = frozenset({Signal.OLD_VALUE, Signal.OLD_SECOND_VALUE})
    temperature: float = number(0.5, above=0)

    def __call__(self, batch: Batch) -> Field:
        first = where(batch.tree.index(TOKEN, TRAJECTORY) < 1, 1.0, 0.0)
        values, a = (batch[Signal.OLD_VALUE], batch[Signal.OLD_SECOND_VALUE]), self.temperature
        heads = [(v * first.to(v.x.dtype)).sum(TRAJECTORY) for v in values]
        stacked = torch.stack([-h.x / a for h in heads])
        return heads[0].map(lambda _: -a * (torch.logsumexp(stacked, 0) - torch.log(stacked.new_tensor(2.0))))


class KLController(Weight):
    """c (K − θ) max(½, 2/(H + 0.1)) once the smoothed KL K exceeds θ, else 0. A PID controller sets θ from the
    reward's velocity: a rising reward allows more KL, a stalling one less; low entropy makes the weight larger."""

    reads_before_step = frozenset({Signal.LOGP, Signal.ENTROPY})
    reads = frozenset({Signal.REFERENCE})
    penalty: float = 0.1
    gains: tuple[float, float, float] = (0.3, 0.01, 0.05)
    goal: float = 1e-3  # target reward velocity
    warmup: int = 10

    def initial_state(self) -> State:
        return {"kl": 0.0, "reward": 0.0, "error": 0.0, "integral": 0.0, "threshold": 0.3, "steps": 0.0}

    def next_state(self, state: State, view: StepView) -> State:
        first = state["steps"] == 0
        reward = float(view.batch.reward.sum(TRAJECTORY).mean(BATCH).item)
        smooth = reward if first else 0.95 * state["reward"] + 0.05 * reward
        velocity = 0.0 if first else smooth - state["reward"]
        error = velocity - self.goal
        integral = min(1.0, max(-1.0, state["integral"] + error))
        # looser while the run warms up or climbs, stricter on a plateau
        phase = 1.5 if state["steps"] < self.warmup else 1.2 if velocity > self.goal else 0.8
        kp, ki, kd = self.gains
        free = 0.3 + kp * error + ki * integral + kd * (error - state["error"])
        bound = min(0.6, max(0.1, free * phase))
        x = (view[Signal.REFERENCE] - view.logp).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        kl = float(x.map(k2).mean(BATCH).item)
        smooth_kl = kl if first else 0.9 * state["kl"] + 0.1 * kl
        state_now = {"kl": smooth_kl, "reward": smooth, "error": error, "integral": integral, "threshold": bound}
        return {**state_now, "steps": state["steps"] + 1}

    def __call__(self, view: StepView) -> Field:
        entropy = view[Signal.ENTROPY].mean(BATCH).to(torch.float64)
        over = view[self, "kl"] - view[self, "threshold"]
        strict = (2 / (entropy + 0.1)).clamp(low=0.5)
        return where(over > 0, self.penalty * over * strict, 0.0)


def safe(
    clip: float = 0.2,
    softness: float = 0.5,
    penalty: float = 0.1,
    value_weight: float = 0.5,
    huber: float = 0.5,
    value_clip: float = 0.2,
) -> Recipe:
    """SAFE: soft minimum of twin critics, and an adaptive KL controller whose threshold follows the reward.

    A = whiten(R − softmin(V₁, V₂));  guard: c (K − θ) max(½, 2/(H+0.1)) · KL once the smoothed KL K exceeds θ

    Paper: SAFE: Stable Alignment Finetuning with Entropy-Aware Predictive Control for RLHF, arXiv 2602.04651.
    Settings: softness 0.5, Kp 0.3, Ki 0.01, Kd 0.05, threshold within 0.1 to 0.6, Huber 0.5.
    Deviation: the released penalty carries no gradient; here one factor of its square is the differentiable KL (k2). V is
    the value before the first token. The predictive look-ahead is left out; heads have no LayerNorm."""
    return Recipe(
        advantage=Whiten(Outcome() - SoftMinValue(softness)),
        gate=Clip(clip, clip),
        aggregate=Mean(TOKEN),
        penalties=(
            WeightedPenalty(value_weight, TwoHeadValueError(Outcome(), value_clip, huber)),
            WeightedPenalty(KLController(penalty), KL("k2")),
        ),
    )
