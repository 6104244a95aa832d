"""Levels, trees and fields: a value knows at which level it lives.

    TOKEN ⊂ TURN ⊂ TRAJECTORY ⊂ GROUP ⊂ BATCH

Only sampled tokens are TOKENs, so there is no mask to forget. Arithmetic spreads the coarser side down to the finer one;
gathering up is always written out: ``logp.mean(TURN)``, ``reward.std(GROUP)``, ``value.mean(same_state)``.

This module knows nothing of rewards, policies or text.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from turnwise.errors import LevelError
from turnwise.maths import segments


class Level(IntEnum):
    TOKEN = 0
    TURN = 1
    TRAJECTORY = 2
    GROUP = 3
    BATCH = 4

    def __repr__(self) -> str:
        return self.name


TOKEN, TURN, TRAJECTORY, GROUP, BATCH = Level
ALIGNED = 16  # bytes: where a tensor may begin in a buffer of several


class Tree:
    """Parent pointers TOKEN → TURN → TRAJECTORY → GROUP of one batch.

    Tokens of a turn are in the order they were sampled, turns of a trajectory in the order they were taken.
    Trajectories may come in any order. A turn may be empty; a group holds at least one trajectory.
    """

    def __init__(
        self,
        turn_of_token: Tensor,
        trajectory_of_turn: Tensor,
        group_of_trajectory: Tensor,
        groups: int,
        check: bool = True,
    ) -> None:
        """``check``: parents must be there. What was checked before need not be again."""
        self.parents = (turn_of_token, trajectory_of_turn, group_of_trajectory)
        self.sizes = (turn_of_token.numel(), trajectory_of_turn.numel(), group_of_trajectory.numel(), groups, 1)
        for level, parent in enumerate(self.parents):
            if parent.dtype != torch.int64 or parent.dim() != 1:
                seen = f"{parent.dtype} {parent.shape}"
                raise LevelError(f"parents of {Level(level)!r} must be a flat int64 tensor, got {seen}")
            if check and parent.numel() and not (int(parent.min()) >= 0 and int(parent.max()) < self.sizes[level + 1]):
                raise LevelError(f"parents of {Level(level)!r} point outside the {self.sizes[level + 1]} items above")
        self._labels: dict[tuple[Level, Level], Tensor] = {}
        self._in_order: bool | None = None  # tokens by turn and turns by trajectory; None: not looked at yet

    @classmethod
    def ragged(cls, groups: Sequence[Sequence[Sequence[int]]], device: str = "cpu") -> Tree:
        """From token counts: ``Tree.ragged([[[2, 1], [3]], [[1]]])`` is two groups, the first of two trajectories."""
        turns = [n for group in groups for trajectory in group for n in trajectory]
        trajectories = [len(trajectory) for group in groups for trajectory in group]
        repeat = lambda counts: torch.repeat_interleave(torch.tensor(counts, dtype=torch.int64, device=device))  # noqa: E731
        return cls(repeat(turns), repeat(trajectories), repeat([len(group) for group in groups]), len(groups))

    def count(self, level: Level) -> int:
        return self.sizes[level]

    @property
    def device(self) -> torch.device:
        return self.parents[0].device

    def ancestor(self, of: Level, at: Level) -> Tensor:
        """For each item of level ``of``, the index of its ancestor at level ``at``, [count(of)]."""
        if at < of:
            raise LevelError(f"an item of {of!r} has no ancestor at the finer level {at!r}")
        if (of, at) not in self._labels:
            if at == BATCH:
                label = torch.zeros(self.count(of), dtype=torch.int64, device=self.device)
            elif at == of:
                label = torch.arange(self.count(of), device=self.device)
            else:
                label = self.parents[of]
                for level in range(of + 1, at):
                    label = self.parents[level][label]
            self._labels[of, at] = label
        return self._labels[of, at]

    def field(self, level: Level, x: Any, dtype: torch.dtype | None = None) -> Field:
        return Field(self, level, torch.as_tensor(x, dtype=dtype, device=self.device))

    def full(self, level: Level, value: float, dtype: torch.dtype = torch.float32) -> Field:
        return Field(self, level, torch.full((self.count(level),), value, dtype=dtype, device=self.device))

    def size(self, of: Level, inside: Level) -> Field:
        """How many items of level ``of`` lie inside each item of level ``inside``."""
        return Field(self, inside, segments.size(self.ancestor(of, inside), self.count(inside)))

    def index(self, of: Level, inside: Level) -> Field:
        """0-based position of each item among its siblings inside ``inside``; e.g. the index of a turn in its trajectory."""
        return Field(self, of, segments.rank_within(self.ancestor(of, inside), self.count(inside)))

    def run(self, trajectories: Sequence[int]) -> slice | None:
        """These trajectories as a slice, where they are neighbours and the tree lies in order on the host: then so do all their
        items, and what is kept of them can be cut out instead of picked out."""
        first, last = (trajectories[0], trajectories[-1]) if len(trajectories) else (0, -1)
        near = self.in_order and list(trajectories) == list(range(first, last + 1))
        return slice(first, last + 1) if near else None

    @property
    def in_order(self) -> bool:
        """Whether tokens lie as their turns do and turns as their trajectories; on a GPU nobody looks."""
        if self._in_order is None:
            self._in_order = self.device.type == "cpu" and all(bool((p[1:] >= p[:-1]).all()) for p in self.parents[:2])
        return self._in_order

    def cut(self, run: slice) -> tuple[Tree, tuple[Any, ...]]:
        """``select`` of a run of trajectories: slices instead of indices."""
        turns = _between(self.parents[1], run)
        tokens = _between(self.parents[0], turns)
        groups, group_of = torch.unique(self.parents[2][run], return_inverse=True)
        parents = (self.parents[0][tokens] - turns.start, self.parents[1][turns] - run.start, group_of)
        tree = Tree(*parents, groups.numel(), check=False)
        return tree, (tokens, turns, run, groups, slice(0, 1))

    def select(self, trajectories: Tensor) -> tuple[Tree, tuple[Any, ...]]:
        """The tree of some whole trajectories, in that order, and for each level which items were kept."""
        position = torch.full((self.count(TRAJECTORY),), -1, dtype=torch.int64, device=self.device)
        position[trajectories] = torch.arange(trajectories.numel(), device=self.device)
        kept: list[Tensor] = []
        ascend = self.in_order and bool((trajectories[1:] > trajectories[:-1]).all())
        for level in (TOKEN, TURN):
            new = position[self.ancestor(level, TRAJECTORY)]
            found = (new >= 0).nonzero().squeeze(1)
            kept.append(found if ascend else found[torch.argsort(new[found], stable=True)])
        groups, group_of = torch.unique(self.parents[2][trajectories], return_inverse=True)
        kept += [trajectories, groups, torch.zeros(1, dtype=torch.int64, device=self.device)]
        new_turn = torch.full((self.count(TURN),), -1, dtype=torch.int64, device=self.device)
        new_turn[kept[1]] = torch.arange(kept[1].numel(), device=self.device)
        tree = Tree(new_turn[self.parents[0][kept[0]]], position[self.parents[1][kept[1]]], group_of, groups.numel())
        return tree, tuple(kept)

    def moved(self, parents: Sequence[Tensor]) -> Tree:
        """The same tree with its parents where somebody sent them."""
        a, b, c = parents
        return Tree(a, b, c, self.count(GROUP), check=False)

    def __repr__(self) -> str:
        return "Tree({} tokens, {} turns, {} trajectories, {} groups)".format(*self.sizes)


def _between(parent: Tensor, above: slice) -> slice:
    """The items whose parents, which ascend, lie in ``above``."""
    return slice(*torch.searchsorted(parent, torch.tensor([above.start, above.stop])).tolist())


def send(x: Tensor, device: torch.device | str) -> Tensor:
    """To a device; to a GPU without waiting for what it is doing."""
    ahead = x.device.type == "cpu" and torch.device(device).type == "cuda"
    return x.pin_memory().to(device, non_blocking=True) if ahead else x.to(device)


def send_all(tensors: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """The same for many, as one copy if they lie on the host: dozens of small ones would keep it busy for milliseconds."""
    if torch.device(device).type != "cuda" or any(x.device.type != "cpu" for x in tensors):
        return [send(x, device) for x in tensors]
    return together(tensors, lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True), device)


def together(tensors: Sequence[Tensor], room: Callable[[int], Tensor], device: torch.device | str) -> list[Tensor]:
    """Copied side by side into one buffer, which is sent as a whole."""
    starts, size = [], 0
    for x in tensors:
        starts.append(size)
        size += -(-x.nbytes // ALIGNED) * ALIGNED
    here = room(size)

    def views(buffer: Tensor) -> list[Tensor]:
        return [buffer[a : a + x.nbytes].view(x.dtype).view(x.shape) for a, x in zip(starts, tensors)]

    for into, x in zip(views(here), tensors):
        into.copy_(x)
    return views(here.to(device, non_blocking=True))


@dataclass(frozen=True, eq=False)
class Partition:
    """Peers that are not a level: a class for each item of one level. Classes are numbered from 0.

    ``Partition.by(tree, TURN, group_index, turn_index)`` puts together the k-th turns of a group."""

    tree: Tree
    level: Level
    label: Tensor
    count: int

    @classmethod
    def by(cls, tree: Tree, level: Level, *keys: Field | Tensor) -> Partition:
        """Items with equal keys are peers. Fields of a coarser level are spread down first."""
        columns = [(k.at(level).x if isinstance(k, Field) else k).long() for k in keys]
        if not columns or any(c.numel() != tree.count(level) for c in columns):
            raise LevelError(f"a partition of {level!r} needs at least one key with {tree.count(level)} values")
        label = torch.zeros_like(columns[0])
        for column in columns:  # one key at a time: unique rows of a matrix are ten times slower
            _, key = torch.unique(column, return_inverse=True)
            _, label = torch.unique(label * (column.numel() + 1) + key, return_inverse=True)
        return cls(tree, level, label, int(label.max()) + 1 if label.numel() else 0)


Peers: TypeAlias = "Level | Partition"


@dataclass(frozen=True, eq=False)
class Field:
    """One number for each item of a level, packed. ``x`` has shape [tree.count(level)]."""

    tree: Tree
    level: Level
    x: Tensor

    def __post_init__(self) -> None:
        if self.x.shape != (self.tree.count(self.level),):
            wanted, seen = self.tree.count(self.level), tuple(self.x.shape)
            raise LevelError(f"a field at {self.level!r} of {self.tree} needs shape ({wanted},), got {seen}")

    # ------------------------------------------------------------ moving
    def at(self, level: Level) -> Field:
        """Spread down to a finer level."""
        if level == self.level:
            return self
        if level > self.level:
            raise LevelError(
                f"a field at {self.level!r} cannot be spread up to {level!r}; gather it: .mean({level!r}), .sum ..."
            )
        return Field(self.tree, level, self.x[self.tree.ancestor(level, self.level)])

    def _gather(self, over: Peers, reduce: Callable[[Tensor, Tensor, int], Tensor]) -> Field:
        """Level: one value for each item above. Partition: each item receives the value of its class."""
        if isinstance(over, Partition):
            if over.tree is not self.tree:
                raise LevelError("a field and a partition of two different trees")
            mine = self.at(over.level)
            return Field(self.tree, over.level, reduce(mine.x, over.label, over.count)[over.label])
        return Field(self.tree, over, reduce(self.x, self.tree.ancestor(self.level, over), self.tree.count(over)))

    def sum(self, over: Peers) -> Field:
        return self if over == self.level else self._gather(over, segments.total)

    def mean(self, over: Peers) -> Field:
        return self._gather(over, segments.mean)

    def min(self, over: Peers) -> Field:
        return self._gather(over, lambda x, label, n: segments.extreme(x, label, n, largest=False))

    def max(self, over: Peers) -> Field:
        return self._gather(over, lambda x, label, n: segments.extreme(x, label, n, largest=True))

    def std(self, over: Peers, correction: int = 1) -> Field:
        return self._gather(over, lambda x, label, n: segments.std(x, label, n, correction=correction))

    def median(self, over: Peers) -> Field:
        return self._gather(over, segments.median)

    def peers(self, over: Peers) -> Field:
        """How many items are gathered, as a float field."""
        return self._gather(over, lambda x, label, n: segments.size(label, n).to(x.dtype))

    def leave_one_out(self, over: Peers) -> Field:
        """The mean of the other peers, at this field's own level."""
        label, n = self._labels(over)
        return Field(self.tree, self.level, segments.leave_one_out(self.x, label, n))

    def running_sum(self, inside: Peers, reverse: bool = False) -> Field:
        """Inclusive cumulative sum among siblings, forwards or backwards."""
        label, n = self._labels(inside)
        return Field(self.tree, self.level, segments.running_sum(self.x, label, n, reverse=reverse))

    def _labels(self, over: Peers) -> tuple[Tensor, int]:
        if isinstance(over, Partition):
            if over.tree is not self.tree or over.level != self.level:
                raise LevelError(f"this needs a partition of {self.level!r} of the same tree")
            return over.label, over.count
        return self.tree.ancestor(self.level, over), self.tree.count(over)

    # -------------------------------------------------------- arithmetic
    def _with(self, other: Field | float | Tensor, f: Callable[[Any, Any], Tensor]) -> Field:
        if isinstance(other, Field):
            if other.tree is not self.tree:
                raise LevelError("two fields of different trees cannot be combined")
            level = min(self.level, other.level)
            return Field(self.tree, level, f(self.at(level).x, other.at(level).x))
        return Field(self.tree, self.level, f(self.x, other))

    def map(self, f: Callable[[Tensor], Tensor]) -> Field:
        return Field(self.tree, self.level, f(self.x))

    def __add__(self, o: Field | float) -> Field:
        return self._with(o, operator.add)

    def __sub__(self, o: Field | float) -> Field:
        return self._with(o, operator.sub)

    def __mul__(self, o: Field | float) -> Field:
        return self._with(o, operator.mul)

    def __truediv__(self, o: Field | float) -> Field:
        return self._with(o, operator.truediv)

    def __rsub__(self, o: float) -> Field:
        return self.map(lambda x: o - x)

    def __rtruediv__(self, o: float) -> Field:
        return self.map(lambda x: o / x)

    __radd__ = __add__
    __rmul__ = __mul__

    def __pow__(self, o: float) -> Field:
        return self.map(lambda x: x**o)

    def __neg__(self) -> Field:
        return self.map(operator.neg)

    def __gt__(self, o: Field | float) -> Field:
        return self._with(o, operator.gt)

    def __lt__(self, o: Field | float) -> Field:
        return self._with(o, operator.lt)

    def __ge__(self, o: Field | float) -> Field:
        return self._with(o, operator.ge)

    def __le__(self, o: Field | float) -> Field:
        return self._with(o, operator.le)

    def __and__(self, o: Field) -> Field:
        return self._with(o, operator.and_)

    def __or__(self, o: Field) -> Field:
        return self._with(o, operator.or_)

    def __invert__(self) -> Field:
        return self.map(operator.invert)

    def exp(self) -> Field:
        return self.map(torch.exp)

    def log(self) -> Field:
        return self.map(torch.log)

    def abs(self) -> Field:
        return self.map(torch.abs)

    def clamp(self, low: float | None = None, high: float | None = None) -> Field:
        return self.map(lambda x: x.clamp(low, high))

    def minimum(self, o: Field) -> Field:
        return self._with(o, torch.minimum)

    def maximum(self, o: Field) -> Field:
        return self._with(o, torch.maximum)

    def detach(self) -> Field:
        return self.map(torch.detach)

    def to(self, dtype: torch.dtype) -> Field:
        return self.map(lambda x: x.to(dtype))

    @cached_property
    def item(self) -> Any:
        """The single number of a BATCH field."""
        if self.level != BATCH:
            raise LevelError(f"only a BATCH field is one number; this one is at {self.level!r}")
        return self.x[0].item()

    def __repr__(self) -> str:
        return f"Field({self.level!r}, {self.x})"


def where(condition: Field, yes: Field | float, no: Field | float) -> Field:
    """Elementwise choice, at the finest of the levels involved."""
    fields = [f for f in (condition, yes, no) if isinstance(f, Field)]
    level = min(f.level for f in fields)
    if any(f.tree is not condition.tree for f in fields):
        raise LevelError("fields of different trees cannot be combined")
    a, b = (f.at(level).x if isinstance(f, Field) else f for f in (yes, no))
    if len(fields) == 1:  # two numbers: not to be rounded before they meet a field
        a = torch.full((), float(a), dtype=torch.float64, device=condition.x.device)
    return Field(condition.tree, level, torch.where(condition.at(level).x, a, b))
