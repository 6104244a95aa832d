"""Selection: which trajectories, turns, tokens and past batches are trained on, before any clipping."""

from __future__ import annotations

import math
from dataclasses import field, replace
from typing import TYPE_CHECKING

from turnwise.algebra.advantage import LeaveOneOut, SoftBaseline, Standardise
from turnwise.algebra.aggregate import Mean, Sum
from turnwise.algebra.control import CriticsFirst
from turnwise.algebra.gate import Clip, NoGate, TruncatedImportance, ZeroGate
from turnwise.algebra.mask import AllTokens, Both, Mask
from turnwise.algebra.penalty import NegativeLogLikelihood, Penalty, StepCrossEntropy, WeightedPenalty
from turnwise.algebra.piece import MicroBatchView, Piece, StepView
from turnwise.algebra.ratio import Importance, OnPolicy, PerToken, moved
from turnwise.algebra.term import Term
from turnwise.algebra.value import Constant, Outcome, ReturnToGo, shift_turns, step_values
from turnwise.core.batch import Batch
from turnwise.core.columns import Column
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, TURN, Field, Partition, where
from turnwise.core.limits import number
from turnwise.core.signals import TURN_CRITIC, TURN_CRITIC_TARGET, Signal
from turnwise.credit.preference import BestWorstPairs, LogisticLoss, PairSelector, PreferenceLoss, TrajectoryScore
from turnwise.credit.selectors import AllOf, FromOrigin, HasTokens, RatioByOrigin, Selector, Succeeded
from turnwise.data.replay import ExpertItems, PastBatches, RecentBuffer, SharedExperience, SuccessBuffer
from turnwise.maths.lazy_torch import torch
from turnwise.recipes.families.critic_free import grpo, gspo
from turnwise.recipes.families.turn_credit import SameTask
from turnwise.recipes.recipe import Kind, Recipe, declares
from turnwise.recipes.signatures import suggests
from turnwise.rollout.strategies import Branch, OneTurn
from turnwise.tasks.admission import AfterDraws, Spread
from turnwise.tasks.budgets import FallingWithSuccess, Fixed
from turnwise.tasks.pool_samplers import PivotFilter
from turnwise.tasks.samplers import CyclePool, Stages

if TYPE_CHECKING:
    from torch import Tensor

KIND = Kind.DATA


class ShareSchedule(Piece):
    """A share that moves linearly from ``start`` to ``end`` over ``steps`` batches, then stays."""

    start: float = number(above=0, most=1, why="which part is trained on")
    end: float = number(above=0, most=1, why="which part is trained on")
    steps: int = number(100, least=1, why="the batches until the last share is reached")

    def share(self, batch: Batch) -> float:
        """The share of this batch."""
        progress = min(1.0, float(batch[Column.BATCH_INDEX].item) / self.steps)
        return (1 - progress) * self.start + progress * self.end


DECIMALS = 6  # scores that differ by rounding are equal: then hashes decide, which do not depend on the packing


def max_variance_subset(values: Tensor, ties: Tensor, count: int) -> Tensor:
    """The ``count`` items with the largest variance of ``values``: the k largest and the others smallest, for the best k; of
    equally good k the largest. ``ties`` orders equal values."""
    first = torch.argsort(ties, stable=True)
    ordered = values.double()[first].round(decimals=DECIMALS)
    order = torch.argsort(ordered, stable=True)
    x, n = ordered[order], len(order)
    sums, squares = (torch.nn.functional.pad(y.cumsum(0), (1, 0)) for y in (x, x * x))
    k = torch.arange(count + 1, device=x.device)
    total = sums[count - k] + sums[n] - sums[n - k]
    variance = (squares[count - k] + squares[n] - squares[n - k]) / count - (total / count) ** 2
    best = int((variance.round(decimals=DECIMALS) == variance.round(decimals=DECIMALS).max()).nonzero().max())
    places = torch.cat([torch.arange(count - best), torch.arange(n - best, n)]).to(order.device)
    return first[order[places]]


class LargestVariance(Selector):
    """The share of the trajectories whose advantages have the largest variance: some of the largest and some of the smallest,
    over the whole step, or inside each group. Trajectories without tokens do not count."""

    reason = "another subset has advantages of larger variance"
    kept: ShareSchedule
    by_group: bool = False

    def select(self, batch: Batch) -> Field:
        adv = batch[Column.ADVANTAGE]
        a = adv.mean(TRAJECTORY) if adv.level < TRAJECTORY else adv.at(TRAJECTORY)
        rows = HasTokens().select(batch).x.nonzero().squeeze(1)
        group = batch.tree.parents[2][rows] if self.by_group else torch.zeros_like(rows)
        selected = torch.zeros_like(a.x, dtype=torch.bool)
        for one in group.unique().tolist():
            peers = rows[group == one]
            count = max(1, round(self.kept.share(batch) * len(peers)))
            selected[peers[max_variance_subset(a.x[peers], batch.seed.x[peers], count)]] = True
        return Field(batch.tree, TRAJECTORY, selected)


def _descending(score: Tensor, ties: Tensor) -> Tensor:
    """Items from the largest score to the smallest; ``ties`` orders equal ones."""
    first = torch.argsort(ties, stable=True)
    return first[torch.argsort(score[first].double().round(decimals=DECIMALS), descending=True, stable=True)]


def ceiling(x: float) -> int:
    """The smallest integer that is not below x, but for rounding: 0.2 · 15 is 3."""
    return math.ceil(x - 1e-9)


class LargestAdvantageEntropy(Mask):
    """The share of the tokens with the largest |A|·H, H the entropy at the start of the batch, among the tokens of ``within``;
    True outside of it, where ``within`` decides."""

    reads = frozenset({Signal.OLD_ENTROPY})
    reason = "small |A| times entropy"
    kept: ShareSchedule
    within: Selector = field(default_factory=HasTokens)

    def plan(self, view: StepView) -> dict[object, Field]:
        batch = view.batch
        inside = self.within.select(batch).at(TOKEN).x
        score = batch[Column.ADVANTAGE].at(TOKEN).x.double().abs() * batch[Signal.OLD_ENTROPY].x.double()
        rows = inside.nonzero().squeeze(1)
        chosen = ~inside
        ranked = _descending(score[rows], batch.uniform_draws().x[rows])
        chosen[rows[ranked[: ceiling(self.kept.share(batch) * len(rows))]]] = True
        return {self: Field(batch.tree, TOKEN, chosen)}


def d3s(
    rows: float = 0.25,
    rows_end: float = 0.75,
    tokens: float = 0.2,
    tokens_end: float = 0.8,
    ramp: int = 100,
    by_group: bool = False,
    clip: float = 0.2,
) -> Recipe:
    """D3S: trains on the trajectories whose advantages have the largest variance, and in them on the largest |A|·entropy.

    A = z-score over all rows;  S = argmax Var(A over S), |S| = N;  tokens of S: the top K by |A| H;  N and K rise with the step

    Paper: Learning More with Less: A Dynamic Dual-Level Down-Sampling Framework, arXiv 2509.22115.
    Settings: not recovered; a quarter to three quarters of the rows and a fifth to four fifths of their tokens over 100
    batches (ramp) are ours. by_group chooses inside each group (D3S-I).
    Deviation: progress is counted in batches; a step of several mini-batches chooses in each of them."""
    subset = LargestVariance(ShareSchedule(rows, rows_end, ramp), by_group)
    return Recipe(
        advantage=Standardise(),
        gate=Clip(clip, clip),
        keep=Both(subset, LargestAdvantageEntropy(ShareSchedule(tokens, tokens_end, ramp), subset)),
    )


def swarm(folder: str = "swarm", foreign: int = 4, sender: str = "", clip: float = 0.2, high: float = 0.28) -> Recipe:
    """Swarm SAPO: trains on groups of other runs as well, shared through a folder, as if the own policy had sampled them.

    A = z-score inside each group;  own: ρ = π/μ;  of other runs: ρ = π/π_old, so that the first is 1;  clipped token mean, no KL

    Paper: Sharing is Caring: Efficient LM Post-Training with Collective RL Experience Sharing, arXiv 2509.08721.
    Settings: 4 own and 4 foreign groups of 8, foreign groups without any reward left out, clip 0.2/0.28; alone it is DAPO's loss.
    Deviation: token ids are shared instead of text, so runs need one tokenizer; the sender's rewards are kept. Foreign groups are
    drawn at random among the last 256; the released agent also has a variant that takes the best."""
    ratio, others = (
        RatioByOrigin(FromOrigin("replay"), Importance(proximal=True)),
        SharedExperience(folder, foreign, sender),
    )
    return Recipe(advantage=Standardise(), ratio=ratio, gate=Clip(clip, high), aggregate=Mean(TOKEN), replay=others)


class HighestEntropyTurns(Mask):
    """The turns of each group whose mean token entropy, at the start of the batch, is among the highest ``share``."""

    reads = frozenset({Signal.OLD_ENTROPY})
    reason = "a turn of low entropy"
    share: float = number(0.8, above=0, most=1, why="which part of a group's turns is trained on")

    def plan(self, view: StepView) -> dict[object, Field]:
        batch, tree = view.batch, view.batch.tree
        entropy = batch[Signal.OLD_ENTROPY].mean(TURN).x
        rows = (tree.size(TOKEN, TURN).x > 0).nonzero().squeeze(1)
        group = tree.ancestor(TURN, GROUP)[rows]
        order = _descending(entropy[rows], batch.uniform_draws(TURN).x[rows])
        order = order[torch.argsort(group[order], stable=True)]  # by group, highest entropy first
        size = torch.bincount(group, minlength=tree.count(GROUP))
        begin = torch.nn.functional.pad(size.cumsum(0), (1, 0))[:-1]
        rank = torch.arange(len(order), device=order.device) - begin[group[order]]
        quota = torch.tensor([ceiling(self.share * n) for n in size.tolist()], device=rank.device)
        chosen = torch.zeros_like(entropy, dtype=torch.bool)
        chosen[rows[order[rank < quota[group[order]]]]] = True
        return {self: Field(tree, TURN, chosen)}


def dart(
    share: float = 0.8,
    cap: float = 1.0,
    low: float = 0.1,
    high: float = 0.28,
    beta: float = 0.1,
    easy: float = 0.6,
    pool: int = 128,
) -> Recipe:
    """DART (GUI agents): trains on turns of high entropy, with truncated ratios and stored successes.

    kept: the share of a group's turns with the highest mean entropy;
    J = mean over turns of clipped(s, A) min(π_old/μ, cap) − β k3,  s = exp(mean over the turn of log π/π_old);
    A = z-score of R among all the task's turns

    Paper: Efficient Multi-turn RL for GUI Agents via Decoupled Training and Adaptive Data Curation, arXiv 2509.23866.
    Settings: share 0.8, cap 1, clip 0.1/0.28 (0.2 in the paper), KL 0.1, groups of 8, all rollouts up to a success rate of
    0.6, turns limited by the longest success; repeated passes over a pool of 128 tasks.
    Deviation: a stored success replaces the first rollout of a group that failed, not its oldest; a failing group without one
    stays. Old data comes from --staleness; the four services are one process."""
    return replace(
        grpo(beta=beta),
        advantage=Standardise(Outcome(), SameTask("turn")),
        ratio=PerToken(Importance(TURN, proximal=True), cap=10.0),
        gate=Clip(low, high) * TruncatedImportance(cap),
        aggregate=Mean(TURN),
        keep=HighestEntropyTurns(share),
        budget=FallingWithSuccess(8, 8, easy),
        sampler=CyclePool(pool),
        replay=SuccessBuffer(),
    )


class SamplerRegressionError(Penalty):
    """(β Σ over the trajectory of log π − log μ, minus A)²: 0 where π ∝ μ exp(A/β). One cost per trajectory."""

    beta: float = number(1e-3, above=0)

    def __call__(self, view: MicroBatchView) -> Field:
        log_ratio = moved(view).sum(TRAJECTORY)
        return (self.beta * log_ratio - view[Column.ADVANTAGE].at(TRAJECTORY).to(log_ratio.x.dtype)) ** 2


def oapl(value: float = 1.0, beta: float = 1e-3, share: float = 0.5, window: int = 4) -> Recipe:
    """OAPL (KARL): regresses the log-ratio to the sampler of each trajectory onto its soft advantage; no ratio and no clip.

    V = β₁ log mean exp(R/β₁) over the group;  min mean (β₂ Σₜ (log π − log μ) − (R − V))²

    Paper: KARL: Knowledge Agents via Reinforcement Learning, arXiv 2603.05218, objective of arXiv 2602.19362.
    Settings: value (β₁) 1, beta (β₂) 1e-3, 8 rollouts, groups without spread dropped; the sampler is refreshed every 50 updates.
    Deviation: old data comes from a buffer of whole batches, half of each step of the last 4 policies; the synthesis of tasks is
    not part of it."""
    loss, past = WeightedPenalty(1.0, SamplerRegressionError(beta)), PastBatches(share, window)
    return Recipe(advantage=SoftBaseline(value), gate=ZeroGate(), penalties=(loss,), admission=Spread(), replay=past)


class GoodSteps(Term):
    """1 for each step with V(o′) − V(o) − cost + r + G > 0, G the discounted return from this step on; 0 for the others. No
    tokens follow the last step: V(o′) there is what a critic learns for it, whether the last reward is positive."""

    reads = frozenset({Signal.OLD_VALUE})
    gamma: float = number(0.5, least=0, most=1)
    cost: float = 0.05

    def __call__(self, batch: Batch) -> Field:
        value = batch[Signal.OLD_VALUE].map(torch.sigmoid)
        tree, reward = batch.tree, batch.reward.sum(TURN)
        last = tree.size(TURN, TRAJECTORY) - tree.index(TURN, TRAJECTORY) <= 1
        end = where(last, (reward > 0).to(value.x.dtype), 0.0).sum(TRAJECTORY)
        before, after = step_values(batch, value, end)
        paid = reward + ReturnToGo(self.gamma)(batch).at(TURN)
        a = after - before - self.cost + paid.to(before.x.dtype)
        return (a > 0).to(torch.float64)


class OutcomeAboveValue(Term):
    """R − V(o₀): how much better a trajectory ended than its first state promised. At TRAJECTORY."""

    reads = frozenset({Signal.OLD_VALUE})

    def __call__(self, batch: Batch) -> Field:
        value = batch[Signal.OLD_VALUE].map(torch.sigmoid)
        promised = where(batch.tree.index(TOKEN, TRAJECTORY) < 1, value, 0.0).sum(TRAJECTORY)
        return Outcome()(batch).to(promised.x.dtype) - promised


class TopOfBatch(Selector):
    """The share of the trajectories with the largest ``by``, at least one; those without tokens do not count."""

    reason = "another trajectory did better than its task promised"
    share: float = number(0.1, above=0, most=1, why="which part is trained on")
    by: Term = field(default_factory=Outcome)

    def select(self, batch: Batch) -> Field:
        rows = HasTokens().select(batch).x.nonzero().squeeze(1)
        rows = rows[torch.argsort(batch.seed.x[rows], stable=True)]
        score = self.by(batch).at(TRAJECTORY).x[rows].double().round(decimals=DECIMALS)
        best = rows[torch.argsort(score, descending=True, stable=True)[: ceiling(self.share * len(rows))]]
        none = torch.zeros(len(batch), dtype=torch.bool, device=rows.device)
        return Field(batch.tree, TRAJECTORY, none.index_fill(0, best, True))


def digirl(
    gamma: float = 0.5, cost: float = 0.05, share: float = 0.1, value_weight: float = 1.0, oldest: int = 10
) -> Recipe:
    """DigiRL: imitates the good steps of the trajectories that did better than their task promised; values are classifiers.

    kept: the top share by R − V(o₀);  ∇J = mean over steps of 1[V(o′) − V(o) − cost + r + G > 0] Σₜ ∇ log π

    Paper: DigiRL: Training In-The-Wild Device-Control Agents with Autonomous RL, arXiv 2406.11896.
    Settings: gamma 0.5, cost 0.05, top 10 %, a buffer of 2000 steps (10 training steps here).
    Deviation: one value head, learning 1[G > 0] of the state before each step; the value of the task is the step value of its
    first state; the offline phase is the cold start."""
    return Recipe(
        advantage=GoodSteps(gamma, cost),
        ratio=OnPolicy(),
        aggregate=Sum(TURN),
        keep=TopOfBatch(share, OutcomeAboveValue()),
        penalties=(WeightedPenalty(value_weight, StepCrossEntropy(ReturnToGo(gamma)), Sum(TURN), rows=AllTokens()),),
        replay=RecentBuffer(oldest, share=1.0, above=-1.0),
    )


class UtteranceCriticError(Penalty):
    """Σ over both critics of (Q − r − γ V̄(s′))² + (V − Q̄(s, a))², bars: target networks.

    The value after the last turn is 0. One cost per turn; turns without tokens have none. V learns from fresh turns alone: the
    action of a replayed turn is an older policy's."""

    reads = frozenset({*TURN_CRITIC, *TURN_CRITIC_TARGET})
    gamma: float = number(0.9, least=0, most=1)

    def __call__(self, view: MicroBatchView) -> Field:
        q, q_twin, v, v_twin = (view[s] for s in TURN_CRITIC)
        slow_q, slow_q_twin, slow_v, slow_v_twin = (view.batch[s] for s in TURN_CRITIC_TARGET)
        reward = view.batch.reward.sum(TURN)
        target = lambda after: reward + self.gamma * shift_turns(after, 1, 0.0)  # noqa: E731
        of_q = (q - target(slow_v)) ** 2 + (q_twin - target(slow_v_twin)) ** 2
        of_v = (v - slow_q) ** 2 + (v_twin - slow_q_twin) ** 2
        return of_q + where(view.batch.replayed, 0.0, of_v)


def utterance_lead(view: StepView) -> Field:
    """A = max(Q, Q′) − max(V, V′) of each turn, by the critics of the moment before the step."""
    q, q_twin, v, v_twin = (view[s].detach() for s in TURN_CRITIC)
    return q.maximum(q_twin) - v.maximum(v_twin)


class LeadAbove(Mask):
    """Turns whose A = max(Q, Q′) − max(V, V′) is above ``least``."""

    reads_before_step = frozenset(TURN_CRITIC)
    reason = "no action of the state is good enough"
    least: float = 0.1

    def plan(self, view: StepView) -> dict[object, Field]:
        return {self: utterance_lead(view) > self.least}


class BestActionOfState(Mask):
    """Of the turns that a group took in one state, the one with the largest A = max(Q, Q′) − max(V, V′): one for each state."""

    requires = frozenset({"state"})
    reads_before_step = frozenset(TURN_CRITIC)
    reason = "another action of the state is better"

    def plan(self, view: StepView) -> dict[object, Field]:
        batch, tree = view.batch, view.batch.tree
        a = utterance_lead(view)
        rounded = a.map(lambda x: x.double().round(decimals=DECIMALS))
        has_tokens = (tree.size(TOKEN, TURN) > 0).to(torch.int64)
        peers = Partition.by(tree, TURN, batch.group, batch.state, has_tokens)
        lot = where(rounded >= rounded.max(peers), batch.uniform_draws(TURN).to(torch.float64), -1.0)
        chosen = (lot >= lot.max(peers)) & (lot >= 0) & (has_tokens > 0)
        return {self: chosen}


def digi_q(
    gamma: float = 0.9,
    least: float = 0.1,
    value_weight: float = 1.0,
    passes: int = 10,
    warm: int = 10,
    trunks: int = 2,
    oldest: int = 10,
) -> Recipe:
    """Digi-Q: twin TD critics of turns; imitates the best of the actions tried in a state, if its advantage is large enough.

    Q → r + γ V̄(s'), V → Q̄(s, a);  A = max Q − max V over the heads;
    ∇J = mean over states of 1[A > least] ∇ log π(best action)

    Paper: Digi-Q: Learning Q-Value Functions for Training Device-Control Agents, arXiv 2502.15760.
    Settings: gamma 0.9, least 0.1 or 0.05, 4 to 16 actions of each state.
    Deviation: the actions of a state are the forks of a tree and what the group took there; heads read the policy's detached
    states, not those of a frozen model fine-tuned to foresee changes. Replayed turns have their one logged action."""
    return Recipe(
        advantage=Constant(1.0), ratio=OnPolicy(), aggregate=Sum(TURN), keep=BestActionOfState(),
        gate=NoGate().where(LeadAbove(least)),
        penalties=(WeightedPenalty(value_weight, UtteranceCriticError(gamma), Mean(TURN), rows=AllTokens()),),
        control=CriticsFirst(passes, warm), strategy=Branch(trunks, "every"), budget=Fixed(8, 16),
        replay=RecentBuffer(oldest, share=1.0),
    )  # fmt: skip


def pivotrl(clip: float = 0.2, pool: int = 256, below: float = 0.9, renew: bool = False) -> Recipe:
    """PivotRL: one-turn rollouts at those turns of an expert where the first policy sometimes does as well, and sometimes not.

    pivots: 0 < μ < below, μ of the first policy's turns there;  R = 1 if a turn does what the expert's does;
    A = R − mean of the others;  clipped token mean, no KL

    Paper: PivotRL: High Accuracy Agentic Post-Training at Low Compute Cost, arXiv 2603.21383.
    Settings: clip 0.2, 64 pivots of 16 turns, 8 turns to profile (here a group of 16); the threshold is ours. With renew the
    policy of a turn's latest visit profiles it again.
    Deviation: the profiling pass takes the first ``pool`` groups, which are not trained on. What counts as doing the same is the
    environment's (turnwise.environments.expert_turns, or demonstrated:FILE for dialogues of a file)."""
    return Recipe(
        advantage=LeaveOneOut(), gate=Clip(clip, clip), aggregate=Mean(TOKEN), strategy=OneTurn(),
        sampler=PivotFilter(pool, below, renew), admission=AfterDraws(pool), budget=Fixed(8, 16),
    )  # fmt: skip


UNKNOWN = -1  # a state that was not recorded


def _first_difference(columns: tuple[list[int], list[int], list[int]], a: int, b: int, turns: int) -> int | None:
    """The turn index at which two trajectories fork; None if they do not."""
    state, action, tokens = columns
    for k in range(turns):
        if state[a + k] != state[b + k] or state[a + k] == UNKNOWN:
            return None
        if action[a + k] != action[b + k]:
            return k if tokens[a + k] and tokens[b + k] else None
    return None


class ForkingTurnPairs(PairSelector):
    """The best and the worst of a group, if they fork: at the first turn with another state or action, the state is the same
    and known, and both turns have tokens."""

    requires = frozenset({"state"})

    def sign(self, batch: Batch) -> Field:
        forks = where(self.forking_turns(batch), 1.0, 0.0).sum(TRAJECTORY)
        return BestWorstPairs().sign(batch) * forks

    def forking_turns(self, batch: Batch) -> Field:
        """True for the two turns of each pair that are compared. At TURN."""
        sign, group = BestWorstPairs().sign(batch).x, batch.tree.parents[2].tolist()
        best, worst = ((side > 0).nonzero().squeeze(1).tolist() for side in (sign, -sign))
        rejected = {group[i]: i for i in worst}
        sizes = batch.tree.size(TURN, TRAJECTORY).x
        begin = (sizes.cumsum(0) - sizes).tolist()
        columns = (batch.state.x.tolist(), batch.action.x.tolist(), batch.tree.size(TOKEN, TURN).x.tolist())
        chosen = torch.zeros(batch.tree.count(TURN), dtype=torch.bool, device=sign.device)
        for i in best:
            j = rejected[group[i]]
            at = _first_difference(columns, begin[i], begin[j], int(min(sizes[i], sizes[j])))
            if at is not None:
                chosen[[begin[i] + at, begin[j] + at]] = True
        return Field(batch.tree, TURN, chosen)


class ForkingTurnScore(TrajectoryScore):
    """s = Σ over the forking turn of log π − log π_ref; 0 for a trajectory without one."""

    reads = frozenset({Signal.REFERENCE})
    pairs: ForkingTurnPairs

    def __call__(self, view: MicroBatchView) -> Field:
        return where(self.pairs.forking_turns(view.batch), view.logp - view[Signal.REFERENCE], 0.0).sum(TRAJECTORY)


@declares(Kind.PREFERENCE)
def evocua(beta: float = 0.1, imitation: float = 1.0) -> Recipe:
    """EvoCUA (step-level pairs): DPO on the first turn where a success and a failure of a task differ; imitates successes.

    d = Σ over the forking turn of log π/π_ref, success minus failure;  L = mean −log σ(βd) + α · token mean of −log π(success)

    Paper: EvoCUA: Evolving Computer Use Agents via Learning from Scalable Synthetic Experience, arXiv 2601.15876.
    Settings: beta 0.1 and imitation 1 are ours; both stages in one loss instead of one after the other.
    Deviation: one pair by group, its best and its worst trajectory; no rewritten reasoning, no reflection pairs at the turn after
    the fork, no synthesis of tasks, no levels of rollouts (`--budget dart` spends by success)."""
    pairs = ForkingTurnPairs()
    loss = PreferenceLoss(LogisticLoss(beta), ForkingTurnScore(pairs), pairs)
    ranked = WeightedPenalty(1.0, loss, Mean(GROUP), rows=pairs)
    good = AllOf((FromOrigin("policy"), Succeeded()))
    copied = WeightedPenalty(imitation, NegativeLogLikelihood(), Mean(TOKEN), rows=good)
    return Recipe(advantage=Constant(0.0), ratio=OnPolicy(), penalties=(ranked, copied))


def craft_gui(
    stage: int = 400, window: int = 64, solved: float = 0.9, review: float = 0.2, clip: float = 0.2
) -> Recipe:
    """CRAFT-GUI: GRPO over stages of rising difficulty, each until it is solved, with a share of earlier tasks.

    The objective of grpo, without a KL; tasks of stage s + 1 are not drawn before stage s has ended

    Paper: CRAFT-GUI: Curriculum-Reinforced Agent For GUI Tasks, arXiv 2508.11360.
    Settings: the lengths of stages, the share of review and the clip are ours.
    Deviation: difficulty is the environment's own. The judged part of its reward is --judge, whose weight is --judge-weight."""
    several = frozenset({"difficulties"})
    return replace(grpo(clip, 0.0), sampler=Stages(stage, window, solved, review), requires=several)


@suggests(demos="oracle")
def dynaweb(share: float = 0.5, low: float = 3e-4, high: float = 4e-4) -> Recipe:
    """DynaWeb: dreamed rollouts mixed with real expert trajectories, trained on together by a sequence-level clipped ratio.

    sᵢ = exp( 1/|yᵢ| Σₜ log ρₜ ), ρ = 1 for an expert;  A = z-score over the mixed group;  J = 1/G Σᵢ min(sᵢAᵢ, clip(sᵢ)Aᵢ)

    Paper: DynaWeb: Model-Based Reinforcement Learning of Web Agents, arXiv 2601.22149.
    Settings: 8 rollouts of at most 5 dreamed steps, share 0.5 (some summaries: 0.4), temperature 0.7, top-p 0.9. The
    environment must dream (turnwise.environments.dreamed; examples/dreamed_keydoor.py trains its world model).
    Deviation: the bounds are GSPO's; an expert's trajectory counts as sampled by the present policy."""
    ratio = RatioByOrigin(FromOrigin("expert"), OnPolicy(), Importance(TRAJECTORY, cap=10.0))
    return replace(gspo(low, high), ratio=ratio, replay=ExpertItems(share), requires=frozenset({"world model"}))
