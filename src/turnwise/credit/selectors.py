"""Selectors: which trajectories of a group take part, by origin, by the outcome of their group or by recorded facts.

A selector is a mask (``keep`` of a recipe, ``rows`` of a penalty). It is evaluated in ``plan`` over whole groups, so the
split into micro-batches does not change it. The same selector defines the peers of a comparison:
``OnSelected(rollouts, Standardise(peers=SelectedPeers(rollouts)))``. Knows no method and no loss.
"""

from __future__ import annotations

import operator
from dataclasses import field
from functools import reduce

from turnwise.algebra.gate import Gate
from turnwise.algebra.mask import Mask
from turnwise.algebra.peers import Peers
from turnwise.algebra.piece import MicroBatchView, StepView, check
from turnwise.algebra.ratio import Importance, Ratio
from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.levels import TOKEN, TRAJECTORY, Field, Partition, where
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


class Finished(Selector):
    """Trajectories that no limit cut: a cut one is not wrong, only unfinished. Its reward stays in the baseline of its group."""

    reason = "unfinished"
    requires = frozenset({"how episodes ended"})

    def select(self, batch: Batch) -> Field:
        return ~batch.truncated


class SelectedPeers(Peers):
    """The selected trajectories of a group are peers of each other; so are the remaining ones."""

    selector: Selector

    def __call__(self, batch: Batch) -> Partition:
        return Partition.by(batch.tree, TRAJECTORY, batch.group, self.selector.select(batch))


class OnSelected(Term):
    """``term`` on the selected trajectories, 0 on the others."""

    selector: Selector
    term: Term

    def __call__(self, batch: Batch) -> Field:
        return where(self.selector.select(batch), self.term(batch), 0.0)


# ---------------------------------------------------------------- by trajectory


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
        return reduce(operator.or_, (by_origin[name] for name in self.origins.split("+")))


class Succeeded(Selector):
    """Successful by the environment's verdict; without a verdict, those with a positive return."""

    def select(self, batch: Batch) -> Field:
        return Solved()(batch) > 0.5


class HasTokens(Selector):
    """Trajectories with at least one sampled token."""

    def select(self, batch: Batch) -> Field:
        return batch.tree.size(TOKEN, TRAJECTORY) > 0


class Unguided(Selector):
    """Sampled without a hint and at the policy's own temperature."""

    def select(self, batch: Batch) -> Field:
        return ~batch.guided


# --------------------------------------------------------------------- by group


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


# ------------------------------------------------------------------ combinations


class AllOf(Selector):
    """Trajectories that every selector selects."""

    selectors: tuple[Selector, ...]

    def select(self, batch: Batch) -> Field:
        return reduce(operator.and_, (selector.select(batch) for selector in self.selectors))


class Not(Selector):
    """Trajectories that the selector does not select."""

    selector: Selector

    def select(self, batch: Batch) -> Field:
        return ~self.selector.select(batch)


class GateBySelector(Gate):
    """One gate on the selected trajectories, another on the others."""

    selector: Selector
    selected: Gate
    others: Gate

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return where(self.selector.select(view.batch), self.selected(rho, adv, view), self.others(rho, adv, view))


class RatioByOrigin(Ratio):
    """One ratio on the trajectories of ``origin``, another on the others."""

    origin: FromOrigin
    selected: Ratio
    others: Ratio = field(default_factory=Importance)

    def __call__(self, view: MicroBatchView) -> Field:
        return where(self.origin.select(view.batch), self.selected(view), self.others(view))
