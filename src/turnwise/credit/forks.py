"""Forked groups: a trajectory that forks from another owns only the tokens it sampled itself. Shared tokens are
credited once, with the returns of all trajectories that pass through them. Does not know how a group was branched.

Legend: a position lies between tokens, so a turn of n tokens has n + 1 of them. Positions are numbered along the batch,
followed by one per group: the prompt, where all unforked trajectories start. A cut is a position where a trajectory
forks, a segment lies between two cuts. K trajectories, S positions with the prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from turnwise.algebra.mask import Mask
from turnwise.algebra.piece import MicroBatchView
from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, TURN, Field
from turnwise.maths import returns
from turnwise.maths.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

ROUNDING = 1e-12


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
        self.recorded_parent = _parent_index(batch)
        self.depth = self._max_depth(self.recorded_parent)
        self.parent, self.start = self._starts()

    def _max_depth(self, parent: Tensor) -> int:
        """Number of forks on the way to the deepest trajectory."""
        up, depth = parent, 0
        while depth <= parent.numel() and bool((up >= 0).any()):
            up, depth = torch.where(up >= 0, parent[up.clamp(min=0)], -1), depth + 1
        return depth

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
        own_return = reward.sum(TRAJECTORY).x
        if not self.depth:
            return own_return
        before = (reward.running_sum(TRAJECTORY) - reward).x[self._fork_turn()]
        step = torch.where(self.recorded_parent >= 0, before, 0.0)
        inherited = step
        for _ in range(self.depth):
            inherited = step + torch.where(self.recorded_parent >= 0, inherited[self.recorded_parent.clamp(min=0)], 0.0)
        return own_return + inherited

    def sum_over_paths(self, value: Tensor) -> Tensor:
        """Σ of a per-trajectory value over all trajectories that pass through a token, [N]."""
        subtree = value
        child = (self.parent >= 0).to(value.dtype)
        for _ in range(self.depth):  # a trajectory, its branches, their branches ...
            subtree = value.index_add(0, self.parent.clamp(min=0), child * subtree)
        joined = self.sum_at_starts(subtree)[: self.first_prompt]
        later = returns.backward_recurrence(joined, (~self.is_last).to(value.dtype))
        return value[self.tree.ancestor(TOKEN, TRAJECTORY)] + later[self.position_after]

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
        onward = torch.where(
            self.is_last, final[self.owner], torch.nn.functional.pad(value[1 : self.first_prompt], (0, 1))
        )
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
        last_cut = (
            torch.where(cut[: self.first_prompt] | opening, position, -1).cummax(0).values
            if self.first_prompt
            else position
        )
        cut_before = last_cut[self.position_after - 1]
        start = self.start[self.tree.ancestor(TOKEN, TRAJECTORY)]
        return torch.where(opening[cut_before], start, cut_before)

    def segment_end_values(self, value: Tensor, cut: Tensor, final: Tensor) -> Tensor:
        """V where each token's segment ends, [N]: at the next cut, or the return."""
        inside = cut[: self.first_prompt]
        boundary_value = torch.where(
            inside, value[: self.first_prompt], torch.where(self.is_last, final[self.owner], 0.0)
        )
        return returns.backward_recurrence(boundary_value, (~(inside | self.is_last)).to(boundary_value.dtype))[
            self.position_after
        ]


def _parent_index(batch: Batch) -> Tensor:
    """Index of each trajectory's parent, [K]; −1 where it has none in this batch."""
    key = (batch.tree.ancestor(TRAJECTORY, GROUP) << 33) + batch.seed.x
    parent_key = torch.where(batch.parent.x >= 0, key - batch.seed.x + batch.parent.x, -1)
    ordered, order = torch.sort(key, stable=True)
    at = torch.searchsorted(ordered, parent_key).clamp(max=key.numel() - 1)
    return torch.where(ordered[at] == parent_key, order[at], -1)


# ----------------------------------------------------------------------- credit


class ForkTerm(Term):
    """Base of terms that read the forks of a group."""

    requires = frozenset({"forks"})


@dataclass(frozen=True)
class PathReturn(ForkTerm):
    """R = Σ of the rewards along the path from the prompt, including those before the fork, which the parent earned."""

    def __call__(self, batch: Batch) -> Field:
        return Field(batch.tree, TRAJECTORY, ForkTree(batch).outcome())


@dataclass(frozen=True)
class MeanOverPaths(ForkTerm):
    """The mean of ``term`` over all trajectories that pass through a token. At TOKEN.

    ``copies``: their sum, as if each trajectory had its own copy of the shared tokens."""

    term: Term
    copies: bool = False

    def __call__(self, batch: Batch) -> Field:
        value, forks = self.term(batch).at(TRAJECTORY).x.double(), ForkTree(batch)
        total = forks.sum_over_paths(value)
        return Field(batch.tree, TOKEN, total if self.copies else total / forks.sum_over_paths(torch.ones_like(value)))


@dataclass(frozen=True)
class TreeValueDifference(ForkTerm):
    """A = V(end) − V(start) of each segment between forks. At TOKEN.

    V of a leaf is its return, V of a cut the mean over its branches of V where they end. ``scale`` divides by the std
    of those V plus ε."""

    compares_peers = True

    scale: bool = False
    eps: float = 1e-8

    def __call__(self, batch: Batch) -> Field:
        forks = ForkTree(batch)
        final = forks.outcome()
        value = forks.tree_values(final)
        cut = forks.sum_at_starts(torch.ones_like(final)) > 0
        start = forks.segment_starts(cut)
        difference = forks.segment_end_values(value, cut, final) - value[start]
        difference = torch.where(
            difference.abs() < ROUNDING, 0.0, difference
        )  # dividing by a tiny std would amplify rounding errors
        return Field(
            batch.tree,
            TOKEN,
            difference / (forks.branch_std(final, value)[start] + self.eps) if self.scale else difference,
        )


@dataclass(frozen=True)
class MonteCarloValueDifference(ForkTerm):
    """A = V(end) − V(start) of each segment, V of a cut the mean return of the trajectories that fork there. At TOKEN.

    V after the last token is the return; V at a trajectory's start is the mean of the *others* that start there. The
    first segment gets 0 where there are no others."""

    compares_peers = True

    def __call__(self, batch: Batch) -> Field:
        forks = ForkTree(batch)
        final, owner = forks.outcome(), batch.tree.ancestor(TOKEN, TRAJECTORY)
        count, sums = forks.sum_at_starts(torch.ones_like(final)), forks.sum_at_starts(final)
        value, start = sums / count.clamp(min=1), forks.segment_starts(count > 0)
        own_start = start == forks.start[owner]  # the trajectory itself is not part of its baseline
        others = count[start] - own_start.double()
        begin = (sums[start] - own_start * final[owner]) / others.clamp(min=1)
        return Field(
            batch.tree, TOKEN, torch.where(others > 0, forks.segment_end_values(value, count > 0, final) - begin, 0.0)
        )


# ------------------------------------------------------------------------ masks


@dataclass(frozen=True)
class UnforkedTrajectories(Mask):
    """Trajectories that start at the prompt; forked ones only estimate values."""

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return view.batch.parent < 0


@dataclass(frozen=True)
class AfterLastFork(Mask):
    """Tokens after the last position where another trajectory forks off. Planned over whole groups: a split may part
    the two."""

    def plan(self, view: MicroBatchView) -> dict[object, Field]:
        forks = ForkTree(view.batch)
        cut = forks.sum_at_starts((forks.parent >= 0).double())[: forks.first_prompt]
        later = returns.backward_recurrence(cut, (~forks.is_last).double())
        return {self: Field(view.batch.tree, TOKEN, later[forks.position_after] == 0)}

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return view[self]


__all__ = [
    "AfterLastFork", "ForkTerm", "ForkTree", "MeanOverPaths", "MonteCarloValueDifference", "PathReturn",
    "TreeValueDifference", "UnforkedTrajectories",
]  # fmt: skip
