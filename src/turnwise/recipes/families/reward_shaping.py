"""Reward shaping: tracked baselines, replayed successes, bonuses from tools, questions, judges and hidden states."""

from __future__ import annotations

import math
from dataclasses import replace

from turnwise.algebra.advantage import Standardise
from turnwise.algebra.aggregate import Mean, Sum
from turnwise.algebra.control import Passes
from turnwise.algebra.gate import Clip
from turnwise.algebra.peers import SameTokenIndex
from turnwise.algebra.penalty import WeightedPenalty
from turnwise.algebra.piece import State, StepView, check
from turnwise.algebra.term import Term
from turnwise.algebra.value import Outcome, SpreadTo, SumToGo, is_last
from turnwise.core.batch import Batch
from turnwise.core.columns import Column
from turnwise.core.levels import BATCH, GROUP, TOKEN, TRAJECTORY, TURN, Field, Partition, where
from turnwise.core.limits import number
from turnwise.core.signals import Signal
from turnwise.credit.fact import Fact
from turnwise.credit.selectors import FromOrigin, Not, OnSelected, SelectedPeers, Selector
from turnwise.credit.self_imitation import CosineWarmup, DropHighCovariance, PastMedian, ReplayLoss, ToolCallBonus
from turnwise.credit.tracker import Solved, SuccessTracker, task_keys
from turnwise.data.replay import RecentBuffer
from turnwise.maths.lazy_torch import torch
from turnwise.maths.segments import rank_by_value
from turnwise.recipes.families.critic_free import grpo
from turnwise.recipes.recipe import Kind, Recipe, declares
from turnwise.rollout.strategies import ForcedModes, Reworded
from turnwise.tasks.budgets import Fixed
from turnwise.tasks.samplers import CyclePool, UncertaintySampler

KIND = Kind.CREDIT

# --------------------------------------------------------------- between the steps


class RetentionByDrift(Term):
    """ρ = clip(2^{−D/half}, low, high): the share of a tracker's counts kept after a policy drift D."""

    drift: Term
    half: float = number(0.06, above=0, why="the drift that halves the counts")
    low: float = number(0.875, least=0, most="high")
    high: float = number(0.96, most=1)

    def __call__(self, batch: Batch) -> Field:
        return self.drift(batch).map(lambda d: torch.exp2(-d / self.half)).clamp(self.low, self.high)


class DriftSinceVisit(Term):
    """D = Σ over the steps since a task was last visited of mean |log π − log π_previous|; 0 for a new task. At GROUP.

    By the triangle inequality it is at least the mean |log π − log π_then| it stands for, had each step's batch shown
    the same tokens. No old trajectory has to be stored and scored again."""

    reads = frozenset({Signal.PROXIMAL, Signal.PREVIOUS})
    updates_after_credit = True

    def initial_state(self) -> State:
        return {"travelled": 0.0, "tasks": {}}

    def memory_columns(self, state: State, batch: Batch) -> dict[object, Field]:
        then = [state["tasks"].get(task, float("nan")) for task in task_keys(batch)]
        return {
            (self, "travelled"): batch.tree.full(BATCH, state["travelled"], torch.float64),
            (self, "then"): batch.tree.field(GROUP, then, torch.float64),
        }

    def _now(self, batch: Batch) -> Field:
        step = (batch[Signal.PROXIMAL] - batch[Signal.PREVIOUS]).abs().mean(BATCH)
        return batch[self, "travelled"] + step.to(torch.float64)

    def next_state(self, state: State, view: StepView) -> State:
        now = float(self._now(view.batch).item)
        return {"travelled": now, "tasks": {**state["tasks"], **dict.fromkeys(task_keys(view.batch), now)}}

    def __call__(self, batch: Batch) -> Field:
        at_visit = batch[self, "then"]
        return where(at_visit.map(torch.isnan), 0.0, self._now(batch) - at_visit)


def spo_single(
    half: float = 0.06,
    low: float = 0.875,
    high: float = 0.96,
    strength: float = 8.0,
    clip: float = 0.2,
    wide: float = 0.28,
) -> Recipe:
    """SPO (single-stream): one rollout per task against a tracked success rate, normalised over the batch.

    A = (r − v − mean)/(std + ε) over the batch, v = a/(a + b); then a ← ρa + r, b ← ρb + 1 − r, ρ = clip(2^{−D/half},
    low, high); tasks are sampled by √(v(1 − v)) + 0.05, without replacement

    Paper: Single-stream Policy Optimization, arXiv 2509.13232.
    Settings: half 0.06, low 0.875, high 0.96, 8 tries of a task before its first visit, clip 0.2/0.28, 768 tasks a step.
    Deviation: D is not the drift on the task's last response but the sum of the drifts, each measured on its step's
    batch, of the steps since (no less, by the triangle inequality); without the facts ``tries`` and ``solved`` a task
    starts at ½; the sampler keeps its own counts and decays them at a fixed rate; 64 tasks a step from a pool of 1024."""
    keep = RetentionByDrift(DriftSinceVisit(), half, low, high)
    return Recipe(
        advantage=Standardise(Solved() - SuccessTracker(keep=keep, strength=strength), BATCH, eps=1e-8),
        gate=Clip(clip, wide),
        aggregate=Mean(TOKEN),
        budget=Fixed(64, 1),
        sampler=UncertaintySampler(),
        control=Passes(minibatches=4),
    )


class RecalibratedReturn(Term):
    """value − baseline, the advantage of a replayed trajectory today; ``scale`` divides by spread + ε."""

    value: Term
    baseline: Term
    spread: Term
    scale: bool = False
    eps: float = 1e-6

    def __call__(self, batch: Batch) -> Field:
        advantage = self.value(batch) - self.baseline(batch)
        return advantage / (self.spread(batch) + self.eps) if self.scale else advantage


class NonNegativeReplay(Selector):
    """Replayed trajectories at most ``oldest`` steps old with a mean advantage ≥ 0: the largest power of two of them,
    at most ``size``, in the order of their seeds."""

    requires = frozenset({"replay"})
    oldest: int = number(5, least=0)
    size: int = number(2048, least=1)

    def select(self, batch: Batch) -> Field:
        tree = batch.tree
        good = (batch[Column.ADVANTAGE].at(TOKEN).mean(TRAJECTORY) >= 0) & (tree.size(TOKEN, TRAJECTORY) > 0)
        eligible = (batch.replayed & good & (Fact("age", missing=0.0)(batch) <= self.oldest)).x
        limit = min(int(eligible.sum()), self.size)
        number = 1 << (limit.bit_length() - 1) if limit else 0
        order = torch.where(eligible, batch.seed.x, torch.iinfo(torch.int64).max)
        chosen = torch.argsort(order, stable=True)[:number]
        return Field(tree, TRAJECTORY, torch.zeros_like(eligible).index_fill(0, chosen, True))


@declares(Kind.DATA)
def spear(
    gamma: float = 1.0, warm: float = 100.0, horizon: float = 200.0, oldest: int = 5, size: int = 2048,
    scale: bool = False, fraction: float = 0.02, low: float = 2.0, high: float = 60.0, length: float = 64.0,
) -> Recipe:  # fmt: skip
    """SPEAR (agent runs): replays trajectories at or above the past median return; bonus per turn with a tool call.

    fresh: A = R + b − mean, b = min(1, 0.1 tool turns)(cos(πt/T) + 1)/2;  replayed: A = R − median of recent group means,
    kept where A ≥ 0, in a loss of their own, weight γ (1 − cos(πt/T'))/2, less some tokens of high covariance

    Paper: Self-imitation with Progressive Exploration for Agentic RL, arXiv 2509.22601.
    Settings: gamma 1, T' 100 (300 with code tools), T 200, 5 steps, 2048 trajectories, 2 % of tokens with covariance in
    (2, 60), clip 0.2/0.28, no std, no KL.
    Deviation: replayed trajectories are sampled each step, not all at once when the buffer is full; unparsable or
    repetitive outputs and tasks with little spread are not filtered out. `spear_replay` clamps the replayed advantage
    at 0 instead."""
    past, fresh = NonNegativeReplay(oldest, size), Not(FromOrigin("replay"))
    value, median = Outcome() + ToolCallBonus(horizon=horizon), PastMedian(Outcome(), fresh)
    recalibrated = RecalibratedReturn(Outcome(), median, PastMedian(Outcome(), fresh, statistic="std"), scale)
    loss = ReplayLoss(Clip(0.2, 0.28).where(DropHighCovariance(past, fraction, low, high)))
    return Recipe(
        advantage=OnSelected(fresh, Standardise(value, SelectedPeers(fresh), scale=False))
        + OnSelected(FromOrigin("replay"), recalibrated),
        gate=Clip(0.2, 0.28), aggregate=Sum(TRAJECTORY, length=length), keep=FromOrigin("policy"),
        penalties=(WeightedPenalty(CosineWarmup(gamma, warm), loss, rows=past),), replay=RecentBuffer(oldest, size),
    )  # fmt: skip


# ------------------------------------------------------------------ hidden states


SIGNALS = {
    "push": Signal.EFFECTIVE_RANK_ACCELERATION,
    "speed": Signal.EFFECTIVE_RANK_VELOCITY,
    "rank": Signal.EFFECTIVE_RANK,
}


class EffectiveRankPotential(Term):
    """Φ = Σ w tanh(rel), rel = clip((x − μ)/(|μ| + ε), ±5) of acceleration, velocity and rank against their running
    means μ.

    w = β · explore + (1 − β) · exploit, β = σ(sharpness · rel of the acceleration). μ ← (1 − rate) μ + rate · batch
    mean, after the batch is credited; before the first batch Φ = 0. At TRAJECTORY."""

    reads = frozenset(SIGNALS.values())
    updates_after_credit = True
    rate: float = number(0.3, least=0, most=1)
    sharpness: float = 2.0
    explore: tuple[float, ...] = (0.0, 0.0, 1.0)
    exploit: tuple[float, ...] = (0.0, 1.0, 0.0)
    eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, weights in (("explore", self.explore), ("exploit", self.exploit)):
            check(len(weights) == 3, f"{name} has {len(weights)} weights; write three: of push, speed and rank")

    def initial_state(self) -> State:
        return {"seen": 0.0, **dict.fromkeys(SIGNALS, 0.0)}

    def next_state(self, state: State, view: StepView) -> State:
        batch = view.batch
        has_tokens = where(batch.tree.size(TOKEN, TRAJECTORY) > 0, 1.0, 0.0)
        count = float(has_tokens.sum(BATCH).item)
        if not count:
            return state
        mean = {name: float((has_tokens * batch[s]).sum(BATCH).item) / count for name, s in SIGNALS.items()}
        step = self.rate if state["seen"] else 1.0
        return {"seen": 1.0, **{name: (1 - step) * state[name] + step * mean[name] for name in SIGNALS}}

    def __call__(self, batch: Batch) -> Field:
        pairs = [(batch[signal].to(torch.float64), batch[self, name]) for name, signal in SIGNALS.items()]
        relative = [((x - mu) / (mu.abs() + self.eps)).clamp(-5.0, 5.0) for x, mu in pairs]
        beta = (self.sharpness * relative[0]).map(torch.sigmoid)
        phi = batch.tree.full(TRAJECTORY, 0.0, torch.float64)
        for x, up, down in zip(relative, self.explore, self.exploit):
            phi = phi + (beta * up + (1 - beta) * down) * x.map(torch.tanh)
        return where(batch[self, "seen"] > 0, phi, 0.0)


class CappedBonus(Term):
    """A + min(max(bonus, 0), |A|/κ): for κ > 1 the sign stays. Only at a trajectory's last token, or at
    ``every_token``."""

    term: Term
    bonus: Term
    kappa: float = number(2.0, above=0, why="inf for no bonus")
    every_token: bool = False

    def __call__(self, batch: Batch) -> Field:
        a = self.term(batch)
        shaped = a + self.bonus(batch).clamp(low=0.0).minimum(a.abs() / self.kappa)
        return shaped if self.every_token else where(Field(batch.tree, TOKEN, is_last(batch, TOKEN)), shaped, a)


def verl_rank(
    follow: float = 0.3,
    sharpness: float = 2.0,
    explore: tuple[float, ...] = (0.0, 0.0, 1.0),
    exploit: tuple[float, ...] = (0.0, 1.0, 0.0),
    kappa: float = 2.0,
    everywhere: bool = False,
    clip: float = 0.2,
    kl: float = 1e-3,
) -> Recipe:
    """VERL (effective rank): a capped advantage bonus from the effective rank of hidden states and its dynamics.

    A + min(max(Φ, 0), |A|/κ),  Φ = Σ w tanh(rel),  w = β explore + (1 − β) exploit,  β = σ(sharpness · rel of the acceleration)

    Paper: Beyond the Exploration-Exploitation Trade-off: A Hidden State Approach for LLM Reasoning in RLVR, arXiv 2509.23808.
    Settings: follow 0.3, sharpness 2, kappa 2, weights of (acceleration, speed, rank) as given, prefixes every 40 tokens, token
    mean, KL 1e-3.
    Deviation: as in its code only the last token gets the bonus; everywhere is the paper's. No entropy bonus (0.001 there)."""
    potential = EffectiveRankPotential(follow, sharpness, explore, exploit)
    credit = CappedBonus(Standardise(), potential, kappa, everywhere)
    return replace(grpo(clip, kl), advantage=credit, aggregate=Mean(TOKEN), control=Passes(minibatches=2))


class FlowOutlierScore(Term):
    """Distance of a token's hidden states from the flow of good ones, rescaled to [0, 1] within its trajectory; kept
    only above ``threshold`` and for the ``top`` highest (earlier ones first), else 0. At TOKEN."""

    reads = frozenset({Signal.FLOW_DEVIATION})
    threshold: float = number(0.6, least=0, most=1)
    top: int = number(15, least=0)

    def __call__(self, batch: Batch) -> Field:
        tree, raw = batch.tree, batch[Signal.FLOW_DEVIATION].to(torch.float64)
        low, high = raw.min(TRAJECTORY), raw.max(TRAJECTORY)
        score = where(high > low, (raw - low) / where(high > low, high - low, 1.0), 0.0)
        rank = rank_by_value(-score.x, tree.ancestor(TOKEN, TRAJECTORY), tree.count(TRAJECTORY))
        return where((score > self.threshold) & Field(tree, TOKEN, rank < self.top), score, 0.0)


def rlfr(threshold: float = 0.6, top: int = 15, coef: float = 0.01, clip: float = 0.2, dual: float = 3.0) -> Recipe:
    """RLFR (last layer, flow fitted during the run): penalises tokens whose hidden states leave the flow of good reasoning.

    Aₜ = z − coef Σ_{s≥t} score_s, z = (R − mean)/(std + ε), score in [0, 1] of the trajectory, above threshold, top k only

    Paper: Extending RL for LLMs with Flow Environment, arXiv 2510.10201.
    Settings: threshold 0.6, top 15, coef 0.01, layers at 25, 50 and 75 % of the depth, noise level 0.8, dual clip 3
    (ratio at most 3 where A < 0), mean over the tokens of each trajectory, no KL.
    Deviation: the last hidden state instead of three layers; the flow learns from successes of the run, without
    pre-training on expert traces."""
    credit = Standardise() - coef * SumToGo(FlowOutlierScore(threshold, top))
    return Recipe(advantage=credit, gate=Clip(clip, clip, dual))


# ---------------------------------------------------------------- shaped outcomes


class UsedAction(Term):
    """1 for a trajectory that used the auxiliary action: the fact ``action`` where recorded, else whether it called a
    tool."""

    idle_without = frozenset({"tools"})

    def __call__(self, batch: Batch) -> Field:
        called = where(batch.tool_calls.max(TRAJECTORY) > 0, 1.0, 0.0)
        if "action" not in batch.facts:
            return called
        recorded = Fact("action")(batch)
        return where(recorded.map(torch.isnan), called, where(recorded > 0, 1.0, 0.0))


class GroupContrast(Term):
    """±1 for trajectories that ``used`` the action, 0 for the others: + where the users' mean return in the group
    exceeds that of the others by more than ``threshold``, − where it falls short by more. 0 where all or none used
    it."""

    compares_peers = True
    used: Term
    threshold: float = number(0.0, least=0)

    def __call__(self, batch: Batch) -> Field:
        outcome = batch.reward.sum(TRAJECTORY).to(torch.float64)
        used = where(self.used(batch) > 0, 1.0, 0.0)
        mean = lambda who: (who * outcome).sum(GROUP) / who.sum(GROUP).clamp(low=1.0)  # noqa: E731
        gap = mean(used) - mean(1 - used)
        both = (used.sum(GROUP) > 0) & ((1 - used).sum(GROUP) > 0)
        return used * where(both & (gap.abs() > self.threshold), gap.map(torch.sign), 0.0)


class NormalisedLength(Term):
    """min(1, n / longest), n the sampled tokens of a trajectory."""

    longest: int = number(1024, least=1)

    def __call__(self, batch: Batch) -> Field:
        return (batch.tree.size(TOKEN, TRAJECTORY).to(torch.float64) / self.longest).clamp(high=1.0)


def gcpo(
    threshold: float = 0.0, length: float = 1.0, longest: int = 1024, form: float = 1.0, clip: float = 0.2
) -> Recipe:
    """GCPO: rewards an auxiliary action where its users did better than the rest of the group, penalises it otherwise.

    R ← R + form · format ± 1[acted] + length · min(1, n/longest), the sign by the group; then as GRPO

    Paper: GeometryZero: Improving Geometry Solving with Group Contrastive Policy Optimization, arXiv 2506.07160.
    Settings: threshold, length and longest are guesses.
    Deviation: one group is split by whether the action was taken (fact ``action``, else any tool call); ``format`` is a fact."""
    shaped = (
        Outcome()
        + GroupContrast(UsedAction(), threshold)
        + length * NormalisedLength(longest)
        + form * Fact("format", missing=0.0)
    )
    return Recipe(advantage=Standardise(shaped), gate=Clip(clip, clip))


class ShapleyInformationGain(Term):
    """G = Σ ω over the pieces of information in the answer to a question; 0 for turns that ask nothing. At TURN.

    ω = softmax(φ / temperature), φₖ the Shapley value of piece k, the fact ``worth k`` of the trajectory, k = 0, 1 …; the
    turn fact ``uncovered`` has bit k set for each piece k in the answer."""

    requires = frozenset({"turn fact question", "turn fact uncovered", "fact worth 0"})
    temperature: float = number(2.0, above=0)
    # pieces from earlier turns do not count
    first_time_only: bool = False

    def __call__(self, batch: Batch) -> Field:
        count = sum(name.startswith("worth ") for name in batch.facts)
        values = [Fact(f"worth {k}", missing=-torch.inf)(batch) for k in range(count)] or [Fact("worth 0")(batch)]
        weight = torch.softmax(torch.stack([w.x for w in values]) / self.temperature, 0).nan_to_num(0.0)
        questions = where(Fact("question", TURN, missing=0.0)(batch) > 0, 1.0, 0.0)
        bits = Fact("uncovered", TURN, missing=0.0)(batch).to(torch.int64)
        gain = batch.tree.full(TURN, 0.0, torch.float64)
        for k in range(count):  # over pieces of information; turns are vectorised
            answered = questions * bits.map(lambda b: (b >> k) & 1)  # noqa: B023
            if self.first_time_only:
                answered = where(answered.running_sum(TRAJECTORY) - answered > 0, 0.0, answered)
            gain = gain + answered * Field(batch.tree, TRAJECTORY, weight[k])
        return gain


class QuestionReward(Term):
    """Reward of each token of a turn: α G + β G · solved for a question, γ · solved for the answer, both plus ``form``
    times the turn fact ``format``; 0 for other turns. At TURN."""

    requires = frozenset({"turn fact question", "turn fact answer"})
    gain: Term
    alpha: float = 2.0
    beta: float = 1.0
    gamma: float = 3.0
    form: float = 1.0

    def __call__(self, batch: Batch) -> Field:
        fact = lambda name: Fact(name, TURN, missing=0.0)(batch)  # noqa: E731
        gain, solved, form = self.gain(batch), Solved()(batch), self.form * fact("format")
        question_reward = self.alpha * gain + self.beta * gain * solved + form
        return where(fact("question") > 0, question_reward, where(fact("answer") > 0, self.gamma * solved + form, 0.0))


def promed(
    alpha: float = 2.0,
    beta: float = 1.0,
    gamma: float = 3.0,
    form: float = 1.0,
    softness: float = 2.0,
    places: bool = True,
    fresh: bool = False,
    clip: float = 0.1,
    kl: float = 0.04,
) -> Recipe:
    """ProMed (its reward; Shapley values come from the environment): rewards a question by the worth of what its answer tells.

    r = α G + β G 1[solved] + format for questions, γ 1[solved] + format for the answer;  A = r − mean at the same place

    Paper: Shapley Information Gain Guided RL for Proactive Medical LLMs, arXiv 2508.13514.
    Settings: alpha 2, beta 1, gamma 3, format 1, softmax temperature (softness) 2, groups of 4, clip 0.1, KL 0.04.
    Deviation: environment or data record the Shapley values (facts ``worth k``; examples/shapley_of_facts.py estimates them
    with a model) and the pieces in an answer (turn fact ``uncovered``, one bit each); as in its code a piece counts every time,
    with fresh only the first time."""
    reward = QuestionReward(ShapleyInformationGain(softness, fresh), alpha, beta, gamma, form)
    credit = Standardise(SpreadTo(TOKEN, reward), SameTokenIndex(places), scale=False)
    return replace(grpo(clip, kl), advantage=credit, budget=Fixed(8, 4))


class FlawPenalisedOutcome(Term):
    """+1 for a solved trajectory, −1 for a failed one; a solved one with an error in its reasoning loses ``penalty``.

    The fact ``error`` is the position of the error, −1 for none; failed trajectories need not be checked."""

    requires = frozenset({"fact error"})
    penalty: float = number(1.0, least=0)

    def __call__(self, batch: Batch) -> Field:
        solved = Solved()(batch)
        deduction = where(Fact("error", missing=-1.0)(batch) >= 0, self.penalty, 0.0)
        return 2 * solved - 1 - solved * deduction


def fapo(penalty: float = 1.0, low: float = 0.2, high: float = 0.28, dual: float | None = 10.0) -> Recipe:
    """FAPO: penalises right answers with flawed reasoning, by the verdict of a reward model or of the environment.

    R = ±1 by the verdict, less ``penalty`` for a right answer in which an error was found;  A = (R − mean)/(std + ε)

    Paper: Flawed-Aware Policy Optimization, arXiv 2510.22543.
    Settings: penalty 1, clip 0.2/0.28, dual 10, G 8; the reward model has 4 B parameters and learns to name the first wrong step
    (turnwise.environments.first_error, then --judge first_error:FOLDER; examples/flaw_finder.py does both).
    Deviation: without a judge the fact ``error`` is the environment's own."""
    credit = Standardise(FlawPenalisedOutcome(penalty))
    return Recipe(advantage=credit, gate=Clip(low, high, dual), aggregate=Mean(TOKEN), control=Passes(minibatches=4))


def _calls(batch: Batch) -> Field:
    return batch.tool_calls.to(torch.float64).sum(TRAJECTORY)


class ToolEfficiencyReward(Term):
    """scale · f for solved trajectories, 0 for others, from m tool calls and n, the fewest that ever solved the task.

    f = sin(π m / (m + n)), which is 1 at m = n; where n = 0, cos(π m / (2m + slack))."""

    requires = frozenset({"tools"})
    scale: float = 1.0
    slack: float = number(4.0, above=0)
    # always the cosine
    cosine_only: bool = False

    def initial_state(self) -> State:
        return {"tasks": {}}

    def next_state(self, state: State, view: StepView) -> State:
        batch = view.batch
        least_calls = where(Solved()(batch) > 0, _calls(batch), torch.inf).min(GROUP)
        fewest = dict(state["tasks"])
        for task, n in zip(task_keys(batch), least_calls.x.tolist()):
            if math.isfinite(n):
                fewest[task] = min(n, fewest.get(task, n))
        return {"tasks": fewest}

    def memory_columns(self, state: State, batch: Batch) -> dict[object, Field]:
        fewest = [state["tasks"].get(task, 0.0) for task in task_keys(batch)]
        return {(self, "fewest"): batch.tree.field(GROUP, fewest, torch.float64)}

    def __call__(self, batch: Batch) -> Field:
        m, n = _calls(batch), batch[self, "fewest"]
        cosine = (math.pi * m / (2 * m + self.slack)).map(torch.cos)
        sine = (math.pi * m / (m + n).clamp(low=1.0)).map(torch.sin)
        factor = cosine if self.cosine_only else where(n > 0, sine, cosine)
        return self.scale * factor * Solved()(batch)


def otc(alpha: float = 1.0, slack: float = 4.0, alone: bool = False, clip: float = 0.2, pool: int = 128) -> Recipe:
    """OTC: scales the reward of a solved task by how close its tool calls are to the fewest that ever solved it.

    R = α sin(πm/(m + n)) 1[solved], n the fewest calls over all visits; n = 0 (or alone): α cos(πm/(2m + slack)) 1[solved]

    Paper: Acting Less is Reasoning More! Teaching Model to Act Efficiently, arXiv 2504.14870.
    Settings: alpha 1; slack about the largest number of calls (a guess); repeated passes over a pool of 128 tasks (ours):
    the fewest calls are remembered across visits.
    Deviation: alone is the factor of its PPO form, here on the group's advantage."""
    credit = Standardise(ToolEfficiencyReward(alpha, slack, alone))
    return Recipe(advantage=credit, gate=Clip(clip, clip), sampler=CyclePool(pool))


class CheapestModePays(Term):
    """R for the cheapest mode, mode 0, and on hard tasks; R·(1 − p^α) for another mode on an easy one. A task is easy if forced
    rollouts of mode 0 succeed at a rate of at least ``easy``; p is the success rate of all forced rollouts. R is an outcome
    between 0 and 1; without forced rollouts every mode gets it. At TRAJECTORY."""

    alpha: float = number(2.0, above=0)
    easy: float = number(0.5, above=0, most=1)

    def __call__(self, batch: Batch) -> Field:
        outcome = batch.reward.sum(TRAJECTORY)
        mode, forced = Fact("mode", missing=0.0)(batch), Fact("forced", missing=0.0)(batch) > 0.5
        cheapest = mode.map(lambda x: x == 0)
        right, every = where(outcome > 0, 1.0, 0.0), where(forced, 1.0, 0.0)
        cheap = where(cheapest, every, 0.0)
        rate = lambda rows: (rows * right).sum(GROUP) / rows.sum(GROUP).clamp(low=1.0)  # noqa: E731
        charged = 1 - rate(every).map(lambda p: torch.pow(p, self.alpha))
        factor = where(rate(cheap) >= self.easy, where(cheapest, 1.0, charged), 1.0)
        return outcome * factor


def a2fm(
    alpha: float = 2.0, easy: float = 0.5, clip: float = 0.2, openings: str = "answer:|<tool_call>", forced: int = 2
) -> Recipe:
    """A2FM (adaptive policy optimisation, without its SFT): expensive modes earn less on tasks that the cheapest one solves.

    R(1 − pᵅ) for another mode than the cheapest where forced rollouts of that one succeed at a rate ≥ easy, else R;  A = z-score

    Paper: A2FM: An Adaptive Agent Foundation Model for Tool-Aware Hybrid Reasoning, arXiv 2510.12838.
    Settings: alpha 2; 3 forced rollouts of each of 3 modes and 3 free ones. easy 0.5 is ours, and so are 2 forced rollouts of
    2 modes in groups of 8.
    Deviation: a mode is how a first turn begins, not a tag; only the last has tools, in rollouts and not in evaluations; correct
    means a positive reward; no judge and no format reward."""
    credit = Standardise(CheapestModePays(alpha, easy))
    return Recipe(advantage=credit, gate=Clip(clip, clip), strategy=ForcedModes(openings, forced))


class TokenEntropyReward(Term):
    """helpful · H / max H − stable · |H − mean H| in the group, H the entropy of the token frequencies of a
    trajectory."""

    compares_peers = True
    helpful: float = 1.0
    stable: float = 1.0

    def __call__(self, batch: Batch) -> Field:
        tree = batch.tree
        one = tree.full(TOKEN, 1.0, torch.float64)
        same = Partition.by(tree, TOKEN, tree.ancestor(TOKEN, TRAJECTORY), batch.token)
        h = -(one.sum(same) / one.sum(TRAJECTORY)).log().mean(TRAJECTORY)
        top = h.max(GROUP)
        richness = where(top > 0, h / where(top > 0, top, 1.0), 0.0)
        return self.helpful * richness - self.stable * (h - h.mean(GROUP)).abs()


def information_consistency(helpful: float = 1.0, stable: float = 1.0, clip: float = 0.2) -> Recipe:
    """Information-consistency GRPO (reconstructed): rewards high and equal token entropy of answers to paraphrases.

    R = helpful · H/max H − stable · |H − mean H|, H the entropy of the tokens an answer uses;  A = (R − mean)/(std + ε)

    Paper: Information-Consistent Language Model Recommendations through GRPO, arXiv 2512.12858.
    Settings: the weights are guesses.
    Deviation: the environment writes the paraphrases that the episodes of a group read; its reward is not read."""
    credit = Standardise(TokenEntropyReward(helpful, stable))
    return Recipe(advantage=credit, gate=Clip(clip, clip), strategy=Reworded())
