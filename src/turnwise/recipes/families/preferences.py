"""Preference learning: pairs labelled by data, or the best and worst of a group of rollouts.

A labelled pair is a group of two with the facts chosen 1 and 0. Every method logs the margin and the accuracy of its
score, and the ranking accuracy of the policy itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING, Literal

from turnwise.algebra.advantage import Standardise
from turnwise.algebra.aggregate import Aggregate, Mean
from turnwise.algebra.gate import Clip
from turnwise.algebra.penalty import NegativeLogLikelihood, Penalty, WeightedPenalty
from turnwise.algebra.piece import NOTHING, MicroBatchView, check
from turnwise.algebra.ratio import OnPolicy, behaviour
from turnwise.algebra.reward import NamedReward
from turnwise.algebra.term import Term
from turnwise.algebra.value import Constant, SumOverTrajectory
from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, GROUP, TOKEN, TRAJECTORY, Field, Partition, where
from turnwise.core.limits import choice, number
from turnwise.core.signals import Signal
from turnwise.credit.fact import Fact
from turnwise.credit.preference import (
    PAIRS,
    BestWorstPairs,
    ChosenSide,
    LabelledPairs,
    LogisticLoss,
    LogRatioScore,
    PairLoss,
    PairSelector,
    PreferenceLoss,
    SeparateLogisticLoss,
    TrajectoryScore,
    chosen_and_rejected,
    logsigmoid,
    mean_over_pairs,
    ranking_metrics,
)
from turnwise.credit.selectors import BestOfGroup, FromOrigin, Selector
from turnwise.maths.lazy_torch import torch
from turnwise.recipes.recipe import Kind, Recipe, declares

if TYPE_CHECKING:
    from torch import Tensor

KIND = Kind.PREFERENCE

INF = float("inf")
Source = Literal["told", "formed"]
"""Pairs labelled by the data, or formed of the best and the worst of each group."""

# a function of a family that returns a Recipe is a method: the helpers below say Built
Built = Recipe


def penalised(cost: Penalty, rows: Selector, average: Aggregate | None = None) -> Built:
    """One loss over the rows of pairs, averaged over groups unless told otherwise."""
    penalty = WeightedPenalty(1.0, cost, average or Mean(GROUP), rows=rows)
    return Recipe(advantage=Constant(0.0), ratio=OnPolicy(), penalties=(penalty,))


def of_pairs(loss: PairLoss, pairs: Source, score: TrajectoryScore | None = None) -> Built:
    """The loss of the scores of both sides of each pair; the score is the log-ratio to the reference unless given."""
    return penalised(PreferenceLoss(loss, score or LogRatioScore(), PAIRS[pairs]), PAIRS[pairs])


def imitating_chosen(
    loss: PairLoss, pairs: Source, score: TrajectoryScore, weight: float = 1.0, imitation: float = 1.0
) -> Built:
    """A loss of pairs, and supervised learning of the chosen side."""
    ranked = of_pairs(loss, pairs, score)
    rank, chosen = replace(ranked.penalties[0], weight=weight), ChosenSide(PAIRS[pairs])
    likelihood = WeightedPenalty(imitation, NegativeLogLikelihood(), Mean(TOKEN), rows=chosen)
    return replace(ranked, penalties=(rank, likelihood))


class LabelSmoothed(PairLoss):
    """(1 − ε) ℓ(w, l) + ε ℓ(l, w): label smoothing for labels that may be wrong."""

    loss: PairLoss
    eps: float = number(least=0, most=1)

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        unflipped = self.loss(chosen, rejected)
        return (1 - self.eps) * unflipped + self.eps * self.loss(rejected, chosen) if self.eps else unflipped


class HingeLoss(PairLoss):
    """max(0, 1 − β(w − l))."""

    beta: float

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return (1 - self.beta * (chosen - rejected)).clamp(min=0.0)


class SquaredMarginLoss(PairLoss):
    """(w − l − 1/(2β))²: regresses the margin onto a target."""

    beta: float = number(above=0)

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return (chosen - rejected - 1 / (2 * self.beta)) ** 2


class SeparateSquaredLoss(PairLoss):
    """(w − 1/(2β))² + (l + 1/(2β))²: regresses each side onto its own target."""

    beta: float = number(above=0)

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return (chosen - 0.5 / self.beta) ** 2 + (rejected + 0.5 / self.beta) ** 2


KINDS: dict[str, tuple[Callable[[float], PairLoss], TrajectoryScore]] = {
    "sigmoid": (LogisticLoss, LogRatioScore()),
    "hinge": (HingeLoss, LogRatioScore()),
    "ipo": (SquaredMarginLoss, LogRatioScore(mean=True)),
    "bco": (SeparateLogisticLoss, LogRatioScore()),
    "sppo": (SeparateSquaredLoss, LogRatioScore()),
}


def dpo(
    kind: Literal["sigmoid", "hinge", "ipo", "bco", "sppo"] = "sigmoid",
    beta: float = 0.1,
    smoothing: float = 0.0,
    pairs: Literal["told", "formed"] = "told",
) -> Recipe:
    """DPO: the log-ratio to the reference is an implicit reward; a logistic loss ranks chosen above rejected.

    s = Σₜ log π/π_ref, d = s(w) − s(l);  sigmoid: −log σ(βd);  hinge: [1 − βd]₊;  ipo: (d̄ − 1/2β)², means over tokens;
    bco: −log σ(βs_w) − log σ(−βs_l);  sppo: (s_w − 1/2β)² + (s_l + 1/2β)²;  smoothing ε: (1 − ε)ℓ(w, l) + εℓ(l, w)

    Paper: Direct Preference Optimization, arXiv 2305.18290; the variants under the names of their kinds.
    Settings: beta 0.1, lr 5e-7 to 1e-6, batch 64."""
    loss, score = KINDS[kind]
    return of_pairs(LabelSmoothed(loss(beta), smoothing), pairs, score)


class FlipCorrected(PairLoss):
    """((1 − ε) ℓ(d) − ε ℓ(−d))/(1 − 2ε), d = w − l clipped to ±bound: over labels flipped at rate ε its expectation is
    the loss of the true labels. Unbounded below without ``bound``."""

    loss: PairLoss
    flip: float = number(0.1, least=0, below=0.5)
    bound: float = number(math.inf, above=0, why="inf for none")

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        d = (chosen - rejected).clamp(-self.bound, self.bound)
        zero = torch.zeros_like(d)
        return ((1 - self.flip) * self.loss(d, zero) - self.flip * self.loss(zero, d)) / (1 - 2 * self.flip)


def rdpo(flip: float = 0.1, beta: float = 0.1, bound: float = INF, pairs: Literal["told", "formed"] = "told") -> Recipe:
    """rDPO: DPO with an unbiased correction for labels flipped at a known rate.

    ℓ = [(1 − ε)(−log σ(βd)) − ε(−log σ(−βd))] / (1 − 2ε), d held within ±bound

    Paper: Provably Robust DPO: Aligning Language Models with Noisy Feedback, arXiv 2403.00409.
    Settings: flip 0.1, beta 0.1. The loss is unbounded below as d grows: bound d, keep beta small, or stop early."""
    return of_pairs(FlipCorrected(LogisticLoss(beta), flip, bound), pairs)


def simpo(beta: float = 2.0, gamma: float = 1.0, pairs: Literal["told", "formed"] = "told") -> Recipe:
    """SimPO: logistic loss on length-normalised log-probabilities with a margin, without a reference.

    ℓ = −log σ( β mean log π(w) − β mean log π(l) − γ )

    Paper: SimPO: Simple Preference Optimization with a Reference-Free Reward, arXiv 2405.14734.
    Settings: beta 2 to 2.5 (10 for newer models), gamma about half of it, lr 3e-7 to 1e-6."""
    return of_pairs(LogisticLoss(beta, gamma), pairs, LogRatioScore(mean=True, reference=False))


class MixedReferenceScore(TrajectoryScore):
    """s = Σₜ log π − (τ/η) log π_ref − (1 − τ/η) log μ: a reference between the frozen policy and the sampler μ."""

    eta: float = number(above=0)
    tau: float = number(least=0, most="eta")

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.REFERENCE}) if self.tau else NOTHING

    def __call__(self, view: MicroBatchView) -> Field:
        share = self.tau / self.eta
        x = view.logp - (1 - share) * behaviour(view.batch)
        return (x - share * view[Signal.REFERENCE] if self.tau else x).sum(TRAJECTORY)


def inpo(eta: float = 0.0075, tau: float = 0.0025, pairs: Literal["told", "formed"] = "formed") -> Recipe:
    """INPO: self-play toward a Nash policy; squared loss with a reference between the frozen policy and the sampler.

    h = Δ log π − (τ/η) Δ log π_ref − (1 − τ/η) Δ log μ, Δ = chosen − rejected;  ℓ = (h − 1/2η)²

    Paper: Iterative Nash Policy Optimization, arXiv 2407.00617.
    Settings: tau a third of eta, eta 0.0075 (recalled), 8 samples a task, best against worst, 3 rounds.
    Deviation: a round is a batch; labelled pairs need the log-probabilities of their sampler."""
    return of_pairs(SquaredMarginLoss(eta), pairs, MixedReferenceScore(eta, tau))


class WinRate(Term):
    """Mean of P(this trajectory is preferred to another of its group), from the facts ``beats_0``, ``beats_1`` ..., one
    per other; without them the larger value wins and a tie is ½. 0 without others. At TRAJECTORY."""

    compares_peers = True

    def __call__(self, batch: Batch) -> Field:
        # (number with a smaller value + ½ of the ties) / number of others: the mean rank among equals
        value, tree = batch.reward.sum(TRAJECTORY), batch.tree
        equal = Partition.by(tree, TRAJECTORY, batch.group, torch.unique(value.x, return_inverse=True)[1])
        sizes = torch.bincount(equal.label, minlength=equal.count).double()  # classes are in order of group, then value
        before = (sizes.cumsum(0) - sizes)[equal.label]
        n = tree.size(TRAJECTORY, GROUP).to(torch.float64)
        group_start = Field(tree, GROUP, n.x.cumsum(0) - n.x)
        rank = Field(tree, TRAJECTORY, before + (sizes[equal.label] - 1) / 2) - group_start
        ranked = (rank / (n - 1).clamp(low=1)).to(value.x.dtype)
        names = sorted(name for name in batch.facts if name.startswith("beats_"))
        if not names:
            return ranked
        recorded = torch.stack([Fact(name, missing=torch.nan)(batch).x for name in names])
        count = (~recorded.isnan()).sum(0)
        rate = recorded.nansum(0) / count.clamp(min=1)
        return Field(batch.tree, TRAJECTORY, torch.where(count > 0, rate.to(ranked.x.dtype), ranked.x))


@declares(Kind.CREDIT)
def spo_minimax(clip: float = 0.2) -> Recipe:
    """SPO (minimax): the reward is the win rate against the rest of the group; then GRPO without KL.

    R = mean over the other members of P(this ≻ that);  A = z-score of R;  clipped

    Paper: A Minimaximalist Approach to Reinforcement Learning from Human Feedback, arXiv 2401.04056.
    Settings: any RL update of this reward; here clip 0.2.
    Deviation: the others are those of the group, not of a queue. Where no facts `beats_0`, `beats_1` ... record the
    probabilities, the larger return wins."""
    return Recipe(advantage=Standardise(WinRate()), gate=Clip(clip, clip))


ANSWER, REVISES_REJECTED, REVISES_CHOSEN = 0, 1, 2  # the fact ``revises``


class RevisionGroups(PairSelector):
    """Groups of six: chosen and rejected (fact ``chosen`` 1, 0), each as an answer, as a revision of the rejected and
    as a revision of the chosen (fact ``revises`` 0, 1, 2)."""

    requires = frozenset({"pairs", "fact revises"})

    def role(self, batch: Batch, chosen: int, revises: int) -> Field:
        """Trajectories with these values of the facts ``chosen`` and ``revises``."""
        chosen_fact, revises_fact = Fact("chosen", missing=-1.0)(batch), Fact("revises", missing=0.0)(batch)
        return chosen_fact.map(lambda x: x == chosen) & revises_fact.map(lambda x: x == revises)

    def complete(self, batch: Batch) -> Field:
        """Groups that hold each of the six exactly once. At GROUP."""
        complete = batch.group.map(lambda x: batch.tree.size(TRAJECTORY, GROUP).x == 6)
        for chosen in (0, 1):
            for revises in (ANSWER, REVISES_REJECTED, REVISES_CHOSEN):
                count = where(self.role(batch, chosen, revises), 1.0, 0.0).sum(GROUP)
                complete = complete & count.map(lambda n: n == 1)
        return complete

    def select(self, batch: Batch) -> Field:
        return self.complete(batch).at(TRAJECTORY)

    def sign(self, batch: Batch) -> Field:
        """+1 for the chosen answer, −1 for the rejected answer, 0 for revisions."""
        winner, loser = (where(self.role(batch, chosen, ANSWER), 1.0, 0.0) for chosen in (1, 0))
        return where(self.complete(batch), winner - loser, 0.0)


class RevisionLoss(Penalty):
    """(1 − α)(½ − (β/2)[r(w|l) − r(l|w) + r(w) − r(l)])² + α[(½ − β[r(w|l) − r(l|l)])² + (½ − β[r(w|w) − r(l|w)])²]

    w, l: chosen and rejected; r(a|b): the score of a as a revision of b, r(a) as an answer. The first part trains
    answers that leave little to revise, the second trains the reviser: one network, two prompts. At GROUP."""

    reads = frozenset({Signal.REFERENCE})
    couples_trajectories = True
    beta: float = 0.1
    alpha: float = number(0.5, least=0, most=1)

    def __call__(self, view: MicroBatchView) -> Field:
        score, role = LogRatioScore()(view), RevisionGroups().role
        part = lambda chosen, revises: where(role(view.batch, chosen, revises), score, 0.0).sum(GROUP)  # noqa: E731
        (w, l), (w_l, l_l), (w_w, l_w) = ((part(1, b), part(0, b)) for b in (ANSWER, REVISES_REJECTED, REVISES_CHOSEN))  # noqa: E741
        answers = (0.5 - self.beta / 2 * (w_l - l_w + w - l)) ** 2
        reviser = (0.5 - self.beta * (w_l - l_l)) ** 2 + (0.5 - self.beta * (w_w - l_w)) ** 2
        return (1 - self.alpha) * answers + self.alpha * reviser

    def metrics(self, view: MicroBatchView) -> Mapping[str, Tensor]:
        return mean_over_pairs(ranking_metrics(view, RevisionGroups(), LogRatioScore()))


def srpo(beta: float = 0.1, alpha: float = 0.5) -> Recipe:
    """SRPO (self-improving): trains answers and revisions jointly, so that little is left to revise.

    (1 − α)(½ − (β/2)[r(w|l) − r(l|w) + r(w) − r(l)])² + α[(½ − β[r(w|l) − r(l|l)])² + (½ − β[r(w|w) − r(l|w)])²]

    Paper: Self-Improving Robust Preference Optimization, arXiv 2406.01660.
    Settings: up to five revisions when used; beta 0.1 and alpha 0.5 are ours.
    Deviation: data holds groups of six: chosen and rejected (fact chosen 1, 0), each as an answer, as a revision of the
    rejected and as a revision of the chosen (fact revises 0, 1, 2); the prompt of a revision shows what is revised."""
    return penalised(RevisionLoss(beta, alpha), RevisionGroups())


NAN = float("nan")


class GapOrderLoss(Penalty):
    """−log σ(m − m′), m = β(s(chosen) − s(rejected)), mean over all ordered couples of pairs of one ``family`` in which
    the first has the larger ``gap``: a larger quality gap must have a larger margin. ``family`` and ``gap`` are facts.
    At BATCH."""

    reads = frozenset({Signal.REFERENCE})
    requires = frozenset({"fact family", "fact gap"})
    couples_trajectories = True
    beta: float = 0.1
    pairs: PairSelector = field(default_factory=LabelledPairs)

    def __call__(self, view: MicroBatchView) -> Field:
        sign = self.pairs.sign(view.batch)
        chosen, rejected = chosen_and_rejected(LogRatioScore()(view), sign)
        has_pair = (where(sign > 0, 1.0, 0.0).sum(GROUP) > 0).x
        margin = self.beta * (chosen - rejected).x[has_pair]
        family, gap = (Fact(name, missing=NAN)(view.batch).max(GROUP).x[has_pair] for name in ("family", "gap"))
        ordered = (family[:, None] == family[None, :]) & (gap[:, None] > gap[None, :])
        cost = -torch.nn.functional.logsigmoid(margin[:, None] - margin[None, :])[ordered]
        return Field(view.batch.tree, BATCH, (cost.sum() / max(1, cost.numel())).reshape(1))


def mapl(beta: float = 0.1, intra: float = 1.0, inter: float = 1.0) -> Recipe:
    """MAPL: DPO, plus preferences of one answer under two prompts, plus an order of margins by quality gap.

    L = DPO + λ₁ mean −log σ(β[s(y|x⁺) − s(y|x⁻)]) + λ₂ mean −log σ(m(wide) − m(narrow)),  m = β(s_w − s_l)

    Paper: MAPL: Multi-Level Aware Preference Learning, 2025.
    Settings: beta 0.1; both weights 1 (ours).
    Deviation: an answer y under x⁺ and x⁻ is a pair of its own (chosen 1: its own prompt, 0: the changed one) with the
    fact within 1; fact family groups the pairs of one origin, fact gap is the quality gap of a pair."""
    across, within = LabelledPairs(without="within"), LabelledPairs(having="within")
    base = penalised(PreferenceLoss(LogisticLoss(beta), pairs=across), across)
    prompts = WeightedPenalty(intra, PreferenceLoss(LogisticLoss(beta), pairs=within), Mean(GROUP), rows=within)
    wider = WeightedPenalty(inter, GapOrderLoss(beta, across), Mean(GROUP), rows=across)
    return replace(base, penalties=(*base.penalties, prompts, wider))


ANSWERS: dict[str, Selector] = {"told": FromOrigin("expert"), "formed": FromOrigin("policy")}
"""Whose answers are picked from: ``told`` are those of the data, ``formed`` the policy's own."""


class DirectionalReward(Term):
    """vᵀr: the named rewards of a trajectory along the direction v its prompt asks for, the facts ``toward_NAME``."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        check(bool(self.names), "no reward is named; write at least one")

    @property
    def requires(self) -> frozenset[str]:
        each = {f"{kind}{name}" for name in self.names for kind in ("reward ", "fact toward_")}
        # in this order: the data source draws directions over them
        return frozenset(each | {f"ratings {' '.join(self.names)}"})

    def __call__(self, batch: Batch) -> Field:
        parts = [Fact(f"toward_{name}")(batch) * SumOverTrajectory(NamedReward(name))(batch) for name in self.names]
        return sum(parts[1:], parts[0])


def dpa(heads: tuple[str, ...] = ("helpfulness", "verbosity"), answers: Literal["told", "formed"] = "told") -> Recipe:
    """DPA: the prompt states a direction among several rewards; imitates the best answer along it.

    kept: argmax vᵀr among the answers to one prompt;  L = −token mean of log π over the kept

    Paper: Arithmetic Control of LLMs for Diverse User Preferences: Directional Preference Alignment, arXiv 2402.18571.
    Settings: v = (cos φ, sin φ), |φ| at most 45°, stated in the prompt as whole hundredths.
    Deviation: one round over the answers of a file, each prompt in four directions; r are their ratings instead of a
    reward model's. answers=formed: the policy's own, for an environment that samples v, states it and records it as
    facts `toward_NAME`."""
    best = BestOfGroup(ANSWERS[answers], DirectionalReward(heads))
    return penalised(NegativeLogLikelihood(), best, Mean(TOKEN))


# ------------------------------------------------------------- losses of one pair


class ReverseKLLoss(PairLoss):
    """KL(q ‖ p) of two outcomes: q = (σ(βd), σ(−βd)) is the policy's, p = (1 − ε, ε) the label's."""

    beta: float
    eps: float = number(1e-3, above=0, below=1, why="the label's probability of being wrong")

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        right, wrong = (logsigmoid(sign * self.beta * (chosen - rejected)) for sign in (1, -1))
        return right.exp() * (right - math.log(1 - self.eps)) + wrong.exp() * (wrong - math.log(self.eps))


def exo(beta: float = 0.1, eps: float = 1e-3, pairs: Literal["told", "formed"] = "told") -> Recipe:
    """EXO: reverse KL from the policy's probability of the order to the label's, instead of DPO's forward KL.

    q = σ(βd);  ℓ = q log(q / (1 − ε)) + (1 − q) log((1 − q) / ε)

    Paper: Towards Efficient Exact Optimization of Language Model Alignment, arXiv 2402.00856.
    Settings: eps 1e-3, beta 0.1.
    Deviation: two answers a prompt (its pairwise form)."""
    return of_pairs(ReverseKLLoss(beta, eps), pairs)


class NoiseContrastiveLoss(PairLoss):
    """−log σ(βw) − ½ log σ(−βw) − ½ log σ(−βl): each side is told apart from the reference, so the chosen cannot fall."""

    beta: float

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        w, r = self.beta * chosen, self.beta * rejected
        return -logsigmoid(w) - 0.5 * (logsigmoid(-w) + logsigmoid(-r))


def nca(beta: float = 0.1, pairs: Literal["told", "formed"] = "told") -> Recipe:
    """NCA: noise contrastive alignment; classifies each answer against the reference, so the chosen does not get rarer.

    ℓ = −log σ(βs_w) − ½ log σ(−βs_w) − ½ log σ(−βs_l)

    Paper: Noise Contrastive Alignment of Language Models with Explicit Rewards, arXiv 2402.05369.
    Settings: beta 0.01 in the paper, 0.1 here as for the others.
    Deviation: two answers a prompt (its pairwise form)."""
    return of_pairs(NoiseContrastiveLoss(beta), pairs)


class AnchoredLoss(PairLoss):
    """Each side against the reference. ``zero``: 1 − σ(βw) + σ(βl), the chosen rises and the rejected falls. ``down``: σ(βw) +
    1 − σ(β(w − l)), both fall, the rejected more; for data worse than the model."""

    beta: float
    anchor: str = choice("zero", "down")

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        if self.anchor == "zero":
            return torch.sigmoid(-self.beta * chosen) + torch.sigmoid(self.beta * rejected)
        return torch.sigmoid(self.beta * chosen) + torch.sigmoid(-self.beta * (chosen - rejected))


def apo(
    anchor: Literal["zero", "down"] = "zero", beta: float = 0.1, pairs: Literal["told", "formed"] = "told"
) -> Recipe:
    """APO: anchored preference optimisation; says for each side whether it should rise or fall against the reference.

    zero: ℓ = 1 − σ(βs_w) + σ(βs_l), for data better than the model;  down: ℓ = σ(βs_w) + 1 − σ(βd), for worse data

    Paper: Anchored Preference Optimization and Contrastive Revisions, arXiv 2408.06266.
    Settings: beta 0.1."""
    return of_pairs(AnchoredLoss(beta, anchor), pairs)


class BlendedLoss(PairLoss):
    """(1 − m)(−log σ(x)) + m exp(−x), x = βd, m = σ(x/τ): logistic for wrong orders, exponential for right ones."""

    beta: float
    tau: float = number(0.05, above=0)

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        x = self.beta * (chosen - rejected)
        blend = torch.sigmoid(x / self.tau)
        return -logsigmoid(x) * (1 - blend) + torch.exp(-x) * blend


def discopop(beta: float = 0.05, tau: float = 0.05, pairs: Literal["told", "formed"] = "told") -> Recipe:
    """DiscoPOP: a discovered blend of the logistic and the exponential loss.

    x = βd, m = σ(x/τ);  ℓ = (1 − m)(−log σ(x)) + m exp(−x)

    Paper: Discovering Preference Optimization Algorithms with and for Large Language Models, arXiv 2406.08414.
    Settings: tau 0.05, beta 0.05. Just above d = 0 the loss rises with d: there it lowers the margin."""
    return of_pairs(BlendedLoss(beta, tau), pairs)


class SortedPreferenceLoss(Penalty):
    """Loss of sorted scores: the k-th smallest of one side against the k-th smallest of the other, over all pairs of a step.

    First-order stochastic dominance instead of an order within each pair."""

    reads = frozenset({Signal.REFERENCE})
    couples_trajectories = True
    loss: PairLoss
    # the margins of the policy against the margins of the reference; otherwise the chosen against the rejected
    paired: bool = True
    pairs: PairSelector = field(default_factory=LabelledPairs)

    def __call__(self, view: MicroBatchView) -> Field:
        sign = self.pairs.sign(view.batch)
        policy, frozen = (chosen_and_rejected(x.sum(TRAJECTORY), sign) for x in (view.logp, view[Signal.REFERENCE]))
        if self.paired:
            left, right = policy[0] - policy[1], frozen[0] - frozen[1]
        else:
            left, right = policy[0] - frozen[0], policy[1] - frozen[1]
        real = (where(sign > 0, 1.0, 0.0).sum(GROUP) > 0).x
        costs = torch.zeros_like(left.x)
        costs[real] = self.loss(left.x[real].sort().values, right.x[real].sort().values)
        return Field(left.tree, GROUP, costs)

    def metrics(self, view: MicroBatchView) -> Mapping[str, Tensor]:
        return mean_over_pairs(ranking_metrics(view, self.pairs, LogRatioScore()))


def aot(
    beta: float = 0.1, smoothing: float = 0.0, paired: bool = True, pairs: Literal["told", "formed"] = "told"
) -> Recipe:
    """AOT: alignment by optimal transport; the distribution of scores dominates another instead of each pair's order.

    d₍ₖ₎ = k-th smallest margin of the policy − k-th smallest of the reference (unpaired: of chosen − of rejected);
    ℓ = −log σ(βd₍ₖ₎)

    Paper: Distributional Preference Alignment of LLMs via Optimal Transport, arXiv 2406.05882.
    Settings: beta 0.1.
    Deviation: sorts over the whole optimiser step, not over a device's micro-batch."""
    loss = LabelSmoothed(LogisticLoss(beta), smoothing)
    return penalised(SortedPreferenceLoss(loss, paired, PAIRS[pairs]), PAIRS[pairs])


class LabelledAnswers(PairSelector):
    """Every trajectory with the fact ``chosen``, 1 (good) or 0 (bad): both sides of a pair, or answers without another side."""

    requires = frozenset({"pairs", "labels"})

    def sign(self, batch: Batch) -> Field:
        label = Fact("chosen", missing=-1.0)(batch)
        return where(label.map(lambda x: x == 1), 1.0, where(label.map(lambda x: x == 0), -1.0, 0.0))


class ProspectLoss(Penalty):
    """λ_D (1 − σ(β(s − z))) of a chosen trajectory, λ_U (1 − σ(β(z − s))) of a rejected one; z = [mean of s over both]₊.

    s is the log-ratio to the reference; z, the point of no gain and no loss, has no gradient. At TRAJECTORY."""

    reads = frozenset({Signal.REFERENCE})
    couples_trajectories = True
    beta: float = number(above=0)
    desirable: float = 1.0
    undesirable: float = 1.0
    pairs: PairSelector = field(default_factory=LabelledPairs)

    def __call__(self, view: MicroBatchView) -> Field:
        sign = self.pairs.sign(view.batch)
        score = LogRatioScore()(view)
        labelled = where(sign.abs() > 0, 1.0, 0.0)
        centre = ((labelled * score.detach()).sum(BATCH) / labelled.sum(BATCH).clamp(low=1.0)).clamp(low=0.0)
        cost = (sign.to(score.x.dtype) * (score - centre)).map(lambda x: torch.sigmoid(-self.beta * x))
        return cost * where(sign > 0, self.desirable, self.undesirable)

    def metrics(self, view: MicroBatchView) -> Mapping[str, Tensor]:
        pairs = LabelledPairs() if isinstance(self.pairs, LabelledAnswers) else self.pairs
        return mean_over_pairs(ranking_metrics(view, pairs, LogRatioScore()))


LABELLED: dict[str, PairSelector] = {"told": LabelledAnswers(), "formed": BestWorstPairs()}
"""As ``PAIRS``, and answers of the data that are labelled one by one."""


def kto(
    beta: float = 0.1, desirable: float = 1.0, undesirable: float = 1.0, pairs: Literal["told", "formed"] = "told"
) -> Recipe:
    """KTO: values each answer alone by a prospect-theoretic utility around a reference point.

    ℓ = λ_D (1 − σ(β(s − z))) if chosen, λ_U (1 − σ(β(z − s))) if rejected;  z = [mean s]₊, detached

    Paper: KTO: Model Alignment as Prospect Theoretic Optimization, arXiv 2402.01306.
    Settings: beta 0.1, weights 1 (keep λ_D n_D / λ_U n_U within 1 to 4/3).
    Deviation: z is estimated from the labelled answers themselves, not from answers paired with other prompts. Answers come as
    pairs, or one by one with a label (rows of prompt, completion and label)."""
    cost = ProspectLoss(beta, desirable, undesirable, LABELLED[pairs])
    return penalised(cost, LABELLED[pairs], Mean(TRAJECTORY))


class LogOddsScore(TrajectoryScore):
    """s = log p/(1 − p), p the geometric mean of the token probabilities; without a reference."""

    def __call__(self, view: MicroBatchView) -> Field:
        mean = view.logp.mean(TRAJECTORY).clamp(high=-1e-6)
        return mean - mean.map(lambda x: torch.log(-torch.expm1(x)))


def orpo(weight: float = 0.1, pairs: Literal["told", "formed"] = "told") -> Recipe:
    """ORPO: supervised learning of the chosen answer plus a log-odds ratio against the rejected one; no reference.

    L = token mean of −log π(w) + λ mean −log σ(log odds(w) − log odds(l)),  odds p/(1 − p), log p = mean log π

    Paper: ORPO: Monolithic Preference Optimization without Reference Model, arXiv 2403.07691.
    Settings: weight 0.1, lr 8e-6.
    Deviation: the supervised term covers the answer, not the prompt."""
    return imitating_chosen(LogisticLoss(1.0), pairs, LogOddsScore(), weight)


def cpo(beta: float = 0.1, imitation: float = 1.0, pairs: Literal["told", "formed"] = "told") -> Recipe:
    """CPO: contrastive preference optimisation; DPO with a uniform reference, plus supervised learning of the chosen answer.

    L = mean −log σ(β(log π(w) − log π(l))) + α · token mean of −log π(w)

    Paper: Contrastive Preference Optimization, arXiv 2401.08417.
    Settings: beta 0.1, imitation 1."""
    return imitating_chosen(LogisticLoss(beta), pairs, LogRatioScore(reference=False), imitation=imitation)
