"""Segment-level credit: segments between forks, branches of a tree, memory segments, utterances and steps."""

from __future__ import annotations

from dataclasses import field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from turnwise.algebra.advantage import SoftBaseline, Standardise
from turnwise.algebra.aggregate import Mean, Sum
from turnwise.algebra.control import CriticsFirst, Passes
from turnwise.algebra.gate import Clip, ClipByOutcome, Factor, NoGate, ZeroGate
from turnwise.algebra.mask import AllTokens, Both, Mask, MismatchWithin
from turnwise.algebra.penalty import (
    KL,
    Penalty,
    ResetReference,
    Schedule,
    StepCrossEntropy,
    WeightedPenalty,
)
from turnwise.algebra.piece import MicroBatchView
from turnwise.algebra.ratio import Importance, OnPolicy, behaviour, moved
from turnwise.algebra.reward import PaidAtEnd
from turnwise.algebra.term import Term
from turnwise.algebra.value import GAE, Constant, Outcome, ReturnToGo, shift_turns, step_values, token_reward
from turnwise.core.batch import Batch
from turnwise.core.columns import Column
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, TURN, Field, Partition, where
from turnwise.core.limits import number
from turnwise.core.signals import TURN_CRITIC, Signal
from turnwise.credit.fact import Fact, SameFact, rescale_to_unit
from turnwise.credit.selectors import Selector
from turnwise.data.replay import FreshActions, RecentBuffer
from turnwise.maths import returns, segments
from turnwise.maths.lazy_torch import torch
from turnwise.maths.segments import rank_by_value
from turnwise.recipes.families.actor_critic import ppo
from turnwise.recipes.recipe import Kind, Recipe, declares
from turnwise.rollout.guidance import BackwardStarts
from turnwise.rollout.strategies import Branch
from turnwise.rollout.strategies.tree import (
    AfterToolResults,
    BottleneckTree,
    HintedRetry,
    SegmentTree,
    UncertainTokens,
    Vines,
)
from turnwise.tasks.budgets import Fixed
from turnwise.tasks.samplers import CyclePool

if TYPE_CHECKING:
    from torch import Tensor

KIND = Kind.CREDIT

# ------------------------------------------------------------- segments and trees


class ForkTree:
    """Parents and fork positions of a batch. All trajectories are computed at once, in as many rounds as the deepest
    fork."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.tree = batch, batch.tree
        tokens, turns = self.tree.size(TOKEN, TURN).x, self.tree.size(TURN, TRAJECTORY).x
        turn_index = torch.arange(tokens.numel(), device=tokens.device)
        self.first_turn = turns.cumsum(0) - turns  # [K]
        self.turn_position = tokens.cumsum(0) - tokens + turn_index  # [U] its first position
        self.owner = torch.repeat_interleave(self.tree.parents[1], tokens + 1)  # [S − G] trajectory of each position
        self.first_prompt = self.owner.numel()  # position of the first group's prompt
        self.positions = self.first_prompt + self.tree.count(GROUP)
        # index of each trajectory's parent, [K]; −1 where it has none in this batch
        key = (batch.tree.ancestor(TRAJECTORY, GROUP) << 33) + batch.seed.x
        parent_key = torch.where(batch.parent.x >= 0, key - batch.seed.x + batch.parent.x, -1)
        ordered, order = torch.sort(key, stable=True)
        at = torch.searchsorted(ordered, parent_key).clamp(max=key.numel() - 1)
        self.recorded_parent = torch.where(ordered[at] == parent_key, order[at], -1)
        # number of forks on the way to the deepest trajectory
        parent = self.recorded_parent
        up, depth = parent, 0
        while depth <= parent.numel() and bool((up >= 0).any()):
            up, depth = torch.where(up >= 0, parent[up.clamp(min=0)], -1), depth + 1
        self.depth = depth
        self.parent, self.start = self._starts()

    def _fork_turn(self) -> Tensor:
        """The turn at which each trajectory leaves its parent, [K]; an arbitrary turn for those without a parent."""
        at = self.first_turn[self.recorded_parent.clamp(min=0)] + self.batch.fork.x
        return torch.where(self.recorded_parent >= 0, at, 0)

    def _starts(self) -> tuple[Tensor, Tensor]:
        """Parent (−1: none) and start position of each. A fork before the parent's first token starts where the parent
        starts."""
        parent, group = self.recorded_parent, self.tree.ancestor(TRAJECTORY, GROUP)
        if not self.first_prompt:
            return parent, group
        offset = self.batch.fork_token.x if self.batch.fork_token is not None else 0
        start = torch.where(parent >= 0, self.turn_position[self._fork_turn()] + offset, self.first_prompt + group)
        for _ in range(self.depth):
            grandparent = parent.clamp(min=0)
            at_start = (parent >= 0) & (start == self.first_position[grandparent])
            start = torch.where(at_start, start[grandparent], start)
            parent = torch.where(at_start, parent[grandparent], parent)
        return parent, start

    @cached_property
    def first_position(self) -> Tensor:
        """First position of each trajectory, [K]; −1 where it has no turn."""
        if not self.first_prompt:
            return torch.full_like(self.first_turn, -1)
        position = self.turn_position[self.first_turn.clamp(max=self.turn_position.numel() - 1)]
        return torch.where(self.tree.size(TURN, TRAJECTORY).x > 0, position, -1)

    @cached_property
    def is_last(self) -> Tensor:
        """Positions that are the last of their trajectory, [S − G]."""
        return torch.nn.functional.pad(self.owner[1:], (0, 1), value=-1) != self.owner

    @cached_property
    def position_after(self) -> Tensor:
        """The position after each token, [N]."""
        return torch.arange(self.tree.count(TOKEN), device=self.owner.device) + self.tree.parents[0] + 1

    def sum_at_starts(self, x: Tensor) -> Tensor:
        """Σ of a per-trajectory value over the trajectories that start at a position, [S]."""
        return x.new_zeros(self.positions).index_add(0, self.start, x)

    # --------------------------------------------------------- returns and values
    def outcome(self) -> Tensor:
        """Return of each trajectory including the rewards before its fork, [K] float64."""
        reward = self.batch.reward.sum(TURN).to(torch.float64)
        if not self.depth:
            return reward.sum(TRAJECTORY).x
        before = (reward.running_sum(TRAJECTORY) - reward).x[self._fork_turn()]
        step = torch.where(self.recorded_parent >= 0, before, 0.0)
        inherited = step
        for _ in range(self.depth):
            inherited = step + torch.where(self.recorded_parent >= 0, inherited[self.recorded_parent.clamp(min=0)], 0.0)
        return reward.sum(TRAJECTORY).x + inherited

    def sum_through(self, value: Tensor) -> Tensor:
        """Σ of a per-trajectory value over all trajectories that pass through a position, [S]."""
        subtree = value
        child = (self.parent >= 0).to(value.dtype)
        for _ in range(self.depth):  # a trajectory, its branches, their branches ...
            subtree = value.index_add(0, self.parent.clamp(min=0), child * subtree)
        joined = self.sum_at_starts(subtree)
        later = returns.backward_recurrence(joined[: self.first_prompt], (~self.is_last).to(value.dtype))
        return torch.cat([value[self.owner] + later, joined[self.first_prompt :]])

    def sum_over_paths(self, value: Tensor) -> Tensor:
        """Σ of a per-trajectory value over all trajectories that pass through a token, [N]."""
        return self.sum_through(value)[self.position_after]

    def tree_values(self, final: Tensor) -> Tensor:
        """V of every position, [S]: the return after the last token, at a cut the mean over its branches of V where
        they end."""
        branches = self.sum_at_starts(torch.ones_like(final))
        first = final
        for _ in range(self.depth + 1):
            sums = self.sum_at_starts(first)
            end = torch.where(self.is_last, final[self.owner], 0.0)
            share = 1 / (1 + branches[: self.first_prompt])
            value = returns.backward_recurrence((sums[: self.first_prompt] + end) * share, share * ~self.is_last)
            first = torch.where(self.first_position >= 0, value[self.first_position], final) if value.numel() else final
        return torch.cat([value, sums[self.first_prompt :] / branches[self.first_prompt :].clamp(min=1)])

    def branch_std(self, final: Tensor, value: Tensor) -> Tensor:
        """The std (n − 1) of V over the branches at a position, [S]; 0 for a single branch."""
        first = torch.where(self.first_position >= 0, value[self.first_position], final)
        squares = self.sum_at_starts((first - value[self.start]) ** 2)
        branches = self.sum_at_starts(torch.ones_like(final))
        following = torch.nn.functional.pad(value[1 : self.first_prompt], (0, 1))
        onward = torch.where(self.is_last, final[self.owner], following)
        squares[: self.first_prompt] += (onward - value[: self.first_prompt]) ** 2
        branches[: self.first_prompt] += 1
        return (squares / (branches - 1).clamp(min=1)).sqrt()

    # ------------------------------------------------------------------- segments
    def segment_starts(self, cut: Tensor) -> Tensor:
        """The cut at which each token's segment starts, [N]: the last one before it, or the trajectory's start. ``cut``
        [S]."""
        position = torch.arange(self.first_prompt, device=cut.device)
        opening = torch.zeros_like(cut[: self.first_prompt])
        opening[self.first_position[self.first_position >= 0]] = True
        if self.first_prompt:
            position = torch.where(cut[: self.first_prompt] | opening, position, -1).cummax(0).values
        cut_before = position[self.position_after - 1]
        start = self.start[self.tree.ancestor(TOKEN, TRAJECTORY)]
        return torch.where(opening[cut_before], start, cut_before)

    def segment_end_values(self, value: Tensor, cut: Tensor, final: Tensor) -> Tensor:
        """V where each token's segment ends, [N]: at the next cut, or the return."""
        inside, at_end = cut[: self.first_prompt], torch.where(self.is_last, final[self.owner], 0.0)
        boundary = torch.where(inside, value[: self.first_prompt], at_end)
        onward = (~(inside | self.is_last)).to(boundary.dtype)
        return returns.backward_recurrence(boundary, onward)[self.position_after]


class MonteCarloValueDifference(Term):
    """A = V(end) − V(start) of each segment, V of a cut the mean return of the trajectories that fork there. At TOKEN.

    V after the last token is the return; V at a trajectory's start is the mean of the *others* that start there. The
    first segment gets 0 where there are no others."""

    requires = frozenset({"forks"})
    compares_peers = True

    def __call__(self, batch: Batch) -> Field:
        forks = ForkTree(batch)
        final, owner = forks.outcome(), batch.tree.ancestor(TOKEN, TRAJECTORY)
        count, sums = forks.sum_at_starts(torch.ones_like(final)), forks.sum_at_starts(final)
        value, start = sums / count.clamp(min=1), forks.segment_starts(count > 0)
        # the trajectory itself is not part of its baseline
        first_segment = start == forks.start[owner]
        others = count[start] - first_segment.double()
        begin = (sums[start] - first_segment * final[owner]) / others.clamp(min=1)
        end = forks.segment_end_values(value, count > 0, final)
        return Field(batch.tree, TOKEN, torch.where(others > 0, end - begin, 0.0))


class UnforkedTrajectories(Mask):
    """Trajectories that start at the prompt; forked ones only estimate values."""

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return view.batch.parent < 0


class ProbabilityBelow(Mask):
    """Tokens with a probability below ``limit`` at sampling time."""

    limit: float = number(0.9, above=0, why="a probability, or more than 1 for every token")

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return behaviour(view.batch).exp() < self.limit


def spo_chain(rho: float = 0.9, clip: float = 0.2, trunks: int = 2) -> Recipe:
    """SPO-chain: Monte-Carlo values at a few cut points; each segment's advantage is the value difference.

    A = V(end of segment) − V(start), V(cut) = mean outcome of the trajectories that left there, V(last) = R;
    only tokens of the trunks with μ(y) < rho are trained on and counted

    Paper: Segment Policy Optimization, arXiv 2505.23564.
    Settings: rho 0.9, clip 0.2; a cut before every 5th such token (2 to 100 tried), 9 completions at each.
    Deviation: cuts are before turns, as many as a group of 16 has forks for (the credit itself takes forks at any token);
    the value of the prompt is the mean return of the other trunks."""
    return Recipe(
        advantage=MonteCarloValueDifference(),
        strategy=Branch(trunks, "every"),
        budget=Fixed(8, 16),
        gate=Clip(clip, clip),
        aggregate=Mean(TOKEN),
        keep=Both(ProbabilityBelow(rho), UnforkedTrajectories()),
    )


class TreeValueDifference(Term):
    """A = V(end) − V(start) of each segment between forks. At TOKEN.

    V of a leaf is its return, V of a cut the mean over its branches of V where they end."""

    requires = frozenset({"forks"})
    compares_peers = True
    # divides by the std of those V plus ε
    scale: bool = False
    eps: float = 1e-8

    def __call__(self, batch: Batch) -> Field:
        forks = ForkTree(batch)
        final = forks.outcome()
        value = forks.tree_values(final)
        cut = forks.sum_at_starts(torch.ones_like(final)) > 0
        start = forks.segment_starts(cut)
        difference = forks.segment_end_values(value, cut, final) - value[start]
        # dividing by a tiny std would amplify rounding errors
        difference = torch.where(difference.abs() < 1e-12, 0.0, difference)
        if self.scale:
            difference = difference / (forks.branch_std(final, value)[start] + self.eps)
        return Field(batch.tree, TOKEN, difference)


class NonZeroAdvantage(Mask):
    """Tokens whose advantage is not 0."""

    tolerance: float = 1e-12

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return view.batch[Column.ADVANTAGE].abs() >= self.tolerance


def spo_tree(
    rho: float = 0.9, scale: bool = False, clip: float = 0.2, factors: str = "4/2/2", segment: int = 8
) -> Recipe:
    """SPO-tree: tree-structured rollouts; each segment's advantage is the value of its end minus that of its start.

    A = V(child) − V(parent), V(leaf) = R, V(inner) = mean of its children; with scale over their std; A = 0 is dropped

    Paper: Segment Policy Optimization, arXiv 2505.23564.
    Settings: rho 0.9, branching 6-6-6 every 100 tokens (or 4-5-6), 1024 segments a step, clip 0.2.
    Deviation: smaller trees of shorter segments; `--strategy branch` forks before turns instead (the credit takes any tree)."""
    return Recipe(
        advantage=TreeValueDifference(scale),
        strategy=SegmentTree(factors, segment),
        budget=Fixed(8, 16),
        gate=Clip(clip, clip),
        aggregate=Mean(TOKEN),
        keep=Both(ProbabilityBelow(rho), NonZeroAdvantage()),
        control=Passes(minibatches=4),
    )


class PathReturn(Term):
    """R = Σ of the rewards along the path from the prompt, including those before the fork, which the parent earned."""

    requires = frozenset({"forks"})

    def __call__(self, batch: Batch) -> Field:
        return Field(batch.tree, TRAJECTORY, ForkTree(batch).outcome())


class MeanOverPaths(Term):
    """The mean of ``term`` over all trajectories that pass through a token. At TOKEN."""

    requires = frozenset({"forks"})
    term: Term
    # their sum, as if each trajectory had its own copy of the shared tokens
    copies: bool = False

    def __call__(self, batch: Batch) -> Field:
        value, forks = self.term(batch).at(TRAJECTORY).x.double(), ForkTree(batch)
        total = forks.sum_over_paths(value)
        return Field(batch.tree, TOKEN, total if self.copies else total / forks.sum_over_paths(torch.ones_like(value)))


def arpo(clip: float = 0.2, copies: bool = False, trunks: int = 0) -> Recipe:
    """ARPO (agentic): branches after tool results; shared tokens get the mean advantage of all branches through them.

    Aₜ = mean over the trajectories through token t of (R − mean)/(std + ε); the rest as GRPO, every token alike

    Paper: Agentic Reinforced Policy Optimization, arXiv 2507.19849.
    Settings: 16 trajectories a task, 8 of them from the prompt (trunks 0: half of the group), a branch where u − 0.2 ΔH ≤ 0.5.
    Deviation: a shared token is stored once and counted once; with copies its credit is the sum, as if each trajectory
    had its own copy of it (the paper's soft setting). Branches are decided when a trajectory has ended, as `--strategy
    arpo` does."""
    return Recipe(
        advantage=MeanOverPaths(Standardise(PathReturn()), copies),
        strategy=AfterToolResults(trunks),
        budget=Fixed(8, 16),
        gate=Clip(clip, clip),
        aggregate=Mean(TOKEN),
        control=Passes(minibatches=4),
    )


def latr(share: float = 0.5, look: int = 8, near: float = 0.4, again: int = 2, clip: float = 0.2) -> Recipe:
    """LATR: half of a group is a tree at the most uncertain tokens, without forks that come back to their parent's tokens.

    Aₜ = sum over the trajectories through token t of (R − mean)/(std + ε), as if each had its own copy; the rest as GRPO

    Paper: Lookahead Tree-Based Rollouts for Enhanced Trajectory-Level Exploration, arXiv 2510.24302.
    Settings: half of the group, lookahead 20 to 50 tokens, edit distance 0.4.
    Deviation: that of `--strategy latr`."""
    return replace(arpo(clip, copies=True), strategy=UncertainTokens(share, look, near, 1, again), budget=Fixed())


class LocalInformation(Term):
    """(v/v₀ − (1 + 1/β))·π_ref of each step: v is the mean return of the trajectories that pass through its end, v₀ of those
    through its start; π_ref by token. A step is a turn, or what lies between forks inside it, of at most ``segment`` tokens (0:
    any number). Where v₀ is 0, v/v₀ is 0."""

    reads = frozenset({Signal.REFERENCE})
    requires = frozenset({"forks"})
    beta: float = number(5.0, above=0)
    segment: int = number(0, least=0)

    def __call__(self, batch: Batch) -> Field:
        forks, turn = ForkTree(batch), batch.tree.ancestor(TOKEN, TURN)
        final = forks.outcome()
        ones = torch.ones_like(final)
        value = forks.sum_through(final) / forks.sum_through(ones).clamp(min=1)
        cut = forks.sum_at_starts(ones) > 0
        cut[forks.turn_position] = True
        if self.segment:
            cut[forks.position_after - 1] |= batch.tree.index(TOKEN, TURN).x % self.segment == 0
        start = forks.segment_starts(cut)
        before, after = value[start], value[forks.position_after]
        told = torch.where(before != 0, after / torch.where(before != 0, before, 1.0), 0.0) - (1 + 1 / self.beta)
        steps = Partition.by(batch.tree, TOKEN, turn, start)
        return batch[Signal.REFERENCE].to(torch.float64).mean(steps).map(lambda x: told * x.exp())


def ib_tpo(
    beta: float = 5.0,
    local: float = 0.1,
    kl: float = 1e-3,
    clip: float = 0.2,
    trunks: int = 4,
    best: int = 1,
    each: int = 1,
    segment: int = 16,
) -> Recipe:
    """IB-TPO: a tree that grows where turns told most about the outcome; its steps are credited by lead and by what they told.

    A = (p(s) − p(q))/std + local·(p(s)/p(parent) − (1 + 1/β))·π_ref(s), p the mean reward below a node, q the prompt

    Paper: Long Live The Balance: Information Bottleneck Driven Tree-based Policy Optimization, arXiv 2605.28109.
    Settings: beta 5, local 0.1, KL 0.001, 12 trajectories: 4 trunks and 8 rounds of one continuation of the best node.
    Deviation: a step is a turn, or segment tokens of one, not a paragraph; π_ref(s) is the mean by token; where p(parent) is 0,
    the quotient is 0."""
    return Recipe(
        advantage=MeanOverPaths(Standardise(PathReturn())) + local * LocalInformation(beta, segment),
        strategy=BottleneckTree(trunks, best, each, beta, segment),
        budget=Fixed(8, 12),
        gate=Clip(clip, clip),
        penalties=(WeightedPenalty(kl, KL("k3")),),
    )


class AfterLastFork(Mask):
    """Tokens after the last position where another trajectory forks off. Planned over whole groups: a split may part
    the two."""

    def plan(self, view: MicroBatchView) -> dict[object, Field]:
        forks = ForkTree(view.batch)
        cut = forks.sum_at_starts((forks.parent >= 0).double())[: forks.first_prompt]
        later = returns.backward_recurrence(cut, (~forks.is_last).double())
        return {self: Field(view.batch.tree, TOKEN, later[forks.position_after] == 0)}


class AmplifiedPositive(Term):
    """``perfect`` where ``value`` reaches ``best``; elsewhere αA where A ≥ 0, else A."""

    term: Term
    value: Term
    alpha: float = number(3.0, least=0)
    best: float = 1.0
    perfect: float = 1.0

    def __call__(self, batch: Batch) -> Field:
        a = self.term(batch)
        reached = self.value(batch) >= self.best - 1e-6  # returns are sums of float32
        return where(reached, self.perfect, where(a >= 0, self.alpha * a, a))


def r3l(alpha: float = 3.0, best: float = 1.0, perfect: float = 1.0, tau: float | None = None, tier: int = 1) -> Recipe:
    """R3L: failed attempts are tried again with a hint from where they went wrong; trains on what follows, amplifies successes.

    A = R − mean (with tau: R − τ log mean exp(R/τ));  Â = perfect where R ≥ best, αA where A ≥ 0, else A;
    ∇J = mean over tokens of Â ∇ log π

    Paper: Reflect-then-Retry RL with Language-Guided Exploration, arXiv 2601.03715.
    Settings: alpha 3, group of 8 with its retries; perfect 1 as in its code (its text says alpha).
    Deviation: the environment's verifier names the pivot and its hint is the advice; the paper's policy reflects, which
    `--strategy r3l --helper policy` does. `--strategy branch` forks where a first token is uncertain, and needs no hint."""
    return Recipe(
        advantage=AmplifiedPositive(SoftBaseline(tau, value=PathReturn()), PathReturn(), alpha, best, perfect),
        ratio=OnPolicy(),
        aggregate=Mean(TOKEN),
        keep=AfterLastFork(),
        strategy=HintedRetry(tier),
    )


def ipa(gamma: float = 0.95, mismatch: float = 5.0) -> Recipe:
    """IPA (ROME): episodes that start near the end of a solution, and earlier as they succeed; turn-level returns and ratios.

    Gₖ = γ^{K−k} R;  ∇J = mean Σₖ mₖ wₖ Gₖ ∇ log π(turn k),  w = 1 where R > 0, else min(ρₖ, 1),
    ρₖ the geometric mean of π/π_prox, mₖ = 1 where that of π_prox/μ is at most ``mismatch``

    Paper: Let It Flow: Agentic Crafting on Rock and Roll, arXiv 2512.24873.
    Settings: gamma 0.95, mismatch 5 in a public re-run; failures pay −1. Passes over a pool of 128 tasks are ours.
    Deviation: the solution is the environment's; what comes before the start is not imitated. Failures with reward 0 have no
    gradient. `--guidance none --sampler uniform` leaves the credit alone."""
    return Recipe(
        advantage=ReturnToGo(gamma),
        reward=PaidAtEnd(Outcome()),
        ratio=Importance(TURN, proximal=True),
        gate=ClipByOutcome(by=Outcome()).where(MismatchWithin(0.0, mismatch, TURN, mean=True)),
        aggregate=Sum(TRAJECTORY),
        guidance=BackwardStarts(),
        sampler=CyclePool(128),
    )


def segment_index(batch: Batch) -> Field:
    """Which segment of its trajectory a token is in, from 0. The fact ``memory`` of a turn ends one where it is told; else each
    context that the trajectory was read under is one."""
    if "memory" in batch.facts:
        boundary = where(Fact("memory", TURN, missing=0.0)(batch) > 0, 1.0, 0.0)
        return (boundary.running_sum(TRAJECTORY) - boundary).at(TOKEN)
    s = batch.sequences
    sequence = Field(batch.tree, TOKEN, torch.searchsorted(s.start, s.sampled_at, right=True) - 1)
    return sequence - sequence.min(TRAJECTORY)


class SampledSegments(Mask):
    """At most ``limit`` random segments of each trajectory (``segment_index``). None: all."""

    limit: int | None = number(None, least=1)

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        tree = view.batch.tree
        if self.limit is None:
            return tree.full(TOKEN, True, torch.bool)
        segment = Partition.by(tree, TOKEN, tree.ancestor(TOKEN, TRAJECTORY), segment_index(view.batch))
        first = segments.rank_within(segment.label, segment.count) == 0
        # the first token's draw is the key of its segment
        key = torch.where(first, view.batch.uniform_draws().x, torch.inf)
        rank = rank_by_value(key, tree.ancestor(TOKEN, TRAJECTORY), tree.count(TRAJECTORY))
        return Field(tree, TOKEN, (first & (rank < self.limit)).double()).sum(segment) > 0


@declares(Kind.OBJECTIVE)
def dcpo(segments: int | None = None, clip: float = 0.2) -> Recipe:
    """DCPO (MemAct; needs episodes that restart their context): trains each segment under the context visible there.

    A = (R − mean)/(std + ε), one vote for each trajectory, on every token of each of its segments; every token alike

    Paper: Memory as Action: Autonomous Context Curation for Long-Horizon Agentic Tasks, arXiv 2510.12635.
    Settings: at most ``segments`` of a trajectory are trained on, at random; None: all.
    Deviation: a segment ends where the context is rewritten, or at a turn with the fact ``memory``. Penalties for limits and
    malformed calls are the environment's."""
    keep = SampledSegments(segments)
    return Recipe(advantage=Standardise(), gate=Clip(clip, clip), aggregate=Mean(TOKEN), keep=keep)


class OptimalTokenBaseline(Term):
    """A = G − Σ G W / Σ W over the trajectories of the group at the same token index; G the reward to go, W the running sum of
    1 − 2π + Σₐ π(a)², the squared norm of ∂ log π / ∂ logits. Where one trajectory alone has that index, the baseline is 0."""

    reads = frozenset({Signal.PROXIMAL, Signal.COLLISION})
    eps: float = 1e-8

    def __call__(self, batch: Batch) -> Field:
        tree = batch.tree
        to_go = token_reward(batch).running_sum(TRAJECTORY, reverse=True).to(torch.float64)
        energy = 1 - 2 * batch[Signal.PROXIMAL].to(torch.float64).exp() + batch[Signal.COLLISION].to(torch.float64)
        path = energy.running_sum(TRAJECTORY)
        peers = Partition.by(tree, TOKEN, batch.group, tree.index(TOKEN, TRAJECTORY))
        baseline = (to_go * path).sum(peers) / (path.sum(peers) + self.eps)
        return to_go - where(to_go.peer_count(peers) > 1, baseline, 0.0)


def optimal_token(clip: float = 0.2, eps: float = 1e-8) -> Recipe:
    """Optimal token baseline: at each token the baseline of least variance, a mean over the group weighted by path energy.

    A = G − Σ G W / Σ W over the rows at token t;  G: reward to go;  W = Σ_{j≤t} (1 − 2π(yⱼ) + Σₐ π(a)²);  clipped token mean

    Paper: the advantage estimator optimal_token_baseline of a public trainer (verl), 2026.
    Settings: clip 0.2, eps 1e-8; the end of the longest row, beyond all others, has no baseline, and a group of one has none.
    Deviation: no importance weights on W for samplers that differ from the learner."""
    return Recipe(advantage=OptimalTokenBaseline(eps), gate=Clip(clip, clip), aggregate=Mean(TOKEN))


# ------------------------------------------------------------------------ critics


def utterance_advantage(view: MicroBatchView) -> Field:
    """A = min Q − min V of each turn. Detached."""
    q, q_twin, v, v_twin = (view[s].detach() for s in TURN_CRITIC)
    return q.minimum(q_twin) - v.minimum(v_twin)


class UtteranceAdvantage(Factor):
    """min(Q, Q′) − min(V, V′) of the turn under the present critics; ``baseline`` subtracts the token-level value."""

    baseline: bool = False

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({*TURN_CRITIC, Signal.VALUE} if self.baseline else TURN_CRITIC)

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        a = utterance_advantage(view)
        return a - view[Signal.VALUE].detach() if self.baseline else a.at(TOKEN)


class UtteranceQError(Penalty):
    """Σ over both critics of (Q − r − γ V̄(s′))²; the value after the last turn is 0. One cost per turn that an environment
    answered: give it ``rows=RecordedActions()``."""

    reads = frozenset({Signal.Q, Signal.SECOND_Q, Signal.TARGET_V, Signal.TARGET_SECOND_V})
    gamma: float = number(0.9, least=0, most=1)

    def __call__(self, view: MicroBatchView) -> Field:
        reward = view.batch.reward.sum(TURN)
        target = lambda slow: reward + self.gamma * shift_turns(view.batch[slow], 1, 0.0)  # noqa: E731
        pairs = ((Signal.Q, Signal.TARGET_V), (Signal.SECOND_Q, Signal.TARGET_SECOND_V))
        one, twin = ((view[q] - target(slow)) ** 2 for q, slow in pairs)
        return one + twin


class UtteranceVError(Penalty):
    """Σ over both critics of (V − Q̄(s, a))², a the turn of the present policy: give it ``rows=PresentActions(...)``."""

    reads = frozenset({Signal.V, Signal.SECOND_V, Signal.TARGET_Q, Signal.TARGET_SECOND_Q})

    def __call__(self, view: MicroBatchView) -> Field:
        one = (view[Signal.V] - view.batch[Signal.TARGET_Q]) ** 2
        return one + (view[Signal.SECOND_V] - view.batch[Signal.TARGET_SECOND_Q]) ** 2


def sampled_again(batch: Batch) -> Field:
    """Trajectories with the fact ``fresh``: one turn that no environment answered."""
    return Fact("fresh", missing=0.0)(batch) > 0


class PresentActions(Selector):
    """Turns of the present policy: with ``fresh`` those sampled again at the states of a step (fact ``fresh``), replayed ones
    included; with 0 those of the step's own rollouts."""

    fresh: int = 1

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"fact fresh"}) if self.fresh else frozenset()

    def select(self, batch: Batch) -> Field:
        return sampled_again(batch) if self.fresh else ~(batch.replayed | batch.expert)


class RecordedActions(Selector):
    """Turns that an environment answered: all but those that were sampled again."""

    def select(self, batch: Batch) -> Field:
        return ~sampled_again(batch)


class TokenBaselineError(Penalty):
    """(A − b)²: trains the token-level value b on the utterance advantage of its turn."""

    reads = frozenset({*TURN_CRITIC, Signal.VALUE})

    def __call__(self, view: MicroBatchView) -> Field:
        return (utterance_advantage(view) - view[Signal.VALUE]) ** 2


@declares(Kind.OBJECTIVE)
def archer(
    gamma: float = 0.9,
    baseline: bool = False,
    value_weight: float = 1.0,
    fresh: int = 1,
    passes: int = 10,
    warm: int = 10,
    share: float = 1.0,
    oldest: int = 10,
) -> Recipe:
    """ArCHer: twin turn-level critics with replay; fresh actions at recorded states get their advantage and its policy gradient.

    Q → r + γ V̄(s'), V → Q̄(s, a'), bars: slow copies;  a' ∼ π(s);  ∇J = mean over a' of (min Q − min V) Σₜ ∇ log π(a'ₜ)

    Paper: ArCHer: Training Language Model Agents via Hierarchical Multi-Turn RL, arXiv 2402.19446.
    Settings: gamma 0.9, target rate 0.1, critic lr 2e-5, 50 critic and 3 actor epochs (10 and 1 here), 20 iterations of
    warm-up (10 here): without it the policy learns to end early, which is all an untrained critic predicts. Turns of the last 10
    steps, as many as fresh ones (share 1), are replayed. One fresh action of each state; fresh 0: the turns of the step itself.
    Deviation: fresh actions are drawn once for a batch, by the policy before it, and slow copies are read once for each batch.
    With baseline the token's own value head is subtracted and learns the verdict."""
    actor = PresentActions(fresh)
    return Recipe(
        advantage=Constant(1.0), ratio=OnPolicy(), gate=NoGate() * UtteranceAdvantage(baseline), aggregate=Sum(TURN),
        penalties=(
            WeightedPenalty(value_weight, UtteranceQError(gamma), Mean(TURN), rows=RecordedActions()),
            WeightedPenalty(value_weight, UtteranceVError(), Mean(TURN), rows=actor),
            WeightedPenalty(baseline, TokenBaselineError(), Mean(TOKEN)),
        ),
        keep=actor, control=CriticsFirst(passes, warm), replay=FreshActions(RecentBuffer(oldest, share=share), fresh),
    )  # fmt: skip


class TurnValueDifference(Term):
    """A = V(after) − V(before) of each turn, V the critic's estimate before its first token; after the last turn V is
    the return.

    A turn without tokens is no step: the turn before it continues with what follows. At TURN."""

    reads = frozenset({Signal.OLD_VALUE})
    # V is the sigmoid of the estimate
    probability: bool = False

    def __call__(self, batch: Batch) -> Field:
        value = batch[Signal.OLD_VALUE]
        value = value.map(torch.sigmoid) if self.probability else value
        before, after = step_values(batch, value, batch.reward.sum(TRAJECTORY).to(value.x.dtype))
        return after - before


class AdvantageRegressionError(Penalty):
    """(A/β − Σ over the turn of log π − log π_ref)²: 0 where π ∝ π_ref exp(A/β). One cost per turn."""

    reads = frozenset({Signal.REFERENCE})
    beta: float = number(0.1, above=0)

    def __call__(self, view: MicroBatchView) -> Field:
        log_ratio = (view.logp - view[Signal.REFERENCE]).sum(TURN)
        return (view[Column.ADVANTAGE].to(log_ratio.x.dtype) / self.beta - log_ratio) ** 2


class StatesWithSpread(Mask):
    """Turns in states whose advantages span at least ``min_spread``, over all turns with tokens that the group took
    there."""

    min_spread: float = number(0.0, least=0)

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"state"}) if self.min_spread else frozenset()

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        batch, tree = view.batch, view.batch.tree
        a, has_tokens = view[Column.ADVANTAGE].at(TURN), (tree.size(TOKEN, TURN) > 0).to(torch.int64)
        peers = Partition.by(tree, TURN, batch.group, batch.state, has_tokens)
        return a.max(peers) - a.min(peers) >= self.min_spread


class ActiveBatches(Schedule):
    """``scale`` from batch ``begin`` on and before batch ``end`` (0: no end), 0 otherwise. What has weight 0 has no gradient: a
    critic whose loss has ended stays as it is."""

    scale: float = number(1.0, least=0)
    begin: int = number(0, least=0)
    end: int = number(0, least=0)

    def at(self, t: float) -> float:
        return self.scale if t >= self.begin and (not self.end or t < self.end) else 0.0


def direct_advantage(
    beta: float = 0.1, least: float = 0.0, value_weight: float = 1.0, warm: int = 20, every: int = 20
) -> Recipe:
    """DAPO (direct advantage): a critic learns first and is frozen; then a step's log-ratio is regressed onto its advantage.

    min E (A/β − Σₜ log π/π_ref)² over steps, A = V(after) − V(before), R − V at the end;  V by cross-entropy to success

    Paper: Improving Multi-Step Reasoning with Direct Advantage Policy Optimization, arXiv 2412.18279.
    Settings: beta small; states whose advantages span less than ``least`` are left out. 20 batches for the critic and a new
    reference after every 20 batches are ours (0: never); with --critic separate nothing that the critic reads moves.
    Deviation: a step is a turn; several actions of a state are forks of two rollouts; each rollout labels its states with its
    own success, which has the gradient of their success rate."""
    regression = ResetReference(AdvantageRegressionError(beta), warm, every)
    return Recipe(
        advantage=TurnValueDifference(probability=True), gate=ZeroGate(), aggregate=Mean(TURN),
        keep=StatesWithSpread(least), strategy=Branch(2, "every"),
        penalties=(
            WeightedPenalty(ActiveBatches(1.0, warm), regression),
            WeightedPenalty(ActiveBatches(value_weight, 0, warm), StepCrossEntropy(), Sum(TURN), rows=AllTokens()),
        ),
    )  # fmt: skip


def same_start(batch: Batch) -> Partition:
    """Trajectories of a group that fork from one place; those that start at the prompt are one class."""
    token = batch.fork_token if batch.fork_token is not None else batch.fork * 0
    return Partition.by(batch.tree, TRAJECTORY, batch.group, batch.parent, batch.fork, token)


MIX = (0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D, 0x1B03738712FAD5C9)  # odd constants of a 64-bit hash


def draw_sets(batch: Batch, peers: Partition, size: int, sets: int) -> list[Tensor]:
    """For each set, which trajectories are its members: ``size`` random ones of every class, or all of fewer. [K] bool each."""
    by_seed = torch.argsort(batch.seed.x, stable=True)
    memberships = []
    for n in range(sets):
        x = (batch.seed.x + (n + 1) * MIX[0] % 2**62) * MIX[1]
        x = (x ^ (x >> 29)) * MIX[2]
        order = by_seed[torch.argsort((x ^ (x >> 32))[by_seed], stable=True)]
        rank = segments.rank_within(peers.label[order], peers.count)
        memberships.append(torch.empty_like(order).index_copy(0, order, rank) < size)
    return memberships


def set_value(value: Field, members: Field, state: Partition, equal: Partition) -> Field:
    """f of each state's set: the mean value of its members times the share of distinct ones, 0 if all of several are equal."""
    count = members.sum(state).clamp(low=1.0)
    distinct = (members / members.sum(equal).clamp(low=1.0)).sum(state)
    several = (count > 1.5) & (distinct < 1.5)
    return (value * members).sum(state) / count * where(several, 0.0, distinct / count)


class VineSetAdvantage(Term):
    """A = mean of f over a vine's sets − mean of f over all sets of its state, in its first turn and ``window`` turns after it;
    ``otherwise`` in all other turns. f(set) = mean return of its members, rescaled from [bottom, top] to [0, 1], times the share
    of distinct ones, 0 if all are equal.

    Of the vines of a state ``sets`` random sets of ``size`` are drawn; fewer vines form one set. A vine in no set gets
    ``otherwise``. Seeds of trajectories decide, so packing does not matter."""

    requires = frozenset({"forks"})
    compares_peers = True
    size: int = number(4, least=1)
    sets: int = number(4, least=1)
    window: int = number(5, least=0)
    bottom: float = number(0.0, below="top")
    top: float = 1.0
    otherwise: Term = field(default_factory=GAE)

    @property
    def reads(self) -> frozenset[Signal]:
        return self.otherwise.reads

    def __call__(self, batch: Batch) -> Field:
        credit, counted = self.set_credit(batch)
        near = batch.tree.index(TURN, TRAJECTORY) <= self.window
        return where(counted.at(TURN) & near, credit.at(TURN), self.otherwise(batch))

    def set_credit(self, batch: Batch) -> tuple[Field, Field]:
        """The advantage of each vine, and whether it is in a set. At TRAJECTORY."""
        tree, state = batch.tree, same_start(batch)
        value = rescale_to_unit(Field(tree, TRAJECTORY, ForkTree(batch).outcome()), self.bottom, self.top)
        equal = Partition.by(tree, TRAJECTORY, state.label, SameFact("key")(batch).label)
        one = lambda x: Field(tree, TRAJECTORY, x.to(value.x.dtype))  # noqa: E731
        drawn = [one(members) for members in draw_sets(batch, state, self.size, self.sets)]
        f = [set_value(value, members, state, equal) for members in drawn]
        baseline, times = sum(f[1:], f[0]) / len(f), sum(drawn[1:], drawn[0])
        paid = [members * (memberships - baseline) for members, memberships in zip(drawn, f)]
        return sum(paid[1:], paid[0]) / times.clamp(low=1.0), (times > 0) & (batch.parent >= 0)


class BehaviourKL(Penalty):
    """KL(μ‖π) from the sampler to the policy, by the estimator ρ − 1 − log ρ over what the sampler drew."""

    def __call__(self, view: MicroBatchView) -> Field:
        log = moved(view)
        return log.exp() - 1 - log


def polychromic_ppo(
    trunks: int = 1,
    states: int = 2,
    vines: int = 8,
    size: int = 4,
    sets: int = 4,
    window: int = 5,
    bottom: float = 0.0,
    top: float = 1.0,
    beta: float = 0.005,
    clip: float = 0.2,
    gamma: float = 1.0,
    lam: float = 0.95,
    value_clip: float = 0.5,
    value_weight: float = 1.0,
) -> Recipe:
    """Polychromic PPO: vines from states inside an episode, credited in sets by mean return times diversity; GAE elsewhere.

    f(set) = mean R · share of distinct members;  A = mean of f over a vine's sets − mean of f over all sets of its state
    J = clipped ρA − β KL(μ‖π) − critic;  A = GAE outside of the first ``window`` + 1 turns of vines

    Paper: Polychromic Objectives for Reinforcement Learning, arXiv 2509.25424.
    Settings: 8 vines, 4 sets of 4, 2 states, window 5, 2 epochs, gamma 1, beta about 0.005. Groups of 17: a trunk and its vines.
    A set of equal members has f = 0.
    Deviation: an action in several sets takes their mean; a vine in no set is credited by GAE. Trajectories are equal by the
    fact `key`; where it is not recorded, by their actions after the state."""
    base = ppo(clip, gamma, lam, value_clip, value_weight)
    return replace(
        base,
        advantage=VineSetAdvantage(size, sets, window, bottom, top, GAE(gamma, lam)),
        penalties=(WeightedPenalty(beta, BehaviourKL()), *base.penalties),
        strategy=Vines(trunks, states, vines),
        budget=Fixed(8, 17),
    )
