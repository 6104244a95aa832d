"""Strata: the group is divided before it is compared, by structure, by a metric, by who acted; or weighed as a whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from turnwise.algebra.peers import Kin
from turnwise.algebra.piece import check
from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, GROUP, TOKEN, TRAJECTORY, TURN, Field, Partition, where
from turnwise.core.signals import Signal
from turnwise.credit.multi_reward import component
from turnwise.credit.order import place
from turnwise.maths import segments


@dataclass(frozen=True)
class Alike(Kin):
    """Trajectories of one group with as many tool calls, or as many turns."""

    what: str = "tool_calls"

    def __post_init__(self) -> None:
        check(self.what in ("tool_calls", "turns"), f"nothing counts {self.what!r}; write tool_calls or turns")

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"tools"} if self.what == "tool_calls" else ())

    def __call__(self, batch: Batch) -> Partition:
        counts = batch.tree.size(TURN, TRAJECTORY) if self.what == "turns" else batch.tool_calls.sum(TRAJECTORY)
        return Partition.by(batch.tree, TRAJECTORY, batch.group, counts)


@dataclass(frozen=True)
class Told(Kin):
    """Trajectories of one group of which the same is told: a fact of the trajectory, or the last its turns tell. Those of
    which nothing is told are alike.

    Where the whole batch is told nothing, they are alike in their ``otherwise``: "outcome", or "words" (all they said)."""

    name: str
    otherwise: str = "outcome"

    def __post_init__(self) -> None:
        check(self.otherwise in ("outcome", "words"), f"no key {self.otherwise!r}; write outcome or words")

    def __call__(self, batch: Batch) -> Partition:
        found = batch.facts.get(self.name)
        if found is not None:
            key = _codes((found if found.level == TRAJECTORY else last_told(found)).x)
        elif self.otherwise == "outcome":
            key = _codes(component(batch, None).x.round(decimals=6))
        else:
            key = words(batch).x
        return Partition.by(batch.tree, TRAJECTORY, batch.group, key)


def last_told(fact: Field) -> Field:
    """What the last turn of a trajectory that tells a fact says of it; NaN where no turn does."""
    index = fact.tree.index(TURN, TRAJECTORY)
    told = ~fact.map(torch.isnan)
    last = where(told, index, -1).max(TRAJECTORY)
    here = told & (index >= last)
    return where(last >= 0, where(here, fact, 0.0).sum(TRAJECTORY), torch.nan)


def words(batch: Batch) -> Field:
    """A number for all that was said in a trajectory, turn by turn: Σ (actionₖ + 1) Mᵏ modulo 2⁶⁴."""
    index = batch.tree.index(TURN, TRAJECTORY).x
    turns = int(index.max()) + 1 if index.numel() else 0
    power = torch.full((turns,), 6364136223846793005, dtype=torch.int64, device=index.device).cumprod(0)
    return Field(batch.tree, TURN, (batch.action.x + 1) * power[index]).sum(TRAJECTORY)


def _codes(x: Tensor) -> Tensor:
    """Equal numbers get equal codes; NaN is one number among others."""
    return torch.unique(torch.nan_to_num(x, nan=torch.inf), return_inverse=True)[1]


@dataclass(frozen=True)
class Blend(Term):
    """share · left + (1 − share) · right."""

    share: float
    left: Term
    right: Term

    def __post_init__(self) -> None:
        check(0 <= self.share <= 1, f"the share is {self.share}; write a number in [0, 1]")

    def __call__(self, batch: Batch) -> Field:
        return self.share * self.left(batch) + (1 - self.share) * self.right(batch)


@dataclass(frozen=True)
class AcrossHalves(Term):
    """A = μ (R − mean of the other half) + (1 − μ)(R − mean of the own half): halves of a group by mean token "entropy" or by
    "length", the low one with ⌊n/2⌋ members.

    ``mu=None`` is the mean outcome of the batch. ``alpha`` weighs, in the first bracket only, what the high half earned
    against the low one ("length": below 1, long answers lose) or the low against the high ("entropy"). A lone member gets 0."""

    mu: float | None = 1.0
    alpha: float = 1.0
    metric: str = "entropy"

    def __post_init__(self) -> None:
        check(
            self.mu is None or 0 <= self.mu <= 1,
            f"mu is {self.mu}; write a number in [0, 1], or None for the mean reward",
        )
        check(self.alpha >= 0, f"alpha is {self.alpha}; write a number >= 0")
        check(self.metric in ("entropy", "length"), f"no metric {self.metric!r}; write entropy or length")

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.OLD_ENTROPY}) if self.metric == "entropy" else frozenset()

    @property
    def judges(self) -> bool:
        return True

    def __call__(self, batch: Batch) -> Field:
        r, tree = component(batch, None), batch.tree
        by_length = self.metric == "length"
        metric = tree.size(TOKEN, TRAJECTORY) if by_length else batch[Signal.OLD_ENTROPY].mean(TRAJECTORY)
        high = place(batch, metric) >= tree.size(TRAJECTORY, GROUP).map(lambda n: n // 2)
        own = Partition.by(tree, TRAJECTORY, batch.group, high.to(torch.int64))
        n = r.peers(GROUP)
        rest = (r.sum(GROUP) - r.sum(own)) / (n - r.peers(own)).clamp(low=1.0)
        mine, theirs = (high, ~high) if by_length else (~high, high)  # whose reward alpha weighs
        across = where(mine, self.alpha * r, r) - where(theirs, self.alpha * rest, rest)
        mu = r.mean(BATCH) if self.mu is None else self.mu
        return where(n > 1, mu * across + (1 - mu) * (r - r.mean(own)), 0.0)


@dataclass(frozen=True)
class DampedGroups(Term):
    """A in groups whose longest right answer is longer than their wrong ones on average, ``damp`` · A in the others.

    Right: the outcome exceeds ``threshold``. Wrong answers that a limit cut off do not count. No right answer damps, no
    wrong one does not; with ``lenient`` it is the other way round."""

    term: Term
    damp: float = 0.1
    threshold: float = 0.5
    lenient: bool = False

    def __post_init__(self) -> None:
        check(self.damp >= 0, f"damp is {self.damp}; write a number >= 0")

    def __call__(self, batch: Batch) -> Field:
        length = batch.tree.size(TOKEN, TRAJECTORY).to(torch.float64)
        right = component(batch, None) > self.threshold
        longest = where(right, length, -torch.inf).max(GROUP)
        wrong = where(~right & ~batch.truncated, 1.0, 0.0)
        count = wrong.sum(GROUP)
        typical = where(
            count > 0, (wrong * length).sum(GROUP) / count.clamp(low=1.0), torch.inf if self.lenient else -torch.inf
        )
        full = longest > typical
        if self.lenient:
            full = full | ~(longest > -torch.inf)
        return where(full, 1.0, self.damp) * self.term(batch)


@dataclass(frozen=True)
class SharedBaseline(Term):
    """A = Rᵢⱼ − mean over all agents of one function in all rollouts of the group, Rᵢⱼ what agent j earned in rollout i:
    one vote for each agent that acted there, however many turns it took. At TURN.

    The turn fact ``function`` tells it; told nothing, each agent is a function of its own. ``scale`` divides by the std. A
    lone return gets 0."""

    scale: bool = False
    eps: float = 1e-6

    @property
    def judges(self) -> bool:
        return True

    def __call__(self, batch: Batch) -> Field:
        tree, told = batch.tree, batch.facts.get("function")
        function = batch.agent.x if told is None else _codes(told.at(TURN).x)
        owner = tree.ancestor(TURN, TRAJECTORY)
        agents = Partition.by(tree, TURN, owner, batch.agent.x, function)  # one class for each (rollout, agent)
        peers = Partition.by(tree, TURN, tree.ancestor(TURN, GROUP), function)
        earned = segments.total(batch.reward.sum(TURN).x.double(), agents.label, agents.count)
        kind = torch.zeros_like(earned, dtype=torch.int64).index_copy(0, agents.label, peers.label)
        a = earned - segments.mean(earned, kind, peers.count)[kind]
        if self.scale:
            a = a / (segments.std(earned, kind, peers.count)[kind] + self.eps)
        return Field(tree, TURN, a[agents.label])


__all__ = ["AcrossHalves", "Alike", "Blend", "DampedGroups", "SharedBaseline", "Told", "last_told", "words"]
