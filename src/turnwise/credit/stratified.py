"""Strata: groups divided before comparison, by structure, by a recorded fact, by a metric or by agent function. Knows
no method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from turnwise.algebra.peers import Peers
from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, GROUP, TOKEN, TRAJECTORY, TURN, Field, Partition, where
from turnwise.core.limits import choice, number
from turnwise.core.signals import Signal
from turnwise.credit.multi_reward import named_reward
from turnwise.credit.order import rank_in_group
from turnwise.maths import segments
from turnwise.maths.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SameCount(Peers):
    """Trajectories of one group with the same number of tool calls, or of turns."""

    what: str = choice("tool_calls", "turns")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"tools"} if self.what == "tool_calls" else ())

    def __call__(self, batch: Batch) -> Partition:
        counts = batch.tree.size(TURN, TRAJECTORY) if self.what == "turns" else batch.tool_calls.sum(TRAJECTORY)
        return Partition.by(batch.tree, TRAJECTORY, batch.group, counts)


@dataclass(frozen=True)
class SameFact(Peers):
    """Trajectories of one group with the same value of a fact: of the trajectory, or the last one recorded by its turns.
    Trajectories without the fact share one class.

    Where no trajectory of the batch has it, ``otherwise`` decides: "outcome" (equal returns) or "words" (equal
    actions)."""

    name: str
    otherwise: str = choice("outcome", "words")

    def __call__(self, batch: Batch) -> Partition:
        recorded = batch.facts.get(self.name)
        if recorded is not None:
            key = _codes((recorded if recorded.level == TRAJECTORY else last_turn_fact(recorded)).x)
        elif self.otherwise == "outcome":
            key = _codes(named_reward(batch, None).x.round(decimals=6))
        else:
            key = action_hash(batch).x
        return Partition.by(batch.tree, TRAJECTORY, batch.group, key)


def last_turn_fact(fact: Field) -> Field:
    """The value of the last turn of each trajectory that records a fact; NaN where no turn does."""
    index = fact.tree.index(TURN, TRAJECTORY)
    recorded = ~fact.map(torch.isnan)
    last = where(recorded, index, -1).max(TRAJECTORY)
    is_last = recorded & (index >= last)
    return where(last >= 0, where(is_last, fact, 0.0).sum(TRAJECTORY), torch.nan)


def action_hash(batch: Batch) -> Field:
    """A hash of all actions of a trajectory in order: Σ (actionₖ + 1) Mᵏ modulo 2⁶⁴."""
    index = batch.tree.index(TURN, TRAJECTORY).x
    turns = int(index.max()) + 1 if index.numel() else 0
    power = torch.full((turns,), 6364136223846793005, dtype=torch.int64, device=index.device).cumprod(0)
    return Field(batch.tree, TURN, (batch.action.x + 1) * power[index]).sum(TRAJECTORY)


def _codes(x: Tensor) -> Tensor:
    """Equal numbers get equal codes; all NaN share one code."""
    return torch.unique(torch.nan_to_num(x, nan=torch.inf), return_inverse=True)[1]


@dataclass(frozen=True)
class Blend(Term):
    """share · left + (1 − share) · right."""

    left: Term
    right: Term
    share: float = number(least=0, most=1)

    def __call__(self, batch: Batch) -> Field:
        return self.share * self.left(batch) + (1 - self.share) * self.right(batch)


@dataclass(frozen=True)
class ConditionalAdvantage(Term):
    """A = μ (R − mean of the other half) + (1 − μ)(R − mean of the own half): halves of a group by mean token "entropy"
    or by "length", the lower half with ⌊n/2⌋ members.

    ``mu=None`` is the mean return of the batch. ``alpha`` scales, in the first bracket only, the returns of the high half
    ("length": below 1, long answers lose) or of the low half ("entropy"). A group of one gets 0."""

    compares_peers = True

    mu: float | None = number(1.0, least=0, most=1)
    alpha: float = number(1.0, least=0)
    metric: str = choice("entropy", "length")

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.OLD_ENTROPY}) if self.metric == "entropy" else frozenset()

    def __call__(self, batch: Batch) -> Field:
        r, tree = named_reward(batch, None), batch.tree
        by_length = self.metric == "length"
        metric = tree.size(TOKEN, TRAJECTORY) if by_length else batch[Signal.OLD_ENTROPY].mean(TRAJECTORY)
        high = rank_in_group(batch, metric) >= tree.size(TRAJECTORY, GROUP).map(lambda n: n // 2)
        same_half = Partition.by(tree, TRAJECTORY, batch.group, high.to(torch.int64))
        n = r.peer_count(GROUP)
        other_mean = (r.sum(GROUP) - r.sum(same_half)) / (n - r.peer_count(same_half)).clamp(low=1.0)
        weighted_side, other_side = (high, ~high) if by_length else (~high, high)  # the side whose reward alpha scales
        across = where(weighted_side, self.alpha * r, r) - where(other_side, self.alpha * other_mean, other_mean)
        mu = r.mean(BATCH) if self.mu is None else self.mu
        return where(n > 1, mu * across + (1 - mu) * (r - r.mean(same_half)), 0.0)


@dataclass(frozen=True)
class LengthDampedGroups(Term):
    """A in groups whose longest right answer is longer than their mean wrong answer, ``damp`` · A in the others.

    Right: the return exceeds ``threshold``. Truncated wrong answers do not count. A group without right answers is
    damped, one without wrong answers is not; ``lenient`` swaps both."""

    term: Term
    damp: float = number(0.1, least=0)
    threshold: float = 0.5
    lenient: bool = False

    def __call__(self, batch: Batch) -> Field:
        length = batch.tree.size(TOKEN, TRAJECTORY).to(torch.float64)
        right = named_reward(batch, None) > self.threshold
        longest = where(right, length, -torch.inf).max(GROUP)
        wrong = where(~right & ~batch.truncated, 1.0, 0.0)
        count = wrong.sum(GROUP)
        mean_wrong = where(
            count > 0, (wrong * length).sum(GROUP) / count.clamp(low=1.0), torch.inf if self.lenient else -torch.inf
        )
        full = longest > mean_wrong
        if self.lenient:
            full = full | ~(longest > -torch.inf)
        return where(full, 1.0, self.damp) * self.term(batch)


@dataclass(frozen=True)
class PublicBaseline(Term):
    """A = Rᵢⱼ − mean over all agents of one function in all rollouts of the group, Rᵢⱼ the return of agent j in rollout
    i: each acting agent counts once, however many turns it took. At TURN.

    The turn fact ``function`` names the function; without it each agent is its own function. ``scale`` divides by the
    std. A single return gets 0."""

    compares_peers = True

    scale: bool = False
    eps: float = 1e-6

    def __call__(self, batch: Batch) -> Field:
        tree, recorded = batch.tree, batch.facts.get("function")
        function = batch.agent.x if recorded is None else _codes(recorded.at(TURN).x)
        owner = tree.ancestor(TURN, TRAJECTORY)
        agents = Partition.by(tree, TURN, owner, batch.agent.x, function)  # one class per (rollout, agent)
        peers = Partition.by(tree, TURN, tree.ancestor(TURN, GROUP), function)
        agent_return = segments.total(batch.reward.sum(TURN).x.double(), agents.label, agents.count)
        function_class = torch.zeros_like(agent_return, dtype=torch.int64).index_copy(0, agents.label, peers.label)
        a = agent_return - segments.mean(agent_return, function_class, peers.count)[function_class]
        if self.scale:
            a = a / (segments.std(agent_return, function_class, peers.count)[function_class] + self.eps)
        return Field(tree, TURN, a[agents.label])


__all__ = [
    "Blend", "ConditionalAdvantage", "LengthDampedGroups", "PublicBaseline", "SameCount", "SameFact", "action_hash",
    "last_turn_fact",
]  # fmt: skip
