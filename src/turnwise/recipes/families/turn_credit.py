"""Turn-level credit: by turn, by state and by information gain."""

from __future__ import annotations

import math
from dataclasses import field, replace
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Literal

from turnwise.algebra.advantage import LeaveOneOut, Standardise, Whiten
from turnwise.algebra.aggregate import Mean, Sum
from turnwise.algebra.control import Passes
from turnwise.algebra.gate import Clip
from turnwise.algebra.mask import Mask
from turnwise.algebra.peers import Peers, PeerSpec, Same, SameTokenIndex, resolve_peers
from turnwise.algebra.penalty import KL, ClippedValueLoss, WeightedPenalty
from turnwise.algebra.piece import MicroBatchView, check
from turnwise.algebra.ratio import behaviour
from turnwise.algebra.reward import EnvironmentReward
from turnwise.algebra.term import Term
from turnwise.algebra.value import Constant, Measured, Outcome, ReturnToGo, SumToGo, is_last, shift_turns, token_reward
from turnwise.core.batch import Batch
from turnwise.core.columns import Column
from turnwise.core.levels import BATCH, GROUP, TOKEN, TRAJECTORY, TURN, Field, Partition, where
from turnwise.core.limits import choice, number
from turnwise.core.signals import Signal
from turnwise.credit.fact import Fact
from turnwise.maths import returns, segments
from turnwise.maths.lazy_torch import torch
from turnwise.recipes.families.critic_free import grpo
from turnwise.recipes.recipe import Kind, Recipe
from turnwise.tasks.admission import Spread

if TYPE_CHECKING:
    pass

KIND = Kind.CREDIT

RowUnit = Literal["turn", "trajectory"]


class BiLevelGAE(Term):
    """Bi-level GAE: first over turns at their last tokens with ``turn_gamma``, then inside each turn with ``gamma``,
    where the last token's reward is the turn's return A + v. Turns without tokens are skipped. At TOKEN."""

    reads = frozenset({Signal.OLD_VALUE})
    gamma: float = number(1.0, least=0, most=1)
    lam: float = number(0.95, least=0, most=1)
    turn_gamma: float = number(0.95, least=0, most=1)

    def __call__(self, batch: Batch) -> Field:
        tree, v = batch.tree, batch[Signal.OLD_VALUE]
        turn_end = (tree.size(TOKEN, TURN).at(TOKEN) - tree.index(TOKEN, TURN) <= 1).x
        last_tokens = turn_end.nonzero().squeeze(1)
        r = token_reward(batch).x.to(v.x.dtype)
        before, episode_end = v.x[last_tokens], is_last(batch, TOKEN)[last_tokens]
        turn_advantage = returns.gae(r[last_tokens], before, self.turn_gamma, self.lam, episode_end)
        turn_return = r.index_copy(0, last_tokens, turn_advantage + before)
        return v.map(lambda x: returns.gae(turn_return, x, self.gamma, self.lam, turn_end))


def bilevel_gae(
    clip: float = 0.2,
    gamma: float = 1.0,
    lam: float = 0.95,
    turn_gamma: float = 0.95,
    value_clip: float = 0.5,
    value_weight: float = 1.0,
) -> Recipe:
    """Bi-level GAE: GAE over turns first, then over the tokens of each turn, each with its own discount.

    turns: Aᵏ = GAE of rᵏ and v(last token), γ_turn;  inside turn k: GAE with γ, its last token is paid Aᵏ + v;  whitened

    Paper: RAGEN: Understanding Self-Evolution in LLM Agents via Multi-Turn Reinforcement Learning, arXiv 2504.20073; GAE
    itself is arXiv 1506.02438.
    Settings: gamma 1, lambda 0.95 or 1, turn gamma 0.95; clip, value clip and dual as PPO."""
    target = BiLevelGAE(gamma, lam, turn_gamma) + Measured(Signal.OLD_VALUE)
    return Recipe(
        advantage=Whiten(BiLevelGAE(gamma, lam, turn_gamma)),
        gate=Clip(clip, clip),
        aggregate=Mean(TOKEN),
        penalties=(WeightedPenalty(value_weight, ClippedValueLoss(target, value_clip)),),
    )


UNITS = {"turn": TURN, "trajectory": TRAJECTORY}


class SameTask(Peers):
    """All of a task: each trajectory once (``unit="trajectory"``), or once per turn, so that long episodes weigh more.
    ``mark``: turns with and without the mark are separate peers (not with ``unit="trajectory"``)."""

    unit: str = choice(*UNITS, default="trajectory")
    mark: Term | None = None

    def __call__(self, batch: Batch) -> Partition:
        level = UNITS[self.unit]
        keys = () if self.mark is None or level == TRAJECTORY else (self.mark(batch) > 0.5,)
        return Partition.by(batch.tree, level, batch.group, *keys)


UNKNOWN, BEFORE = -1, -2  # a state that was not recorded, and the time before the first turn


def turns_with_same_keys(batch: Batch, *keys: Field) -> Partition:
    """Turns of one task with equal keys; a turn with an unknown key has no peers."""
    unknown = torch.stack([key.x == UNKNOWN for key in keys]).any(0)
    unique = torch.where(unknown, 1 + torch.arange(unknown.numel(), device=unknown.device), 0)
    return Partition.by(batch.tree, TURN, batch.group, *keys, unique)


def similar_states(batch: Batch, likeness: float) -> Field:
    """States with similar texts of one task as one, in the order of the batch: a state joins the first whose text it resembles by
    at least ``likeness`` (twice the matching characters over all of both). At TURN."""
    if likeness >= 1 or not batch.state_keys:
        return batch.state
    seen, first = dict[int, list[int]](), dict[tuple[int, int], int]()  # by task; by task and state
    for group, state in zip(batch.group.at(TURN).x.tolist(), batch.state.x.tolist()):
        if state == UNKNOWN or (group, state) in first:
            continue
        for other in seen.setdefault(group, []):
            matcher = SequenceMatcher(None, batch.state_keys[state], batch.state_keys[other])
            # two quick upper bounds first
            if all(r() >= likeness for r in (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)):
                first[group, state] = other
                break
        else:
            seen[group].append(state)
            first[group, state] = state
    keys = zip(batch.group.at(TURN).x.tolist(), batch.state.x.tolist())
    return Field(batch.tree, TURN, batch.state.x.new_tensor([first.get(key, UNKNOWN) for key in keys]))


class SameRecentStates(Peers):
    """Turns of one task with the same last ``states`` states, the present one included: sₖ₋ₙ₊₁ … sₖ. Below 1, ``likeness`` is how
    similar two texts must be to be one state.

    A turn with a shorter history, or an unknown state in it, has no peers."""

    requires = frozenset({"state"})
    states: int = number(1, above=0, why="1 for the present one alone")
    likeness: float = number(1.0, above=0, most=1)

    def __call__(self, batch: Batch) -> Partition:
        state = similar_states(batch, self.likeness)
        return turns_with_same_keys(batch, *(shift_turns(state, -k, UNKNOWN) for k in range(self.states)))


def gigpo(
    omega: float = 1.0,
    gamma: float = 0.95,
    scale: bool = False,
    rows: RowUnit = "turn",
    clip: float = 0.2,
    beta: float = 0.01,
    likeness: float = 1.0,
) -> Recipe:
    """GiGPO: episode advantage plus a step advantage among turns of the task that start in the same state.

    Aₖ = F(R among the task) + ω F(Gₖ among turns of the task in state sₖ),  Gₖ = Σ_{j≥k} γ^{j−k} rⱼ,  F(x) = x − mean

    Paper: Group-in-Group Policy Optimization for LLM Agent Training, arXiv 2505.10978.
    Settings: omega 1, gamma 0.95, G 8, 16 tasks, k3 KL 0.01. scale=True divides by the std; rows=turn counts an
    episode's return once per turn (the released code), rows=trajectory once.
    likeness=0.95 takes similar observations for one state, as its option for similarity does.
    Deviation: a penalty on invalid actions is the environment's; a single episode gets 0."""
    peers = SameRecentStates(1, likeness)
    credit = Standardise(Outcome(), SameTask(rows), scale) + omega * Standardise(ReturnToGo(gamma), peers, scale)
    return replace(grpo(clip, beta), advantage=credit, aggregate=Mean(TOKEN))


SAME = 1e-9  # a smaller distance from the mean counts as 0, so that rounding does not decide


class HierarchyOfGroups(Term):
    """A = Σₙ wₙ Aₙ / (Σₙ wₙ + ε), wₙ = (n + 1)^α: ``value`` against peers with the same last n states, n = 1 … history
    + 1; a longer shared history weighs more.

    Aₙ = (v − mean)/(population std + ε), or without ``scale`` v − mean. Levels without peers, or with v at the mean,
    get no weight. ``with_episode`` adds the term ``episode`` as level 0."""

    requires = frozenset({"state"})
    compares_peers = True
    value: Term
    history: int = number(2, least=0)
    alpha: float = number(1.0, least=0)
    scale: bool = True
    with_episode: bool = False
    episode: Term = field(default_factory=Standardise)
    eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        finite = self.alpha * math.log(self.history + 2) < 700
        check(finite, f"alpha is {self.alpha}; write a number for which (history + 2)^alpha is finite")

    def __call__(self, batch: Batch) -> Field:
        batch = replace(batch, reward=batch.reward.to(torch.float64))
        value = self.value(batch)
        levels = [(n, self._among(value, SameRecentStates(n)(batch))) for n in range(1, self.history + 2)]
        if self.with_episode:
            a = self.episode(batch).at(TURN)
            levels.append((0, where(a.abs() > SAME, a, 0.0)))
        weights = [where(a.abs() > 0, (n + 1.0) ** self.alpha, 0.0) for n, a in levels]
        total = sum((w * a for w, (_, a) in zip(weights, levels)), 0.0 * value)
        return total / (sum(weights, 0.0 * value) + self.eps)

    def _among(self, value: Field, peers: Partition) -> Field:
        centred = value - value.mean(peers)
        a = centred / (value.std(peers, 0) + self.eps) if self.scale else centred
        return where(centred.abs() > SAME, a, 0.0)


def hgpo(
    past: int = 2,
    alpha: float = 1.0,
    gamma: float = 0.95,
    scale: bool = True,
    base: bool = False,
    rows: RowUnit = "turn",
    clip: float = 0.2,
    beta: float = 0.01,
) -> Recipe:
    """HGPO: step advantages over a hierarchy of groups, turns that share the last n states; longer histories weigh more.

    Aₖ = Σₙ wₙ Aⁿ / Σₙ wₙ,  wₙ ∝ (n + 1)^α,  Aⁿ = (Gₖ − mean)/std among turns with the same sₖ₋ₙ₊₁ … sₖ,  n = 1 … K + 1

    Paper: Hierarchy-of-Groups Policy Optimization for Long-Horizon Agentic Tasks, arXiv 2602.22817.
    Settings: past K 2 or 4, alpha 1, gamma 0.95, population std, G 8. Levels at which a turn has no peers or is at the
    mean are left out. base=True adds GiGPO's episode term as level 0."""
    episode = Standardise(Outcome(), SameTask(rows), scale)
    credit = HierarchyOfGroups(ReturnToGo(gamma), past, alpha, scale, base, episode)
    return replace(grpo(clip, beta), advantage=credit, aggregate=Mean(TOKEN))


class SameTransition(Peers):
    """Turns of one task with the same transition (state, action, next state) and the same ``window`` states before it.

    Positions before the first turn are equal to each other. A turn with an unknown state in any of these has no peers."""

    requires = frozenset({"state"})
    window: int = number(3, least=0)

    def __call__(self, batch: Batch) -> Partition:
        last = Field(batch.tree, TURN, is_last(batch, TURN))
        after = where(last, batch.end, shift_turns(batch.state, 1, UNKNOWN))
        past = (shift_turns(batch.state, -k, BEFORE) for k in range(1, self.window + 1))
        return turns_with_same_keys(batch, batch.state, batch.action, after, *past)


class PeerTrajectoryMean(Term):
    """Aₖ = mean of ``term`` over the trajectories with a turn among the ``peers`` of turn k, each counted once.

    A step that all trajectories share gets their mean; after they diverge each keeps its own credit."""

    term: Term
    peers: Peers

    def __call__(self, batch: Batch) -> Field:
        a, tree, peers = self.term(batch).at(TURN), batch.tree, self.peers(batch)
        visits = Partition.by(tree, TURN, peers.label, tree.ancestor(TURN, TRAJECTORY))
        weight = 1.0 / a.peer_count(visits)
        return (weight * a).sum(peers) / weight.sum(peers)


class FallbackWithoutPeers(Term):
    """``term``; ``fallback`` for an item without other peers."""

    term: Term
    fallback: Term
    peers: PeerSpec = GROUP

    def __call__(self, batch: Batch) -> Field:
        a, fallback = self.term(batch), self.fallback(batch)
        return where(fallback.peer_count(resolve_peers(self.peers, batch)) > 1, a, fallback)


def salt(window: int = 3, base: Literal["grpo", "rloo"] = "grpo", clip: float = 0.2, beta: float = 0.0) -> Recipe:
    """SALT: averages the advantage over all trajectories of a task that take the same transition.

    Aₖ = mean of A over the trajectories that take (sₖ, aₖ, sₖ₊₁) after the same h states

    Paper: Step-level Advantage Assignment for Long-horizon Agents via Trajectory Graph, arXiv 2510.20022.
    Settings: base GRPO or RLOO; window h 3.
    Deviation: a trajectory that takes a step twice counts once; a single trajectory gets 0. Actions are compared token
    by token."""
    bases = {"grpo": Standardise(), "rloo": FallbackWithoutPeers(LeaveOneOut(), Constant(0.0))}
    return replace(grpo(clip, beta), advantage=PeerTrajectoryMean(bases[base], SameTransition(window)))


class AnswerProbabilityGain(Term):
    """rₖ = pₖ₊₁ − pₖ, the increase of the gold answer's probability p (geometric mean of its tokens) by turn k; the
    last turn earns ``weight`` · R instead. At TURN."""

    reads = frozenset({Signal.ANSWER_LOGP})
    requires = frozenset({"answer"})
    weight: float = number(1.0, least=0)

    def __call__(self, batch: Batch) -> Field:
        p = batch[Signal.ANSWER_LOGP].exp()
        last = Field(batch.tree, TURN, is_last(batch, TURN))
        return where(last, self.weight * batch.reward.sum(TRAJECTORY), shift_turns(p, 1, 0.0) - p)


class LessIndexMean(Term):
    """v − Σ of v over the t-th sampled tokens of the task, divided by all its trajectories: one that has ended counts as 0."""

    compares_peers = True
    value: Term

    def __call__(self, batch: Batch) -> Field:
        v = self.value(batch)
        return v - v.sum(SameTokenIndex()(batch)) / batch.tree.size(TRAJECTORY, GROUP)


def igpo(
    gamma: float = 1.0,
    form: Literal["paper", "code"] = "paper",
    answer_weight: float = 1.0,
    clip: float = 0.2,
    beta: float = 1e-3,
) -> Recipe:
    """IGPO: turn reward is the increase of the gold answer's probability; the last turn gets the outcome.

    rₖ = pₖ₊₁ − pₖ, r_last = R;  Aₖ = Σ_{j≥k} γ^{j−k} zⱼ,  z = (r − mean)/std over all turns of the task

    Paper: Information Gain-based Policy Optimization, arXiv 2510.14967.
    Settings: gamma 1, G 16, 32 tasks, at most 10 turns. form=code: returns token by token, minus their mean over the
    trajectories of the task at the same place, where one that has ended counts as 0; no std.
    Deviation: no penalty on the format and no F1; the outcome is what the environment pays."""
    forms = {
        "paper": SumToGo(Standardise(EnvironmentReward()), gamma),
        "code": LessIndexMean(ReturnToGo(gamma, TOKEN)),
    }
    reward = AnswerProbabilityGain(answer_weight)
    return replace(grpo(clip, beta), advantage=forms[form], aggregate=Mean(TOKEN), reward=reward)


def feedback_was_masked(batch: Batch) -> Field:
    """Turns for which any context token since the last sampled one was masked; all turns where no masked context was
    recorded. At TURN."""
    sequences, tree = batch.sequences, batch.tree
    if sequences.masked_ids is None:
        return tree.full(TURN, True, torch.bool)
    changed = torch.zeros(tree.count(TURN), dtype=torch.bool, device=tree.device)
    place = (sequences.masked_ids != sequences.ids).nonzero().squeeze(1)
    token = torch.searchsorted(sequences.sampled_at, place)  # the first token sampled after it
    place, token = place[token < sequences.sampled_at.numel()], token[token < sequences.sampled_at.numel()]
    inside = lambda at: torch.searchsorted(sequences.start, at, right=True)  # noqa: E731
    token = token[inside(place) == inside(sequences.sampled_at[token])]
    changed[tree.parents[0][token]] = True
    return Field(tree, TURN, changed)


class FeedbackInformationGain(Term):
    """Iₖ = mean over the tokens of turn k + 1 of log μ(y) − log π(y | feedback to turn k masked): how much the
    environment's feedback to turn k changed the next turn. Credited to turn k. At TOKEN.

    Exactly 0 where there was no feedback, none of it was masked, or no token follows."""

    reads = frozenset({Signal.LOGP_WITHOUT_FEEDBACK})
    requires = frozenset({"feedback"})
    # divided by the number of tokens of turn k
    shared: bool = True

    def __call__(self, batch: Batch) -> Field:
        log_ratio = (behaviour(batch) - batch[Signal.LOGP_WITHOUT_FEEDBACK]).mean(TURN)  # 0 for a turn without tokens
        # identical text: only rounding differs between the two passes
        log_ratio = where(feedback_was_masked(batch), log_ratio, 0.0)
        gain = where(Fact("feedback", TURN, missing=1.0)(batch) > 0.5, shift_turns(log_ratio, 1, 0.0), 0.0)
        return gain.at(TOKEN) / batch.tree.size(TOKEN, TURN) if self.shared else gain.at(TOKEN)


class StandardiseNonZero(Term):
    """(v − mean)/(std + ε) over the values of a group that are not 0; zeros stay 0."""

    compares_peers = True
    value: Term
    eps: float = 1e-6

    def __call__(self, batch: Batch) -> Field:
        v = self.value(batch)
        present = v.abs() > 0
        peers = Partition.by(batch.tree, v.level, batch.group, present)
        return where(present, (v - v.mean(peers)) / (v.std(peers) + self.eps), 0.0)


class LimitStd(Term):
    """c · term, c = min(1, max(std of ``reference``, 1)/std of ``term``) over all tokens of the batch."""

    term: Term
    reference: Term

    def __call__(self, batch: Batch) -> Field:
        a, limit = self.term(batch), self.reference(batch).at(TOKEN)
        std = a.at(TOKEN).std(BATCH)
        c = where(std > 0, limit.std(BATCH).clamp(low=1.0) / where(std > 0, std, 1.0), 1.0)
        return c.clamp(high=1.0) * a


class LowSpreadGate(Term):
    """g · term, g = σ(−std of R in the group / temperature): ½ where returns are equal, near 0 where they differ."""

    term: Term
    temperature: float = number(0.05, above=0)

    def __call__(self, batch: Batch) -> Field:
        spread = batch.reward.sum(TRAJECTORY).std(GROUP)
        return (-1.0 / self.temperature * spread).map(torch.sigmoid) * self.term(batch)


class ExponentialDecay(Term):
    """exp(−rate · t) · term, t batches so far."""

    term: Term
    rate: float = number(0.0, least=0)

    def __call__(self, batch: Batch) -> Field:
        return (-self.rate * batch[Column.BATCH_INDEX]).exp() * self.term(batch)


def infopo(
    beta: float = 0.5,
    gate_temperature: float = 0.05,
    per_token: bool = True,
    rate: float = 0.0,
    clip: float = 0.2,
    kl: float = 0.0,
) -> Recipe:
    """InfoPO: turn-level information gain of the environment's feedback, gated to groups with equal outcomes.

    Iₖ = mean over turn k+1 of log π(y) − log π(y | answer masked);  A = z(R) + β σ(−std R / T) c z(I),
    c = min(1, max(std A_ext, 1)/std A_info)

    Paper: Information-Driven Policy Optimization for User-Centric Agents, arXiv 2603.00656.
    Settings: beta 0.5, gate temperature T 0.05, rate 0. per_token divides I among the tokens of its turn (the released code).
    Deviation: the decay exp(−rate · t) counts batches, not epochs; every turn of an episode has the same weight."""
    information = LimitStd(StandardiseNonZero(FeedbackInformationGain(per_token)), Standardise())
    credit = Standardise() + beta * ExponentialDecay(LowSpreadGate(information, gate_temperature), rate)
    return replace(grpo(clip, kl), advantage=credit, aggregate=Mean(TOKEN), control=Passes(minibatches=2))


class SameAgent(Peers):
    """Turns of one agent in one game: a game is the task (``group``), or all tasks of a kind (``domain``)."""

    idle_without = frozenset({"agents"})
    game: str = choice("group", "domain")

    def __call__(self, batch: Batch) -> Partition:
        game = batch.group if self.game == "group" else batch.domain
        return Partition.by(batch.tree, TURN, game, batch.agent)


class AgentReturnToGo(Term):
    """Gₖ = Σ rⱼ over this turn and the later turns of the same agent. At TURN."""

    def __call__(self, batch: Batch) -> Field:
        same_agent = Partition.by(batch.tree, TURN, batch.tree.ancestor(TURN, TRAJECTORY), batch.agent)
        return batch.reward.sum(TURN).running_sum(same_agent, reverse=True)


def mars(
    game: Literal["group", "domain"] = "group", clip: float = 0.2, dual: float | None = 1.4, beta: float = 0.2
) -> Recipe:
    """MARS: per-agent return-to-go minus the mean of that agent's role in the game.

    Gₖ = Σ r of this and the later turns of the same agent;  Aₖ = Gₖ − mean of G over (game, role)

    Paper: MARS: Reinforcing Multi-Agent Reasoning of LLMs through Self-Play in Strategic Games, arXiv 2510.15414.
    Settings: clip 0.2, KL 0.2, dual clip 1 + 2 · 0.2, 384 trajectories. game=domain takes all tasks of a kind for one game.
    Deviation: sums first and centres then, as the paper; the released code centres twice and whitens at the end."""
    credit = Standardise(AgentReturnToGo(), SameAgent(game), scale=False)
    return replace(grpo(clip, beta), advantage=credit, gate=Clip(clip, clip, dual))


class LeaveOneOutAtTurn(Term):
    """Aₖ = vₖ − mean of vₖ over the *other* trajectories of the task at the same turn index; without others the
    baseline is 0.

    Turns that are not ``valid`` get 0 and join no baseline. ``absent`` decides about episodes that end before turn k:

        out       left out: late turns are compared with long episodes only, the longest with nothing
        outcome   counted with their total return: a late turn is still compared with the whole task
        nothing   counted with 0, as they earn nothing more: for rewards paid turn by turn

    In each case the baseline is independent of the trajectory it is for, so the gradient stays unbiased."""

    compares_peers = True
    value: Term
    absent: str = choice("out", "outcome", "nothing")
    valid: Term = field(default_factory=lambda: Fact("valid", TURN, missing=1.0))

    def __call__(self, batch: Batch) -> Field:
        v, tree = self.value(batch), batch.tree
        peers = batch.same("index")
        is_valid = (self.valid(batch) > 0.5).to(v.x.dtype)
        others, n = (is_valid * v).sum(peers) - is_valid * v, is_valid.sum(peers) - is_valid
        if self.absent != "out":
            outcome = batch.reward.sum(TRAJECTORY)
            ended = tree.size(TRAJECTORY, GROUP) - outcome.peer_count(peers)
            ended_return = outcome.sum(GROUP) - outcome.sum(peers)
            others, n = others + (ended_return if self.absent == "outcome" else 0.0), n + ended
        return is_valid * (v - where(n > 0, others / n.clamp(low=1.0), 0.0))


class MarkedTurns(Mask):
    """Tokens of turns with ``mark`` > 0.5."""

    mark: Term

    @property
    def idle_without(self) -> frozenset[str]:
        return frozenset({f"turn fact {self.mark.name}"}) if isinstance(self.mark, Fact) else frozenset()

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return self.mark(view.batch) > 0.5


def trloo(
    gamma: float = 1.0,
    absent: Literal["out", "outcome", "nothing"] = "out",
    low: float = 0.2,
    high: float = 0.28,
) -> Recipe:
    """TRLOO: turn-level leave-one-out baseline, the mean return of the *other* trajectories at the same turn.

    Aₖ = Gₖ − 1/(N−1) Σ_{j≠i} Gₖʲ over the N trajectories that have a turn k;  alone: Aₖ = Gₖ

    Paper: Dr. Kernel: Reinforcement Learning Done Right for Triton Kernel Generations, arXiv 2602.05885.
    Settings: gamma 1, clip 0.2/0.28, N 16, 3 turns, no KL. Turns recorded as invalid are left out. absent=outcome
    counts episodes that have ended with their total return, absent=nothing with 0 (ours).
    Deviation: its rewards for kernels and its rejection of mismatched sequences are left out."""
    valid = Fact("valid", TURN, missing=1.0)
    credit = LeaveOneOutAtTurn(ReturnToGo(gamma), absent, valid)
    return Recipe(advantage=credit, gate=Clip(low, high), aggregate=Sum(TURN), keep=MarkedTurns(valid))


class OnMarkedTurns(Term):
    """``term`` on the turns with ``mark`` > 0.5, 0 on the others."""

    mark: Term
    term: Term

    def __call__(self, batch: Batch) -> Field:
        return where(self.mark(batch) > 0.5, self.term(batch), 0.0)


def flow_grpo(rows: RowUnit = "turn", low: float = 0.2, high: float = 0.3, beta: float = 1e-3) -> Recipe:
    """Flow-GRPO (AgentFlow's credit, not its modules): broadcasts the outcome to planner turns; others are not trained.

    A = (R − mean)/std among the task;  J = mean over the tokens of planner turns of the clipped gain − β k3

    Paper: In-the-Flow Agentic System Optimization for Effective Planning and Tool Use, arXiv 2510.05592.
    Settings: clip 0.2/0.3, KL 0.001, G 8, batch 32, temperature 0.7. rows=trajectory counts an episode once, as the
    paper does, not once for each planner turn.
    Deviation: without the turn fact "planner" every turn is the planner's; a single value gets 0. A loop of planner, executor,
    verifier and generator with a shared memory is in examples/planner_and_verifier.py."""
    planner = Fact("planner", TURN, missing=1.0)
    return Recipe(
        advantage=OnMarkedTurns(planner, Standardise(Outcome(), SameTask(rows, planner))),
        gate=Clip(low, high),
        penalties=(WeightedPenalty(beta, KL("k3")),),
        aggregate=Mean(TOKEN),
        keep=MarkedTurns(planner),
    )


POOLS = {"batch": BATCH, "task": GROUP, "trajectory": TRAJECTORY}


class RandomGroups(Peers):
    """Random groups of ``size`` turns from the batch, a task or a trajectory. −1: one group of all."""

    size: int = 16
    within: str = choice(*POOLS, default="batch")

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.size == -1 or self.size > 0, f"size is {self.size}; write a positive number of turns, or -1 for all")

    def __call__(self, batch: Batch) -> Partition:
        tree, pool = batch.tree, POOLS[self.within]
        label = tree.ancestor(TURN, pool)
        # the trajectory's seed breaks ties, so that packing does not matter
        by_seed = torch.argsort(batch.seed.at(TURN).x, stable=True)
        order = by_seed[torch.argsort(batch.uniform_draws(TURN).x[by_seed], stable=True)]
        rank = torch.empty_like(label)
        rank[order] = segments.rank_within(label[order], tree.count(pool))
        size = self.size if self.size > 0 else 1 + rank.numel()
        return Partition.by(tree, TURN, label, rank // size)


def srgpo(
    size: int = 16,
    omega: float = 0.5,
    scale: bool = True,
    rows: RowUnit = "turn",
    within: Literal["batch", "task", "trajectory"] = "batch",
    clip: float = 0.2,
    beta: float = 0.01,
) -> Recipe:
    """SRGPO: episode advantage plus step advantages within random groups of turns, for state-independent step rewards.

    Aₖ = F(R among the task) + ω (rₖ − mean)/std among ``size`` turns drawn from the batch

    Paper: SeeNav-Agent: Enhancing Vision-Language Navigation with Visual Prompt and Step-Level Policy Optimization,
    arXiv 2512.02631.
    Settings: size 16 (-1: one group of all), omega 0.5, KL 0.01, at most 20 steps; rows as in GiGPO."""
    peers = RandomGroups(size, within)
    credit = Standardise(Outcome(), SameTask(rows), scale) + omega * Standardise(EnvironmentReward(), peers, scale)
    return replace(grpo(clip, beta), advantage=credit, aggregate=Mean(TOKEN))


class ReturnUntilMismatch(Term):
    """Gₖ = rₖ + γ eₖ eₖ₊₁ Gₖ₊₁, e = ``match`` of the turn: later rewards count only up to the first mismatch. At TURN."""

    match: Term
    gamma: float = number(0.5, least=0, most=1)

    def __call__(self, batch: Batch) -> Field:
        matched = (self.match(batch) > 0.5).to(torch.float64)
        carry = self.gamma * matched * shift_turns(matched, 1, 0.0)
        return batch.reward.sum(TURN).map(lambda r: returns.backward_recurrence(r, carry.x))


class GroupStdAbove(Mask):
    """Groups in which the population std of a value of each trajectory's first turn is above ``threshold``, and groups of one."""

    value: Term
    threshold: float = 0.3

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        tree = view.batch.tree
        first = where(tree.index(TURN, TRAJECTORY) < 1, self.value(view.batch), 0.0).sum(TRAJECTORY)
        return (first.std(GROUP, 0) > self.threshold) | (first.peer_count(GROUP) <= 1)


def ui_s1(
    episode_weight: float = 1.0,
    step_weight: float = 1.0,
    gamma: float = 0.5,
    scale: bool = True,
    least: float = 0.3,
    clip: float = 0.2,
    beta: float = 1e-4,
) -> Recipe:
    """UI-S1: semi-online RL along expert traces; returns stop at the first mismatch.

    Gₖ = rₖ + γ eₖ eₖ₊₁ Gₖ₊₁;  Aₖ = w_E F(rₖ among all the task's turns) + w_S F(Gₖ among the task's k-th turns)

    Paper: UI-S1: Advancing GUI Automation via Semi-online Reinforcement Learning, arXiv 2509.11543.
    Settings: weights 1, gamma 0.5, G 8, KL 1e-4, groups in which G₀ has a population std above 0.3. A task of one turn gets r.
    Deviation: the turn fact "match" is the environment's, and so is patching a history with the expert's action: write --env
    turnwise.environments.expert_path:KeyDoorPath,patches=2 (or LookupPath, or ExpertPath before a class of your own). Groups
    without any spread are re-sampled, those below 0.3 only left out."""
    turns, step, matched = SameTask("turn"), EnvironmentReward(), ReturnUntilMismatch(Fact("match", TURN), gamma)
    credit = episode_weight * FallbackWithoutPeers(
        Standardise(step, turns, scale), step, turns
    ) + step_weight * Standardise(matched, Same("index"), scale)
    return replace(
        grpo(clip, beta),
        advantage=credit,
        aggregate=Mean(TOKEN),
        admission=Spread(),
        keep=GroupStdAbove(matched, least),
        control=Passes(minibatches=4),
    )
