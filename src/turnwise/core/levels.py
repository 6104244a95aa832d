"""Levels, trees and fields: every value carries its level.

    TOKEN ⊂ TURN ⊂ TRAJECTORY ⊂ GROUP ⊂ BATCH

Only sampled tokens are TOKENs, so no mask is needed. Arithmetic broadcasts the coarser operand down to the finer level;
reductions are always explicit: ``logp.mean(TURN)``, ``reward.std(GROUP)``, ``value.mean(same_state)``.

This module knows nothing of rewards, policies or text.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from operator import methodcaller
from typing import TYPE_CHECKING, Any, TypeAlias

from turnwise.errors import LevelError
from turnwise.maths import segments
from turnwise.maths.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


class Level(IntEnum):
    """The levels of the tree, from fine to coarse; a larger one contains the smaller ones."""

    TOKEN = 0
    TURN = 1
    TRAJECTORY = 2
    GROUP = 3
    BATCH = 4

    def __repr__(self) -> str:
        return self.name


TOKEN, TURN, TRAJECTORY, GROUP, BATCH = Level


class Tree:
    """Parent pointers TOKEN → TURN → TRAJECTORY → GROUP of one batch.

    Tokens of a turn are in the order they were sampled, turns of a trajectory in the order they were taken.
    Trajectories may come in any order. A turn may be empty; a group holds at least one trajectory."""

    def __init__(
        self,
        turn_of_token: Tensor,
        trajectory_of_turn: Tensor,
        group_of_trajectory: Tensor,
        groups: int,
        check: bool = True,
    ) -> None:
        # ``check``: verify that every parent index is in range; trees cut from a checked one need not
        self.parents = (turn_of_token, trajectory_of_turn, group_of_trajectory)
        self.sizes = (turn_of_token.numel(), trajectory_of_turn.numel(), group_of_trajectory.numel(), groups, 1)
        for level, parent in enumerate(self.parents):
            if parent.dtype != torch.int64 or parent.dim() != 1:
                seen = f"{parent.dtype} {parent.shape}"
                raise LevelError(f"parents of {Level(level)!r} must be a flat int64 tensor, got {seen}")
            if check and parent.numel() and not (int(parent.min()) >= 0 and int(parent.max()) < self.sizes[level + 1]):
                raise LevelError(f"parents of {Level(level)!r} point outside the {self.sizes[level + 1]} items above")
        self._labels: dict[tuple[Level, Level], Tensor] = {}
        self._in_order: bool | None = None  # tokens sorted by turn and turns by trajectory; None: not checked yet

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

    def full(self, level: Level, value: float, dtype: torch.dtype | None = None) -> Field:
        dtype = torch.float32 if dtype is None else dtype
        return Field(self, level, torch.full((self.count(level),), value, dtype=dtype, device=self.device))

    def size(self, of: Level, inside: Level) -> Field:
        """How many items of level ``of`` are inside each item of level ``inside``."""
        return Field(self, inside, segments.size(self.ancestor(of, inside), self.count(inside)))

    def index(self, of: Level, inside: Level) -> Field:
        """0-based position of each item among its siblings inside ``inside``; e.g. the index of a turn in its trajectory."""
        return Field(self, of, segments.rank_within(self.ancestor(of, inside), self.count(inside)))

    def as_slice(self, trajectories: Sequence[int]) -> slice | None:
        """These trajectories as a slice, if they are consecutive and the tree is sorted and on the host. Then the items of every
        level are consecutive too, and slices replace index tensors."""
        first, last = (trajectories[0], trajectories[-1]) if len(trajectories) else (0, -1)
        consecutive = self.in_order and list(trajectories) == list(range(first, last + 1))
        return slice(first, last + 1) if consecutive else None

    @property
    def in_order(self) -> bool:
        """Whether tokens are sorted by turn and turns by trajectory; False on a GPU, where the check would synchronise."""
        if self._in_order is None:
            self._in_order = self.device.type == "cpu" and all(bool((p[1:] >= p[:-1]).all()) for p in self.parents[:2])
        return self._in_order

    def select_slice(self, trajectories: slice) -> tuple[Tree, tuple[Any, ...]]:
        """``select`` of consecutive trajectories: slices instead of indices."""
        turns = _children(self.parents[1], trajectories)
        tokens = _children(self.parents[0], turns)
        groups, group_of = torch.unique(self.parents[2][trajectories], return_inverse=True)
        parents = (self.parents[0][tokens] - turns.start, self.parents[1][turns] - trajectories.start, group_of)
        tree = Tree(*parents, groups.numel(), check=False)
        return tree, (tokens, turns, trajectories, groups, slice(0, 1))

    def select(self, trajectories: Tensor) -> tuple[Tree, tuple[Any, ...]]:
        """The tree of some whole trajectories, in that order, and the kept items of each level."""
        position = torch.full((self.count(TRAJECTORY),), -1, dtype=torch.int64, device=self.device)
        position[trajectories] = torch.arange(trajectories.numel(), device=self.device)
        rows: list[Tensor] = []
        ascending = self.in_order and bool((trajectories[1:] > trajectories[:-1]).all())
        for level in (TOKEN, TURN):
            new = position[self.ancestor(level, TRAJECTORY)]
            items = (new >= 0).nonzero().squeeze(1)
            rows.append(items if ascending else items[torch.argsort(new[items], stable=True)])
        groups, group_of = torch.unique(self.parents[2][trajectories], return_inverse=True)
        rows += [trajectories, groups, torch.zeros(1, dtype=torch.int64, device=self.device)]
        new_turn = torch.full((self.count(TURN),), -1, dtype=torch.int64, device=self.device)
        new_turn[rows[1]] = torch.arange(rows[1].numel(), device=self.device)
        tree = Tree(new_turn[self.parents[0][rows[0]]], position[self.parents[1][rows[1]]], group_of, groups.numel())
        return tree, tuple(rows)

    def __repr__(self) -> str:
        return "Tree({} tokens, {} turns, {} trajectories, {} groups)".format(*self.sizes)


def _children(parent: Tensor, parents: slice) -> slice:
    """The items whose parent, sorted in ascending order, is in the slice."""
    return slice(*torch.searchsorted(parent, torch.tensor([parents.start, parents.stop])).tolist())


@dataclass(frozen=True, eq=False)
class Partition:
    """Peers that are not those of a level: a class label for each item of one level. Classes are numbered from 0.

    ``Partition.by(tree, TURN, group_index, turn_index)`` makes the k-th turns of a group peers."""

    tree: Tree
    level: Level
    label: Tensor
    count: int

    @classmethod
    def by(cls, tree: Tree, level: Level, *keys: Field | Tensor) -> Partition:
        """Items with equal keys are peers. Fields of a coarser level are broadcast down first."""
        columns = [(k.at(level).x if isinstance(k, Field) else k).long() for k in keys]
        if not columns or any(c.numel() != tree.count(level) for c in columns):
            raise LevelError(f"a partition of {level!r} needs at least one key with {tree.count(level)} values")
        label = torch.zeros_like(columns[0])
        for column in columns:  # one key at a time: torch.unique of rows is ten times slower
            _, key = torch.unique(column, return_inverse=True)
            _, label = torch.unique(label * (column.numel() + 1) + key, return_inverse=True)
        return cls(tree, level, label, int(label.max()) + 1 if label.numel() else 0)


Grouping: TypeAlias = "Level | Partition"
"""What a field is reduced over."""


def _binary(f: Callable[[Any, Any], Tensor]) -> Callable[[Field, Field | float], Field]:
    """A method that combines two fields at the finer of their levels, or a field and a number."""

    def combine(self: Field, other: Field | float) -> Field:
        if not isinstance(other, Field):
            return Field(self.tree, self.level, f(self.x, other))
        if other.tree is not self.tree:
            raise LevelError("two fields of different trees cannot be combined")
        level = min(self.level, other.level)
        return Field(self.tree, level, f(self.at(level).x, other.at(level).x))

    return combine


def _unary(f: Callable[[Any], Tensor]) -> Callable[[Field], Field]:
    return lambda field: field.map(f)


@dataclass(frozen=True, eq=False)
class Field:
    """One number for each item of a level, packed. ``x`` has shape [tree.count(level)]."""

    tree: Tree
    level: Level
    x: Tensor

    def __post_init__(self) -> None:
        if self.x.shape != (self.tree.count(self.level),):
            count, shape = self.tree.count(self.level), tuple(self.x.shape)
            raise LevelError(f"a field at {self.level!r} of {self.tree} needs shape ({count},), got {shape}")

    # ------------------------------------------- broadcasting and reducing
    def at(self, level: Level) -> Field:
        """Broadcast down to a finer level."""
        if level == self.level:
            return self
        if level > self.level:
            raise LevelError(
                f"a field at {self.level!r} cannot be broadcast to {level!r}; reduce it: .mean({level!r}), .sum ..."
            )
        return Field(self.tree, level, self.x[self.tree.ancestor(level, self.level)])

    def _reduce(self, over: Grouping, reduce: Callable[..., Tensor], **options: Any) -> Field:
        """Level: one value for each item above. Partition: each item receives the value of its class."""
        if isinstance(over, Partition):
            if over.tree is not self.tree:
                raise LevelError("a field and a partition of two different trees")
            values = self.at(over.level)
            return Field(self.tree, over.level, reduce(values.x, over.label, over.count, **options)[over.label])
        label = self.tree.ancestor(self.level, over)
        return Field(self.tree, over, reduce(self.x, label, self.tree.count(over), **options))

    def sum(self, over: Grouping) -> Field:
        return self if over == self.level else self._reduce(over, segments.total)

    def mean(self, over: Grouping) -> Field:
        return self._reduce(over, segments.mean)

    def min(self, over: Grouping) -> Field:
        return self._reduce(over, segments.extreme, largest=False)

    def max(self, over: Grouping) -> Field:
        return self._reduce(over, segments.extreme, largest=True)

    def std(self, over: Grouping, correction: int = 1) -> Field:
        return self._reduce(over, segments.std, correction=correction)

    def median(self, over: Grouping) -> Field:
        return self._reduce(over, segments.median)

    def peer_count(self, over: Grouping) -> Field:
        """How many items are reduced together, as a float field."""
        return self._reduce(over, lambda x, label, n: segments.size(label, n).to(x.dtype))

    def leave_one_out(self, over: Grouping) -> Field:
        """The mean of the other peers, at this field's own level."""
        label, n = self._labels(over)
        return Field(self.tree, self.level, segments.leave_one_out(self.x, label, n))

    def running_sum(self, inside: Grouping, reverse: bool = False) -> Field:
        """Inclusive cumulative sum among siblings, forwards or backwards."""
        label, n = self._labels(inside)
        return Field(self.tree, self.level, segments.running_sum(self.x, label, n, reverse=reverse))

    def _labels(self, over: Grouping) -> tuple[Tensor, int]:
        if isinstance(over, Partition):
            if over.tree is not self.tree or over.level != self.level:
                raise LevelError(f"this needs a partition of {self.level!r} of the same tree")
            return over.label, over.count
        return self.tree.ancestor(self.level, over), self.tree.count(over)

    # -------------------------------------------------------- arithmetic
    def map(self, f: Callable[[Tensor], Tensor]) -> Field:
        return Field(self.tree, self.level, f(self.x))

    def __rsub__(self, o: float) -> Field:
        return self.map(lambda x: o - x)

    def __rtruediv__(self, o: float) -> Field:
        return self.map(lambda x: o / x)

    def clamp(self, low: float | None = None, high: float | None = None) -> Field:
        return self.map(methodcaller("clamp", low, high))

    def to(self, dtype: torch.dtype) -> Field:
        return self.map(methodcaller("to", dtype))

    __add__ = __radd__ = _binary(operator.add)
    __mul__ = __rmul__ = _binary(operator.mul)
    __sub__, __truediv__, __pow__ = _binary(operator.sub), _binary(operator.truediv), _binary(operator.pow)
    __gt__, __lt__ = _binary(operator.gt), _binary(operator.lt)
    __ge__, __le__ = _binary(operator.ge), _binary(operator.le)
    __and__, __or__ = _binary(operator.and_), _binary(operator.or_)
    minimum, maximum = _binary(lambda a, b: torch.minimum(a, b)), _binary(lambda a, b: torch.maximum(a, b))
    __neg__, __invert__ = _unary(operator.neg), _unary(operator.invert)
    exp, log = _unary(methodcaller("exp")), _unary(methodcaller("log"))
    abs, detach = _unary(methodcaller("abs")), _unary(methodcaller("detach"))

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
    if len(fields) == 1:  # two numbers: keep float64, so that they are not rounded before they meet a field
        a = torch.full((), float(a), dtype=torch.float64, device=condition.x.device)
    return Field(condition.tree, level, torch.where(condition.at(level).x, a, b))
