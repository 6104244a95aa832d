"""Entropy control: preserve the entropy, distribute credit by it, or keep it in a band."""

from __future__ import annotations

import math

from turnwise.algebra.advantage import Standardise
from turnwise.algebra.aggregate import Mean
from turnwise.algebra.control import Passes
from turnwise.algebra.gate import Clip, Factor, Gate, ScoreFunction, clipped
from turnwise.algebra.mask import Mask
from turnwise.algebra.penalty import KL, Penalty, Schedule, WeightedPenalty
from turnwise.algebra.piece import MicroBatchView, Piece, State, StepView
from turnwise.algebra.ratio import behaviour, moved
from turnwise.algebra.reward import EnvironmentReward, PaidAtEnd
from turnwise.algebra.term import Term
from turnwise.algebra.value import Outcome, SpreadTo
from turnwise.core.batch import Batch
from turnwise.core.columns import Column
from turnwise.core.levels import BATCH, GROUP, TOKEN, TRAJECTORY, TURN, Field, Partition, where
from turnwise.core.limits import choice, number
from turnwise.core.signals import Signal
from turnwise.credit.fact import Fact
from turnwise.credit.selectors import GateBySelector, Unguided
from turnwise.maths.lazy_torch import torch
from turnwise.recipes.families.turn_credit import SameTask
from turnwise.recipes.recipe import Kind, Recipe
from turnwise.recipes.signatures import suggests
from turnwise.rollout.strategies import ENTROPY_SCALE, EntropyControl, EntropyTemperature
from turnwise.rollout.strategies.tree import PRUNED, BranchRule, ConfidenceTree
from turnwise.tasks.admission import Spread

KIND = Kind.OBJECTIVE


def quota(fraction: float, tokens: Field) -> int:
    """The number of tokens of a fraction: 0 for 0, otherwise at least one."""
    return max(1, int(fraction * tokens.x.numel())) if fraction else 0


def covariance(view: StepView) -> Field:
    """(A − mean A)(log π − mean log π) of each token, means over the step: the covariance that lowers the entropy."""
    a, logp = view.advantage.at(TOKEN), view.logp.detach()
    return (a - a.mean(BATCH)) * (logp - logp.mean(BATCH))


class CovarianceClip(Mask):
    """All but a few tokens, drawn at random among those whose (A − mean A)(log π − mean log π) is in (low, high)
    and which a clip of ``clip_low``, ``clip_high`` would not mask anyway."""

    reads_before_step = frozenset({Signal.LOGP})
    fraction: float = 2e-4
    low: float = 1.0
    high: float = 5.0
    clip_low: float = 1.0
    clip_high: float = 1.0

    def plan(self, view: StepView) -> dict[object, Field]:
        adv, rho = view.advantage.at(TOKEN), view.ratio.at(TOKEN)
        cov = covariance(view)
        clipped = ((adv > 0) & (rho > 1 + self.clip_high)) | ((adv < 0) & (rho < 1 - self.clip_low))
        candidates = (cov > self.low) & (cov < self.high) & ~clipped
        n = quota(self.fraction, cov)
        draws = torch.where(candidates.x, view.batch.uniform_draws().x, torch.inf)
        drawn = torch.zeros_like(candidates.x).index_fill(0, torch.argsort(draws, stable=True)[:n], True)
        return {self: Field(cov.tree, TOKEN, ~(drawn & candidates.x))}


def clip_cov(
    fraction: float = 2e-4, low: float = 1.0, high: float = 5.0, clip_low: float = 1.0, clip_high: float = 1.0
) -> Recipe:
    """Clip-Cov: masks a small random share of the tokens with high covariance of A and log π, which lower the entropy.

    cov = (A − mean A)(log π − mean log π); fraction of all tokens, with cov in (low, high), is silenced

    Paper: The Entropy Mechanism of RL for Reasoning Language Models, arXiv 2505.22617.
    Settings: fraction 2e-4, window (1, 5), the clip opened to 1/1.
    Deviation: means over the whole step, not the micro-batch."""
    gate = Clip(clip_low, clip_high).where(CovarianceClip(fraction, low, high, clip_low, clip_high))
    return Recipe(advantage=Standardise(), gate=gate, aggregate=Mean(TOKEN), control=Passes(minibatches=4))


class HighestEntropy(Mask):
    """The tokens whose entropy is at least its (1 − share)-quantile over the step: the points where the
    policy decides how to go on."""

    reads_before_step = frozenset({Signal.ENTROPY})
    share: float = number(0.2, above=0, most=1, why="which part of the tokens is trained on")

    def plan(self, view: StepView) -> dict[object, Field]:
        entropy = view[Signal.ENTROPY].detach()
        if not entropy.x.numel():
            return {self: entropy.map(lambda x: x.bool())}
        bound = torch.quantile(entropy.x.double(), 1 - self.share)
        return {self: entropy.map(lambda x: x.double() >= bound)}


def forking_tokens(share: float = 0.2, low: float = 0.2, high: float = 0.28) -> Recipe:
    """Forking tokens: the policy gradient of the tokens with the highest entropy alone.

    no gradient where H < its (1 − share)-quantile over the step; masked tokens still count in the token mean

    Paper: Beyond the 80/20 Rule: High-Entropy Minority Tokens Drive Effective RL for LLM Reasoning, arXiv 2506.01939.
    Settings: share 0.2, clip 0.2/0.28, groups without spread re-sampled, no KL.
    Deviation: without the soft overlong penalty of its runs."""
    gate = Clip(low, high).where(HighestEntropy(share))
    return Recipe(
        advantage=Standardise(), gate=gate, aggregate=Mean(TOKEN), admission=Spread(), control=Passes(minibatches=4)
    )


class HighCovarianceDrift(Penalty):
    """|log π − log μ| on the few tokens with the largest (A − mean A)(log π − mean log π), 0 on the others."""

    reads_before_step = frozenset({Signal.LOGP})
    fraction: float = 2e-3

    def plan(self, view: StepView) -> dict[object, Field]:
        cov = covariance(view)
        n = quota(self.fraction, cov)
        # ties are broken at random, independently of the packing
        shuffled = torch.argsort(view.batch.uniform_draws().x)
        order = shuffled[torch.argsort(cov.x[shuffled].double().round(decimals=9), descending=True, stable=True)]
        return {self: Field(cov.tree, TOKEN, torch.zeros_like(cov.x).index_fill(0, order[:n], 1.0))}

    def __call__(self, view: MicroBatchView) -> Field:
        return view[self] * moved(view).abs()


def kl_cov(fraction: float = 2e-3, beta: float = 1.0) -> Recipe:
    """KL-Cov: a KL penalty on the tokens with the highest covariance of A and log π; no clip.

    J = token mean of ρA − β |log π − log μ| on the top fraction by covariance

    Paper: The Entropy Mechanism of RL for Reasoning Language Models, arXiv 2505.22617.
    Settings: fraction 2e-3 (7B), 2e-4 (32B), beta 1.
    Deviation: means over the whole step, not the micro-batch."""
    penalty = WeightedPenalty(beta, HighCovarianceDrift(fraction))
    return Recipe(advantage=Standardise(), aggregate=Mean(TOKEN), penalties=(penalty,), control=Passes(minibatches=4))


class DampEntropyChange(Factor):
    """Smaller weights for the tokens whose update would change the entropy most.

    Ω = (A/π_old) π (1 − π)(log π + H);  linear: from ``high`` at the smallest |Ω| of the step down to ``low`` at the largest;
    exponential: clip(exp(−k|Ω|), low, 1), k = −ln(low) / max(|Ω|max, 0.02)."""

    reads_before_step = frozenset({Signal.LOGP, Signal.ENTROPY})
    low: float = number(0.8, above=0, most="high")
    high: float = 1.2
    form: str = choice("linear", "exponential")

    def plan(self, view: StepView) -> dict[object, Field]:
        p, old = (x.exp().clamp(low=1e-8) for x in (view.logp, behaviour(view.batch)))
        size = (view.advantage / old * p * (1 - p) * (p.log() + view[Signal.ENTROPY])).abs()
        largest = size.max(BATCH)
        if self.form == "exponential":
            k = -math.log(self.low) / largest.clamp(low=0.02)
            return {self: (-k * size).exp().clamp(self.low, 1.0)}
        smallest, flat = size.min(BATCH), 0.5 * (self.low + self.high)
        share = (size - smallest) / where(largest > smallest, largest - smallest, 1.0)
        return {self: where(largest > smallest, self.high - share * (self.high - self.low), flat)}


def steer(
    least: float = 0.8,
    most: float = 1.2,
    form: str = "linear",
    low: float = 0.2,
    high: float = 0.28,
    dual: float = 10.0,
) -> Recipe:
    """STEER: down-weights tokens whose update would change the entropy most, in either direction.

    Ω = (A/π_old) π(1−π)(log π + H);  L = W(|Ω|) · clipped(ρ, A),  W falls from most to least

    Paper: Rethinking Entropy Interventions in RLVR: An Entropy Change Perspective, arXiv 2510.10150.
    Settings: 0.8 to 1.2 (linear) or 0.8 to 1 (exponential), clip 0.2/0.28, dual 10.
    Deviation: extremes over the whole step, not the micro-batch."""
    gate = Clip(low, high, dual) * DampEntropyChange(least, most, form)
    return Recipe(advantage=Standardise(), gate=gate, aggregate=Mean(TOKEN), control=Passes(minibatches=4))


class NormalisedEntropy(Piece):
    """h = (x − q)/s with x = log H, q its ρ-quantile, s = √mean (x − q)²; each side then scaled to reach ±1."""

    reads = frozenset({Signal.OLD_ENTROPY})
    quantile: float = number(0.8, least=0, most=1)
    told = True

    def initial_state(self) -> State:
        return dict.fromkeys(ENTROPY_SCALE, 0.0)

    def next_state(self, state: State, view: StepView) -> State:
        """The scale on which the next rollouts place their entropies."""
        return dict(zip(ENTROPY_SCALE, self._scale(view[Signal.OLD_ENTROPY].x)))

    def plan(self, view: StepView) -> dict[object, Field]:
        return {self: view[Signal.OLD_ENTROPY].map(self._normalise)}

    def _scale(self, entropy: torch.Tensor) -> tuple[float, ...]:
        """The middle q and the widths above and below it at which |h| is 1, in units of log H; s cancels."""
        x = entropy.double().clamp(min=1e-8).log()
        if not x.numel():
            return (0.0, 0.0, 0.0)
        q = float(x.sort().values[round(self.quantile * (x.numel() - 1))])
        return q, float(x.max()) - q, q - float(x.min())

    def _normalise(self, entropy: torch.Tensor) -> torch.Tensor:
        q, above, below = self._scale(entropy)
        h = entropy.double().clamp(min=1e-8).log() - q
        return torch.where(h > 0, h / max(above, 1e-30), h / max(below, 1e-30))

    @staticmethod
    def bounds(h: Field, low: float, high: float, alpha: float) -> tuple[Field, Field]:
        """Clip bounds: a wider upper one for uncertain tokens, a wider lower one for certain ones."""
        return where(h > 0, low, low * (1 - alpha * h)), where(h > 0, high * (1 + alpha * h), high)


class EntropyClip(Gate):
    """Clip with a wider upper bound for uncertain tokens, high(1 + αh), and a wider lower one for certain ones, low(1 − αh)."""

    entropy: NormalisedEntropy
    alpha: float = 1.0
    low: float = 0.2
    high: float = 0.2
    dual: float | None = 10.0

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        low, high = self.entropy.bounds(view[self.entropy], self.low, self.high, self.alpha)
        return clipped(rho, adv, 1 - low, 1 + high, self.dual)


class EntropyRedistribution(Factor):
    """1 + β h where it applies: uncertain tokens (h > 0) weigh more once their ratio has moved, certain ones
    (h ≤ 0) less while it has not.

    h in [−1, 1] is the normalised entropy; unmoved means ρ inside (1 − low/2, 1 + high/2) of the adapted clip."""

    entropy: NormalisedEntropy
    beta: float = 1.0
    alpha: float = 1.0
    low: float = 0.2
    high: float = 0.2

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        h = view[self.entropy]
        low, high = self.entropy.bounds(h, self.low, self.high, self.alpha)
        at = rho.detach()
        unmoved = (at > 1 - low / 2) & (at < 1 + high / 2)
        applies = where(h > 0, where(unmoved, 0.0, 1.0), where(unmoved, 1.0, 0.0)).to(h.x.dtype)
        return 1 + self.beta * h * applies


class FallbackAboveLimit(Term):
    """``term``; ``fallback`` in every group where some |term| reaches ``limit``."""

    term: Term
    limit: float
    fallback: Term

    def __call__(self, batch: Batch) -> Field:
        a, b = self.term(batch), self.fallback(batch)
        return where(a.abs().max(GROUP) >= self.limit, b, a)


def hapo(
    quantile: float = 0.8,
    alpha: float = 1.0,
    beta: float = 1.0,
    low: float = 0.2,
    high: float = 0.2,
    dual: float = 10.0,
    tau: float = 0.05,
) -> Recipe:
    """HAPO: temperature, clip range and advantage of each token scale with its entropy.

    T(1 + τh) while sampling;  A over all *tokens* of a group;  low·(1 − αh) below and high·(1 + αh) above;  A ← A(1 + βh) where
    it applies

    Paper: From Uniform to Heterogeneous: Tailoring Policy Optimization to Every Token's Nature, arXiv 2509.16591.
    Settings: quantile 0.8, alpha and beta 1, clip 0.2, dual 10, tau 0.05; tau 0 where a server samples.
    Deviation: the paper's intent for low-entropy tokens, not its code (where that branch never fires); entropies before the
    first update. The ratio is to the distribution that was sampled from: the code takes the temperature out of it."""
    entropy = NormalisedEntropy(quantile)
    tokens = Standardise(SpreadTo(TOKEN, Outcome()), correction=0)
    return Recipe(
        advantage=FallbackAboveLimit(tokens, 5.0, Standardise()),
        gate=EntropyClip(entropy, alpha, low, high, dual) * EntropyRedistribution(entropy, beta, alpha, low, high),
        aggregate=Mean(TOKEN),
        admission=Spread(),
        strategy=EntropyTemperature(tau),
        control=Passes(minibatches=4),
    )


class GuidedAdvantage(Term):
    """Unguided trajectories get their z-score among themselves; guided ones get ``alpha`` where their z-score in the
    whole group exceeds ``margin``, else 0."""

    compares_peers = True
    alpha: float = 1.0
    margin: float = 0.05
    eps: float = 1e-6

    def __call__(self, batch: Batch) -> Field:
        outcome, tree = batch.reward.sum(TRAJECTORY), batch.tree
        peers = Partition.by(tree, TRAJECTORY, batch.group, batch.guided)
        score = lambda over: (outcome - outcome.mean(over)) / (outcome.std(over) + self.eps)  # noqa: E731
        within, over_group = score(peers), score(GROUP)
        return where(batch.guided, where(over_group > self.margin, self.alpha, 0.0).to(within.x.dtype), within)


def aepo(
    target: float = 0.5, hot: float = 1.2, cold: float = 0.8, share: float = 0.25, alpha: float = 1.0, clip: float = 0.2
) -> Recipe:
    """AEPO (arbitrary entropy): holds the entropy by imitating successes that are sampled at another temperature.

    ∇J = ∇J_GRPO + α E_{y ~ π^T}[ 1[y beats its group] ∇ log π(y) ], token mean;  T hot where H ≤ target, else cold

    Paper: Arbitrary Entropy Policy Optimization: Entropy Is Controllable in Reinforcement Fine-tuning, arXiv 2510.08141.
    Settings: hot 1.2, cold 0.8, target 0.5 (0.75 best in its sweep), no KL.
    Deviation: the tempered samples are part of each group instead of overwriting the first rows of the batch."""
    gate = GateBySelector(Unguided(), Clip(clip, clip), others=ScoreFunction())
    return Recipe(
        advantage=GuidedAdvantage(alpha),
        gate=gate,
        aggregate=Mean(TOKEN),
        strategy=EntropyControl(target, hot, cold, share),
        control=Passes(minibatches=4),
    )


class NegativeEntropy(Penalty):
    """−H: the entropy bonus, as a cost."""

    reads = frozenset({Signal.ENTROPY})

    def __call__(self, view: MicroBatchView) -> Field:
        return -view[Signal.ENTROPY]


TURNS = 32  # turn indices with their own mean entropy; later turns share the last


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


class DecayingWeight(Schedule):
    """scale · (1 + exp(−rate · t / half)), t batches so far: decays from 2 · scale to scale."""

    scale: float
    half: int = number(50, above=0)
    rate: float = 1.0

    def at(self, t: float) -> float:
        return self.scale * (1 + math.exp(-self.rate * t / self.half))


def epo(
    weight: float = 1e-3,
    alpha: float = 0.1,
    low: float = 0.0,
    high: float = 2.0,
    clip: float = 0.2,
    half: int = 50,
    beta: float = 0.01,
) -> Recipe:
    """EPO: entropy bonus, and a penalty for leaving a band around the past entropy at the same turn.

    J = token mean of clipped gain − beta k3 + λ [ H − βₖ α ([low·H̄ − H]₊ + [H − high·H̄]₊) ],  βₖ = 1 + exp(−k/half);
    A = z-score of R among all the task's turns

    Paper: EPO: Entropy-regularized Policy Optimization for LLM Agents RL, arXiv 2509.22576.
    Settings: weight 1e-3, band 0 to 2, alpha 0.05 to 0.1, half = half of the steps, KL 0.01 in its scripts.
    Deviation: the hinge of the latest paper; the code's constant penalty has no gradient."""
    return Recipe(
        advantage=Standardise(Outcome(), SameTask("turn")),
        gate=Clip(clip, clip),
        aggregate=Mean(TOKEN),
        penalties=(
            WeightedPenalty(weight, NegativeEntropy()),
            WeightedPenalty(DecayingWeight(weight, half), EntropyBand(low, high, alpha)),
            WeightedPenalty(beta, KL("k3")),
        ),
    )


class ReferenceDivergence(Factor):
    """|y| softmaxₜ(d H̄^κ / τ) over the tokens of a trajectory: more weight where the policy
    differs from the reference and is uncertain.

    d is the squared Hellinger distance, H̄ the entropy over log |V|. The mean over a trajectory is 1."""

    reads_before_step = frozenset({Signal.HELLINGER, Signal.ENTROPY})
    kappa: float = 1.0
    tau: float = 0.5
    vocabulary: int = 0  # 0: the policy's own, from the learner

    def plan(self, view: StepView) -> dict[object, Field]:
        size = self.vocabulary or float(view.batch[Column.VOCABULARY_SIZE].item)
        uncertainty = view[Signal.ENTROPY] / math.log(size)
        score = view[Signal.HELLINGER] * uncertainty.clamp(low=0.0) ** self.kappa / self.tau
        score = (score - score.max(TRAJECTORY)).exp()
        return {self: score / score.mean(TRAJECTORY)}


def dgpo(kappa: float = 1.0, tau: float = 0.5, clip: float = 0.2) -> Recipe:
    """DGPO (distribution): distributes the advantage to tokens that diverge from the reference and have high entropy.

    Aₜ = A · |y| softmaxₜ(d (H/log|V|)^κ / τ),  d = 1 − Σ√(π π_ref)

    Paper: DGPO: Distribution Guided Policy Optimization for fine-grained credit assignment, arXiv 2605.03327.
    Settings: kappa 1, tau 0.5, clip 0.2, no KL."""
    return Recipe(advantage=Standardise(), gate=Clip(clip, clip) * ReferenceDivergence(kappa, tau))


def standardised(value: Field) -> Field:
    """(x − mean) / √(var + 1e-8) over the batch; 0 for a single item."""
    return (value - value.mean(BATCH)) / (value.std(BATCH) ** 2 + 1e-8) ** 0.5 if value.x.numel() else value


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


@suggests(reward=("majority",), env_reward_weight=0.0)
def echo(
    boost: float = 0.1,
    bonus: float = 0.0,
    least: float = 0.05,
    most: float = 0.2,
    steep: float = 4.0,
    tail: int = 16,
    trunks: int = 4,
    high: float = 3.5,
    confident: float = 1.2,
    beta: float = 1e-3,
) -> Recipe:
    """ECHO (test-time RL): trees at uncertain tokens, pruned online; credit and clip by confidence; the vote pays.

    A(1 + boost·S), S = clip(z(H) + z(1 − p), ±2);  clip 1 ± ε, ε = least + (most − least)·σ(steep·(1 − mean p of the tail))

    Paper: Entropy-Confidence Hybrid Optimization for Test-Time RL, arXiv 2602.02150.
    Settings: boost 0.1, no bonus, clip 0.05 to 0.2, steep 4, KL 0.001, 32 rollouts, branches at H ≥ 3.5 and C ≤ 1.2.
    Deviation: p is the probability of the sampled token, its other published choice. C is measured above its minimum ln 5: as
    printed it is at least 1.61, and its thresholds 1.2, 1.0 and 0.4 could never be met. Entropies are those of the whole
    vocabulary. The vote alone pays (--env-reward-weight 1 adds the environment). Branches sample their first token and are
    opened when their parent has ended; only branches are pruned, never trunks, and pruning never pays. Where to branch depends on
    the model: set high and confident."""
    return Recipe(
        advantage=UncertaintyShaped(Standardise(), boost, bonus),
        gate=TailConfidenceClip(least, most, steep, tail),
        aggregate=Mean(TOKEN),
        penalties=(WeightedPenalty(beta, KL("k3")),),
        reward=EnvironmentReward() + PaidAtEnd(Fact(PRUNED, missing=0.0)),
        strategy=ConfidenceTree(trunks, BranchRule(high, confident=confident)),
        control=Passes(minibatches=4),
    )
