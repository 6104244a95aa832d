"""Forked groups: a trajectory that left another owns only what it sampled itself, and what they share is credited once,
with what all who passed through it earned.

Legend: a slot is a place between tokens, so a turn of n tokens has n + 1 of them; slots are numbered along the batch, behind
them comes one more for each group: the prompt, where all trajectories begin that left no other. A cut is a slot somebody
left at, a segment what lies between two cuts. K trajectories, S slots with the prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from turnwise.algebra.mask import Mask
from turnwise.algebra.piece import Now
from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, TURN, Field
from turnwise.maths import returns

ROUNDING = 1e-12


class Forks:
    """Who left whom, and where. Everything is computed for all trajectories at once, in as many rounds as forks are deep."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.tree = batch, batch.tree
        tokens, turns = self.tree.size(TOKEN, TURN).x, self.tree.size(TURN, TRAJECTORY).x
        here = torch.arange(tokens.numel(), device=tokens.device)
        self.first_turn = turns.cumsum(0) - turns  # [K]
        self.slot_of_turn = tokens.cumsum(0) - tokens + here  # [U] its first slot
        self.owner = torch.repeat_interleave(self.tree.parents[1], tokens + 1)  # [S − G] whose slot it is
        self.prompts = self.owner.numel()  # the first group's
        self.slots = self.prompts + self.tree.count(GROUP)
        self.declared = _find(batch)
        self.depth = self._depth(self.declared)
        self.left, self.origin = self._origin()

    def _depth(self, parent: Tensor) -> int:
        """How many forks lead to the trajectory with the most."""
        up, depth = parent, 0
        while depth <= parent.numel() and bool((up >= 0).any()):
            up, depth = torch.where(up >= 0, parent[up.clamp(min=0)], -1), depth + 1
        return depth

    def _fork_turn(self) -> Tensor:
        """The turn at which each left its parent, [K]; of those that left none, some turn."""
        at = self.first_turn[self.declared.clamp(min=0)] + self.batch.fork.x
        return torch.where(self.declared >= 0, at, 0)

    def _origin(self) -> tuple[Tensor, Tensor]:
        """Whom each left (−1: nobody) and at which slot. Who left before another's first token began where that one did."""
        parent, group = self.declared, self.tree.ancestor(TRAJECTORY, GROUP)
        if not self.prompts:
            return parent, group
        offset = self.batch.fork_token.x if self.batch.fork_token is not None else 0
        origin = torch.where(parent >= 0, self.slot_of_turn[self._fork_turn()] + offset, self.prompts + group)
        for _ in range(self.depth):
            above = parent.clamp(min=0)
            at_start = (parent >= 0) & (origin == self.first_slot[above])
            origin = torch.where(at_start, origin[above], origin)
            parent = torch.where(at_start, parent[above], parent)
        return parent, origin

    @cached_property
    def first_slot(self) -> Tensor:
        """Of each trajectory, [K]; −1 where it has no turn."""
        if not self.prompts:
            return torch.full_like(self.first_turn, -1)
        found = self.slot_of_turn[self.first_turn.clamp(max=self.slot_of_turn.numel() - 1)]
        return torch.where(self.tree.size(TURN, TRAJECTORY).x > 0, found, -1)

    @cached_property
    def last(self) -> Tensor:
        """Which slots are the last of their trajectory, [S − G]."""
        return torch.nn.functional.pad(self.owner[1:], (0, 1), value=-1) != self.owner

    @cached_property
    def after(self) -> Tensor:
        """The slot behind each token, [N]."""
        return torch.arange(self.tree.count(TOKEN), device=self.owner.device) + self.tree.parents[0] + 1

    def at_origins(self, x: Tensor) -> Tensor:
        """Σ of a number of each trajectory over those that begin at a slot, [S]."""
        return x.new_zeros(self.slots).index_add(0, self.origin, x)

    # -------------------------------------------------------------- what is earned
    def outcome(self) -> Tensor:
        """R of each trajectory with what was earned on the way to its fork, [K] float64."""
        reward = self.batch.reward.sum(TURN).to(torch.float64)
        own = reward.sum(TRAJECTORY).x
        if not self.depth:
            return own
        before = (reward.running_sum(TRAJECTORY) - reward).x[self._fork_turn()]
        step = torch.where(self.declared >= 0, before, 0.0)
        inherited = step
        for _ in range(self.depth):
            inherited = step + torch.where(self.declared >= 0, inherited[self.declared.clamp(min=0)], 0.0)
        return own + inherited

    def through(self, value: Tensor) -> Tensor:
        """Σ of a number of each trajectory over all that pass through a token, [N]."""
        whole = value
        child = (self.left >= 0).to(value.dtype)
        for _ in range(self.depth):  # a trajectory with all that left it, and all that left those
            whole = value.index_add(0, self.left.clamp(min=0), child * whole)
        joined = self.at_origins(whole)[: self.prompts]
        later = returns.backward_recurrence(joined, (~self.last).to(value.dtype))
        return value[self.tree.ancestor(TOKEN, TRAJECTORY)] + later[self.after]

    def nested(self, final: Tensor) -> Tensor:
        """V of every slot, [S]: after the last token the outcome, at a cut the mean of V where each way on from there ends."""
        ways = self.at_origins(torch.ones_like(final))
        first = final
        for _ in range(self.depth + 1):
            sums = self.at_origins(first)
            end = torch.where(self.last, final[self.owner], 0.0)
            share = 1 / (1 + ways[: self.prompts])
            value = returns.backward_recurrence((sums[: self.prompts] + end) * share, share * ~self.last)
            first = torch.where(self.first_slot >= 0, value[self.first_slot], final) if value.numel() else final
        return torch.cat([value, sums[self.prompts :] / ways[self.prompts :].clamp(min=1)])

    def spread(self, final: Tensor, value: Tensor) -> Tensor:
        """The std (n − 1) of V over the ways on from a slot, [S]; 0 where there is one."""
        first = torch.where(self.first_slot >= 0, value[self.first_slot], final)
        squares = self.at_origins((first - value[self.origin]) ** 2)
        ways = self.at_origins(torch.ones_like(final))
        onward = torch.where(self.last, final[self.owner], torch.nn.functional.pad(value[1 : self.prompts], (0, 1)))
        squares[: self.prompts] += (onward - value[: self.prompts]) ** 2
        ways[: self.prompts] += 1
        return (squares / (ways - 1).clamp(min=1)).sqrt()

    # ------------------------------------------------------------------- segments
    def begin(self, cut: Tensor) -> Tensor:
        """The cut at which each token's segment begins, [N]: the last before it, or where its trajectory began. ``cut`` [S]."""
        here = torch.arange(self.prompts, device=cut.device)
        opens = torch.zeros_like(cut[: self.prompts])
        opens[self.first_slot[self.first_slot >= 0]] = True
        last = torch.where(cut[: self.prompts] | opens, here, -1).cummax(0).values if self.prompts else here
        found = last[self.after - 1]
        start = self.origin[self.tree.ancestor(TOKEN, TRAJECTORY)]
        return torch.where(opens[found], start, found)

    def ending(self, value: Tensor, cut: Tensor, final: Tensor) -> Tensor:
        """V where each token's segment ends, [N]: at the next cut, or the outcome."""
        inside = cut[: self.prompts]
        known = torch.where(inside, value[: self.prompts], torch.where(self.last, final[self.owner], 0.0))
        return returns.backward_recurrence(known, (~(inside | self.last)).to(known.dtype))[self.after]


def _find(batch: Batch) -> Tensor:
    """The index of each trajectory's parent, [K]; −1 where it has none in this batch."""
    key = (batch.tree.ancestor(TRAJECTORY, GROUP) << 33) + batch.seed.x
    wanted = torch.where(batch.parent.x >= 0, key - batch.seed.x + batch.parent.x, -1)
    ordered, order = torch.sort(key, stable=True)
    at = torch.searchsorted(ordered, wanted).clamp(max=key.numel() - 1)
    return torch.where(ordered[at] == wanted, order[at], -1)


# ----------------------------------------------------------------------- credit


class OfForks(Term):
    """What reads the forks of a group."""

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"forks"})


@dataclass(frozen=True)
class Earned(OfForks):
    """R = Σ of the rewards on the way from the prompt, also those before the fork, where the parent earned them."""

    def __call__(self, batch: Batch) -> Field:
        return Field(batch.tree, TRAJECTORY, Forks(batch).outcome())


@dataclass(frozen=True)
class Through(OfForks):
    """The mean of ``term`` over all trajectories that pass through a token. At TOKEN.

    ``copies``: their sum, as if each had its own copy of what they share."""

    term: Term
    copies: bool = False

    def __call__(self, batch: Batch) -> Field:
        value, forks = self.term(batch).at(TRAJECTORY).x.double(), Forks(batch)
        total = forks.through(value)
        return Field(batch.tree, TOKEN, total if self.copies else total / forks.through(torch.ones_like(value)))


@dataclass(frozen=True)
class NestedRise(OfForks):
    """A = V(end) − V(start) of each segment between forks. At TOKEN.

    V of a leaf is its outcome, V of a cut the mean of V where the ways on from it end. ``scale`` divides by the std of those
    ways' V plus ε."""

    scale: bool = False
    eps: float = 1e-8

    @property
    def judges(self) -> bool:
        return True

    def __call__(self, batch: Batch) -> Field:
        forks = Forks(batch)
        final = forks.outcome()
        value = forks.nested(final)
        cut = forks.at_origins(torch.ones_like(final)) > 0
        start = forks.begin(cut)
        rise = forks.ending(value, cut, final) - value[start]
        rise = torch.where(rise.abs() < ROUNDING, 0.0, rise)  # else a tiny std would blow it up
        return Field(batch.tree, TOKEN, rise / (forks.spread(final, value)[start] + self.eps) if self.scale else rise)


@dataclass(frozen=True)
class SampledRise(OfForks):
    """A = V(end) − V(start) of each segment, V of a cut the mean outcome of those that left there. At TOKEN.

    After its last token a trajectory is worth its outcome; where it began, the mean of the *others* that began there. Its
    first segment gets 0 where nobody else did."""

    @property
    def judges(self) -> bool:
        return True

    def __call__(self, batch: Batch) -> Field:
        forks = Forks(batch)
        final, owner = forks.outcome(), batch.tree.ancestor(TOKEN, TRAJECTORY)
        count, sums = forks.at_origins(torch.ones_like(final)), forks.at_origins(final)
        value, start = sums / count.clamp(min=1), forks.begin(count > 0)
        own = start == forks.origin[owner]  # not itself among those who tell
        others = count[start] - own.double()
        begin = (sums[start] - own * final[owner]) / others.clamp(min=1)
        return Field(batch.tree, TOKEN, torch.where(others > 0, forks.ending(value, count > 0, final) - begin, 0.0))


# ------------------------------------------------------------------------ masks


@dataclass(frozen=True)
class Unforked(Mask):
    """Trajectories that began at the prompt: those that left another only told what it was worth there."""

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        return now.batch.parent < 0


@dataclass(frozen=True)
class AfterForks(Mask):
    """Tokens behind the last place where another trajectory left theirs. Planned, as a cut may part the two."""

    def plan(self, whole: Now) -> dict[object, Field]:
        forks = Forks(whole.batch)
        cut = forks.at_origins((forks.left >= 0).double())[: forks.prompts]
        later = returns.backward_recurrence(cut, (~forks.last).double())
        return {self: Field(whole.batch.tree, TOKEN, later[forks.after] == 0)}

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        return now[self]


__all__ = ["AfterForks", "Earned", "Forks", "NestedRise", "OfForks", "SampledRise", "Through", "Unforked"]
