"""Risk: the credit of a bundle of tasks by where its score lies in the distribution of scores, the lower tail above all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from turnwise.algebra.piece import State, Whole, check
from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, GROUP, TRAJECTORY, Field, Partition, where
from turnwise.credit.multi_reward import component
from turnwise.credit.order import group_lots, place, quantile
from turnwise.maths import segments

LEVELS = tuple(0.05 * k for k in range(1, 20))
"""Of the quantiles that are followed from batch to batch."""


@dataclass(frozen=True)
class Sheets:
    """The sheets of a batch: in a bundle of tasks, sheet s has the s-th trajectory of each task that has one."""

    of: Tensor  # [K] the sheet of each trajectory
    bundle: Tensor  # [S] the bundle of each sheet
    score: Tensor  # [S] Σ of the outcomes on it
    bundles: int

    @classmethod
    def draw(cls, batch: Batch, size: int) -> Sheets:
        """Tasks are bundled by lot, and trajectories put on sheets in the order of their numbers."""
        tree, r = batch.tree, component(batch, None)
        bundle = (group_lots(batch) // size)[tree.ancestor(TRAJECTORY, GROUP)]
        sheets = Partition.by(tree, TRAJECTORY, bundle, place(batch, batch.seed))
        owner = torch.zeros(sheets.count, dtype=torch.int64, device=tree.device).index_copy(0, sheets.label, bundle)
        return cls(sheets.label, owner, segments.total(r.x, sheets.label, sheets.count), -(-tree.count(GROUP) // size))

    def quantile(self, level: float) -> Tensor:
        """Of the scores of each bundle, one for each sheet."""
        return quantile(self.score, self.bundle, self.bundles, level)[self.bundle]

    def quantiles(self) -> list[float]:
        """Of all scores, at the levels that are followed."""
        everyone = torch.zeros_like(self.bundle)
        return [float(quantile(self.score, everyone, 1, level)) for level in LEVELS]


@dataclass(frozen=True)
class TailRisk(Term):
    """g = (ω g_low + g_mid)/(ω + 1) over the std of the sheets' scores S in a bundle, shared out among the members of a sheet:

    g_mid = [(S − q_a)₊ − (S − q_b)₊]/(b − a),  g_low = −(q_a − S)₊/a;  ``baseline`` adds q_a − q_b inside the bracket.

    The quantiles are those of the "batch" (of the bundle), those that were "track"ed over batches, q ← q + η (level − share
    below q), or the mean of both ("mix"). ``share``: "uniform" gives every member all of it; "std" divides by the spread of
    its task; "sum-mean" shares it out by R − mean of the task; "score" gives right ones ½ of it, wrong ones 1½."""

    bundle: int = 5
    a: float = 0.2
    b: float = 0.8
    omega: float = 1.5
    eta: float = 0.1
    mode: str = "track"
    share: str = "sum-mean"
    baseline: bool = False
    eps: float = 1e-6

    late = True

    def __post_init__(self) -> None:
        check(self.bundle >= 1, f"bundles of {self.bundle} tasks; write at least 1")
        check(0 < self.a < self.b < 1, f"levels a = {self.a}, b = {self.b}; write 0 < a < b < 1")
        check(self.omega >= 0 and self.eta >= 0, f"omega {self.omega}, eta {self.eta}; write numbers >= 0")
        check(self.mode in ("batch", "track", "mix"), f"no mode {self.mode!r}; write batch, track or mix")
        known = ("uniform", "std", "sum-mean", "score")
        check(self.share in known, f"no share {self.share!r}; write one of {', '.join(known)}")

    @property
    def judges(self) -> bool:
        return True

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"verdict"}) if self.share == "score" else frozenset()

    # -------------------------------------------------------------- memory
    def start(self) -> State:
        return {"quantiles": []}

    def recall(self, state: State, batch: Batch) -> dict[object, Field]:
        """The followed quantiles nearest to a and b; NaN before the first batch, which is then judged by its own."""
        held = state["quantiles"] or [float("nan")] * len(LEVELS)
        near = lambda level: min(range(len(LEVELS)), key=lambda k: abs(LEVELS[k] - level))  # noqa: E731
        return {(self, n): batch.tree.full(BATCH, held[near(getattr(self, n))], torch.float64) for n in ("a", "b")}

    def advance(self, state: State, whole: Whole) -> State:
        sheets, held = Sheets.draw(whole.batch, self.bundle), state["quantiles"]
        if not held:
            return {"quantiles": sheets.quantiles()}
        below = lambda q: float((sheets.score < q - 1e-9).double().mean())  # noqa: E731
        return {"quantiles": [q + self.eta * (level - below(q)) for q, level in zip(held, LEVELS)]}

    # -------------------------------------------------------------- credit
    def __call__(self, batch: Batch) -> Field:
        sheets = Sheets.draw(batch, self.bundle)
        spread = segments.std(sheets.score, sheets.bundle, sheets.bundles)[sheets.bundle]
        several = segments.size(sheets.bundle, sheets.bundles)[sheets.bundle] > 1
        judged = torch.where(several, self.risk(sheets.score, *self._bounds(batch, sheets)) / (spread + self.eps), 0.0)
        return Field(batch.tree, TRAJECTORY, judged[sheets.of]) * self._share(batch, sheets)

    def risk(self, score: Tensor, low: Tensor, high: Tensor) -> Tensor:
        middle = (score - low).clamp(min=0) - (score - high).clamp(min=0)
        middle = (middle + (low - high) if self.baseline else middle) / (self.b - self.a)
        return (middle - self.omega * (low - score).clamp(min=0) / self.a) / (self.omega + 1)

    def _bounds(self, batch: Batch, sheets: Sheets) -> tuple[Tensor, Tensor]:
        own = [sheets.quantile(level) for level in (self.a, self.b)]
        if self.mode == "batch":
            return own[0], own[1]
        held = [batch[self, name].x for name in ("a", "b")]
        if bool(torch.isnan(held[0]).any()):
            first = self.recall({"quantiles": sheets.quantiles()}, batch)
            held = [first[self, name].x for name in ("a", "b")]
        found = [(o + h) / 2 if self.mode == "mix" else h.expand_as(o) for o, h in zip(own, held)]
        return found[0], found[1]

    def _share(self, batch: Batch, sheets: Sheets) -> Field:
        r = component(batch, None)
        if self.share == "std":
            width = r.std(GROUP)
            return where(width > 1e-3, 1 / where(width > 1e-3, width, 1.0), 1.0).at(TRAJECTORY)
        if self.share == "score":
            return where(batch.success > 0.5, 0.5, 1.5)
        if self.share == "uniform":
            return batch.tree.full(TRAJECTORY, 1.0, torch.float64)
        gap, n = r - r.mean(GROUP), sheets.score.numel()
        whole = Field(batch.tree, TRAJECTORY, segments.total(gap.x, sheets.of, n)[sheets.of])
        members = Field(batch.tree, TRAJECTORY, segments.size(sheets.of, n)[sheets.of].to(r.x.dtype))
        even = whole.abs() < 1e-6
        return where(even, 1 / members, gap / where(even, 1.0, whole))


__all__ = ["LEVELS", "Sheets", "TailRisk"]
