"""Selectors: which trajectories of a group take part, by origin, by the outcome of their group or by recorded facts.

A selector is a mask (``keep`` of a recipe, ``rows`` of a penalty). It is evaluated in ``plan`` over whole groups, so the
split into micro-batches does not change it. The same selector defines the peers of a comparison:
``OnSelected(own, Standardise(peers=SelectedPeers(own)))``. Knows no method and no loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from turnwise.algebra.mask import Mask
from turnwise.algebra.peers import Peers
from turnwise.algebra.piece import MicroBatchView, StepView, check
from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.columns import Column
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, Field, Partition, where
from turnwise.core.limits import number
from turnwise.credit.fact import Fact
from turnwise.credit.tracker import Solved
from turnwise.maths.lazy_torch import torch

REQUIRED_DATA = {"policy": "", "expert": "demonstrations", "replay": "replay"}


class Selector(Mask):
    """Interface: True for each trajectory that takes part."""

    def select(self, batch: Batch) -> Field:
        """Evaluate on a batch of whole groups. At TRAJECTORY."""
        raise NotImplementedError

    def plan(self, view: StepView) -> dict[object, Field]:
        return {self: self.select(view.batch)}

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return view[self]


@dataclass(frozen=True)
class SelectedPeers(Peers):
    """The selected trajectories of a group are peers of each other; so are the remaining ones."""

    selector: Selector

    def __call__(self, batch: Batch) -> Partition:
        return Partition.by(batch.tree, TRAJECTORY, batch.group, self.selector.select(batch))


@dataclass(frozen=True)
class OnSelected(Term):
    """``term`` on the selected trajectories, 0 on the others."""

    selector: Selector
    term: Term

    def __call__(self, batch: Batch) -> Field:
        return where(self.selector.select(batch), self.term(batch), 0.0)


# ---------------------------------------------------------------- by trajectory


@dataclass(frozen=True)
class FromOrigin(Selector):
    """By origin: ``FromOrigin("policy")``, sampled for this step; ``FromOrigin("expert")``;
    ``FromOrigin("policy+replay")``."""

    origins: str

    def __post_init__(self) -> None:
        unknown = set(self.origins.split("+")) - set(REQUIRED_DATA)
        check(not unknown, f"unknown origin in {self.origins!r}; write policy, expert or replay, joined by +")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset(REQUIRED_DATA[name] for name in self.origins.split("+")) - {""}

    def select(self, batch: Batch) -> Field:
        expert, replayed = batch.expert, batch.replayed
        by_origin = {"policy": ~(expert | replayed), "expert": expert, "replay": replayed}
        selected = expert & ~expert
        for name in self.origins.split("+"):
            selected = selected | by_origin[name]
        return selected


@dataclass(frozen=True)
class Unguided(Selector):
    """Sampled without a hint and at the policy's own temperature."""

    def select(self, batch: Batch) -> Field:
        return ~batch.guided


@dataclass(frozen=True)
class Succeeded(Selector):
    """Successful by the environment's verdict; without a verdict, those with a positive return."""

    def select(self, batch: Batch) -> Field:
        return Solved()(batch) > 0.5


@dataclass(frozen=True)
class HasTokens(Selector):
    """Trajectories with at least one sampled token."""

    def select(self, batch: Batch) -> Field:
        return batch.tree.size(TOKEN, TRAJECTORY) > 0


@dataclass(frozen=True)
class MaxAge(Selector):
    """Stored at most ``steps`` training steps ago (fact ``age``; a trajectory without an age counts as fresh)."""

    steps: int = 10

    def select(self, batch: Batch) -> Field:
        return Fact("age", missing=0.0)(batch) <= self.steps


@dataclass(frozen=True)
class NonZero(Selector):
    """Trajectories on which ``term`` is not 0."""

    term: Term

    def select(self, batch: Batch) -> Field:
        return self.term(batch).map(lambda x: x != 0)


@dataclass(frozen=True)
class PositiveAdvantage(Selector):
    """Trajectories with a positive advantage on at least one token."""

    def select(self, batch: Batch) -> Field:
        a = batch[Column.ADVANTAGE]
        return (a.max(TRAJECTORY) if a.level < TRAJECTORY else a.at(TRAJECTORY)) > 0


# --------------------------------------------------------------------- by group


@dataclass(frozen=True)
class SolvedGroups(Selector):
    """Groups in which more than a share ``threshold`` of the trajectories selected by ``counted`` succeeded."""

    threshold: float = 0.0
    counted: Selector = field(default_factory=lambda: FromOrigin("policy"))

    def select(self, batch: Batch) -> Field:
        weight = where(self.counted.select(batch), 1.0, 0.0)
        solved_share = (weight * Solved()(batch)).sum(GROUP) / weight.sum(GROUP).clamp(low=1.0)
        return (solved_share > self.threshold).at(TRAJECTORY)


@dataclass(frozen=True)
class FailedGroups(Selector):
    """Groups whose sampled trajectories have similar and low returns: std < ``max_std`` and mean < ``max_mean``."""

    max_std: float = number(0.05, above=0)
    max_mean: float = 0.2

    def select(self, batch: Batch) -> Field:
        weight, r = where(FromOrigin("policy").select(batch), 1.0, 0.0), batch.reward.sum(TRAJECTORY)
        n = weight.sum(GROUP)
        mean = (weight * r).sum(GROUP) / n.clamp(low=1.0)
        std = ((weight * (r - mean) ** 2).sum(GROUP) / (n - 1).clamp(low=1.0)) ** 0.5
        return ((n > 0) & (std < self.max_std) & (mean < self.max_mean)).at(TRAJECTORY)


@dataclass(frozen=True)
class UnrewardedGroups(Selector):
    """Groups whose sampled trajectories all have return 0."""

    def select(self, batch: Batch) -> Field:
        weight = where(FromOrigin("policy").select(batch), 1.0, 0.0)
        total_reward = (weight * batch.reward.sum(TRAJECTORY).abs()).sum(GROUP)
        return ((weight.sum(GROUP) > 0) & (total_reward <= 0)).at(TRAJECTORY)


@dataclass(frozen=True)
class BestOfGroup(Selector):
    """One trajectory per group: the largest ``by`` among ``selector``; the trajectory seed breaks ties, or decides
    without ``by``."""

    selector: Selector
    by: Term | None = None

    def select(self, batch: Batch) -> Field:
        eligible = self.selector.select(batch)
        order = torch.argsort(batch.seed.x, stable=True)
        if self.by is not None:
            order = order[torch.argsort(self.by(batch).at(TRAJECTORY).x[order], descending=True, stable=True)]
        order = order[eligible.x[order]]
        group = batch.tree.parents[2][order]
        by_group = torch.argsort(group, stable=True)
        first = torch.ones_like(group, dtype=torch.bool)
        first[1:] = group[by_group][1:] != group[by_group][:-1]
        selected = torch.zeros_like(eligible.x)
        selected[order[by_group[first]]] = True
        return Field(batch.tree, TRAJECTORY, selected)


@dataclass(frozen=True)
class LatestOfGroup(Selector):
    """One trajectory per group: the one stored last (fact ``age``); trajectories without an age come last."""

    selector: Selector

    def select(self, batch: Batch) -> Field:
        return BestOfGroup(self.selector, -1.0 * Fact("age", missing=torch.inf)).select(batch)


@dataclass(frozen=True)
class PatchFailedGroups(Selector):
    """The sampled trajectories; in a ``failed`` group with a trajectory in ``pool``, one of ``pool`` replaces a sampled
    one.

    Seeds decide which one is taken and which one it replaces."""

    failed: Selector
    pool: Selector

    def select(self, batch: Batch) -> Field:
        sampled, substitute = FromOrigin("policy").select(batch), BestOfGroup(self.pool).select(batch)
        patched = self.failed.select(batch) & (where(substitute, 1.0, 0.0).sum(GROUP) > 0)
        return (sampled & ~(patched & BestOfGroup(FromOrigin("policy")).select(batch))) | (substitute & patched)


# ------------------------------------------------------------------ combinations


@dataclass(frozen=True)
class AllOf(Selector):
    """Trajectories that every selector selects."""

    selectors: tuple[Selector, ...]

    def select(self, batch: Batch) -> Field:
        selected = self.selectors[0].select(batch)
        for selector in self.selectors[1:]:
            selected = selected & selector.select(batch)
        return selected


@dataclass(frozen=True)
class AnyOf(Selector):
    """Trajectories that at least one selector selects."""

    selectors: tuple[Selector, ...]

    def select(self, batch: Batch) -> Field:
        selected = self.selectors[0].select(batch)
        for selector in self.selectors[1:]:
            selected = selected | selector.select(batch)
        return selected


@dataclass(frozen=True)
class Not(Selector):
    """Trajectories that the selector does not select."""

    selector: Selector

    def select(self, batch: Batch) -> Field:
        return ~self.selector.select(batch)


__all__ = [
    "AllOf", "AnyOf", "BestOfGroup", "FailedGroups", "FromOrigin", "HasTokens", "LatestOfGroup", "MaxAge", "NonZero",
    "Not", "OnSelected", "PatchFailedGroups", "PositiveAdvantage", "SelectedPeers", "Selector", "SolvedGroups",
    "Succeeded", "Unguided", "UnrewardedGroups",
]  # fmt: skip
