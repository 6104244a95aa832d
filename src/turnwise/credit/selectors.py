"""Rows: which trajectories of a group take part, by whose they are, how the group fared and what is told of them.

A rule of this kind is a mask (``keep``, ``rows`` of a penalty): it is planned while whole groups are in sight, so no cut
changes it. The same rule says among whom credit is compared: ``Only(own, Standardise(peers=Among(own)))``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from turnwise.algebra.mask import Mask
from turnwise.algebra.peers import Kin
from turnwise.algebra.piece import Now, Whole, check
from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, Field, Partition, where
from turnwise.credit.fact import Fact
from turnwise.credit.tracker import Solved

ASKED = {"policy": "", "expert": "demonstrations", "replay": "replay"}


class Rows(Mask):
    """Interface: True for each trajectory that takes part."""

    def of(self, batch: Batch) -> Field:
        """Of a batch of whole groups. At TRAJECTORY."""
        raise NotImplementedError

    def plan(self, whole: Whole) -> dict[object, Field]:
        return {self: self.of(whole.batch)}

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        return now[self]


@dataclass(frozen=True)
class Among(Kin):
    """The trajectories of a group that take part are peers, those that do not are others."""

    rows: Rows

    def __call__(self, batch: Batch) -> Partition:
        return Partition.by(batch.tree, TRAJECTORY, batch.group, self.rows.of(batch))


@dataclass(frozen=True)
class Only(Term):
    """A term on some rows, 0 on the others."""

    rows: Rows
    term: Term

    def __call__(self, batch: Batch) -> Field:
        return where(self.rows.of(batch), self.term(batch), 0.0)


# ------------------------------------------------------------------- row by row


@dataclass(frozen=True)
class From(Rows):
    """Whose tokens they are: ``From("policy")``, sampled for this step; ``From("expert")``; ``From("policy+replay")``."""

    whose: str

    def __post_init__(self) -> None:
        wrong = set(self.whose.split("+")) - set(ASKED)
        check(not wrong, f"rows from {self.whose!r}; write policy, expert or replay, joined by +")

    @property
    def wants(self) -> frozenset[str]:
        return frozenset(ASKED[name] for name in self.whose.split("+")) - {""}

    def of(self, batch: Batch) -> Field:
        shown, stored = batch.expert, batch.replayed
        kinds = {"policy": ~(shown | stored), "expert": shown, "replay": stored}
        found = shown & ~shown
        for name in self.whose.split("+"):
            found = found | kinds[name]
        return found


@dataclass(frozen=True)
class Unaided(Rows):
    """Sampled as the policy would: no hint, no other temperature."""

    def of(self, batch: Batch) -> Field:
        return ~batch.guided


@dataclass(frozen=True)
class Succeeded(Rows):
    """Those the environment calls a success; without a verdict, those that earned something."""

    def of(self, batch: Batch) -> Field:
        return Solved()(batch) > 0.5


@dataclass(frozen=True)
class Spoken(Rows):
    """Those with at least one sampled token."""

    def of(self, batch: Batch) -> Field:
        return batch.tree.size(TOKEN, TRAJECTORY) > 0


@dataclass(frozen=True)
class NotOlder(Rows):
    """Stored at most ``oldest`` steps ago (fact ``age``; who has none is of today)."""

    oldest: int = 10

    def of(self, batch: Batch) -> Field:
        return Fact("age", missing=0.0)(batch) <= self.oldest


@dataclass(frozen=True)
class NonZero(Rows):
    """Those on which a term is not 0."""

    term: Term

    def of(self, batch: Batch) -> Field:
        return self.term(batch).map(lambda x: x != 0)


@dataclass(frozen=True)
class Gained(Rows):
    """Those with a positive advantage."""

    def of(self, batch: Batch) -> Field:
        a = batch["advantage"]
        return (a.max(TRAJECTORY) if a.level < TRAJECTORY else a.at(TRAJECTORY)) > 0


# --------------------------------------------------------------- by their group


@dataclass(frozen=True)
class Mastered(Rows):
    """Groups of which ``by`` solved more than a share."""

    more: float = 0.0
    by: Rows = field(default_factory=lambda: From("policy"))

    def of(self, batch: Batch) -> Field:
        mine = where(self.by.of(batch), 1.0, 0.0)
        share = (mine * Solved()(batch)).sum(GROUP) / mine.sum(GROUP).clamp(low=1.0)
        return (share > self.more).at(TRAJECTORY)


@dataclass(frozen=True)
class Failing(Rows):
    """Groups whose own rewards are nearly alike and low: std < ``spread`` and mean < ``mean``."""

    spread: float = 0.05
    mean: float = 0.2

    def __post_init__(self) -> None:
        check(self.spread > 0, f"spread is {self.spread}; write a positive number")

    def of(self, batch: Batch) -> Field:
        mine, r = where(From("policy").of(batch), 1.0, 0.0), batch.reward.sum(TRAJECTORY)
        n = mine.sum(GROUP)
        mean = (mine * r).sum(GROUP) / n.clamp(low=1.0)
        std = ((mine * (r - mean) ** 2).sum(GROUP) / (n - 1).clamp(low=1.0)) ** 0.5
        return ((n > 0) & (std < self.spread) & (mean < self.mean)).at(TRAJECTORY)


@dataclass(frozen=True)
class Unrewarded(Rows):
    """Groups whose own rewards are all 0."""

    def of(self, batch: Batch) -> Field:
        mine = where(From("policy").of(batch), 1.0, 0.0)
        earned = (mine * batch.reward.sum(TRAJECTORY).abs()).sum(GROUP)
        return ((mine.sum(GROUP) > 0) & (earned <= 0)).at(TRAJECTORY)


@dataclass(frozen=True)
class Best(Rows):
    """One row of each group: the one with the largest ``by`` among ``rows``; among equals, or without it, by lot."""

    rows: Rows
    by: Term | None = None

    def of(self, batch: Batch) -> Field:
        able = self.rows.of(batch)
        order = torch.argsort(batch.seed.x, stable=True)
        if self.by is not None:
            order = order[torch.argsort(self.by(batch).at(TRAJECTORY).x[order], descending=True, stable=True)]
        order = order[able.x[order]]
        owner = batch.tree.parents[2][order]
        place = torch.argsort(owner, stable=True)
        first = torch.ones_like(owner, dtype=torch.bool)
        first[1:] = owner[place][1:] != owner[place][:-1]
        chosen = torch.zeros_like(able.x)
        chosen[order[place[first]]] = True
        return Field(batch.tree, TRAJECTORY, chosen)


@dataclass(frozen=True)
class Latest(Rows):
    """One row of each group: the one stored last (fact ``age``); who has no age comes after all others."""

    rows: Rows

    def of(self, batch: Batch) -> Field:
        return Best(self.rows, -1.0 * Fact("age", missing=torch.inf)).of(batch)


@dataclass(frozen=True)
class Patched(Rows):
    """Own rows; but in a group of ``failing`` that has a row in ``stock``, one of its own gives way to it; both by lot."""

    failing: Rows
    stock: Rows

    def of(self, batch: Batch) -> Field:
        own, spare = From("policy").of(batch), Best(self.stock).of(batch)
        helped = self.failing.of(batch) & (where(spare, 1.0, 0.0).sum(GROUP) > 0)
        return (own & ~(helped & Best(From("policy")).of(batch))) | (spare & helped)


# ------------------------------------------------------------------- together


@dataclass(frozen=True)
class AllOf(Rows):
    """Rows that are in each."""

    rows: tuple[Rows, ...]

    def of(self, batch: Batch) -> Field:
        found = self.rows[0].of(batch)
        for other in self.rows[1:]:
            found = found & other.of(batch)
        return found


@dataclass(frozen=True)
class AnyOf(Rows):
    """Rows that are in one of them."""

    rows: tuple[Rows, ...]

    def of(self, batch: Batch) -> Field:
        found = self.rows[0].of(batch)
        for other in self.rows[1:]:
            found = found | other.of(batch)
        return found


@dataclass(frozen=True)
class Not(Rows):
    """The other rows."""

    rows: Rows

    def of(self, batch: Batch) -> Field:
        return ~self.rows.of(batch)


__all__ = [
    "AllOf", "Among", "AnyOf", "Best", "Failing", "From", "Gained", "Latest", "Mastered", "NonZero", "Not", "NotOlder",
    "Only", "Patched", "Rows", "Spoken", "Succeeded", "Unaided", "Unrewarded",
]  # fmt: skip
