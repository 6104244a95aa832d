"""Tail risk: the credit of a bundle of tasks by where its score lies in the distribution of scores, the lower tail
above all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from turnwise.algebra.piece import State, StepView
from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, GROUP, TRAJECTORY, Field, Partition, where
from turnwise.core.limits import choice, number
from turnwise.credit.multi_reward import named_reward
from turnwise.credit.order import random_group_order, rank_in_group, segment_quantile
from turnwise.maths import segments
from turnwise.maths.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

LEVELS = tuple(0.05 * k for k in range(1, 20))
"""Levels of the quantiles that are tracked across batches."""


@dataclass(frozen=True)
class BundledRollouts:
    """Rollouts of a bundle of tasks: bundled rollout s holds the s-th trajectory of each task that has one."""

    index: Tensor  # [K] the bundled rollout of each trajectory
    bundle: Tensor  # [S] its bundle
    score: Tensor  # [S] Σ of the returns in it
    bundles: int

    @classmethod
    def draw(cls, batch: Batch, size: int) -> BundledRollouts:
        """Bundle tasks in a random order; trajectories join bundled rollouts in the order of their seeds."""
        tree, r = batch.tree, named_reward(batch, None)
        bundle = (random_group_order(batch) // size)[tree.ancestor(TRAJECTORY, GROUP)]
        rollouts = Partition.by(tree, TRAJECTORY, bundle, rank_in_group(batch, batch.seed))
        owner = torch.zeros(rollouts.count, dtype=torch.int64, device=tree.device).index_copy(0, rollouts.label, bundle)
        return cls(
            rollouts.label, owner, segments.total(r.x, rollouts.label, rollouts.count), -(-tree.count(GROUP) // size)
        )

    def bundle_quantile(self, level: float) -> Tensor:
        """Quantile of the scores of each bundle, one value per bundled rollout."""
        return segment_quantile(self.score, self.bundle, self.bundles, level)[self.bundle]

    def quantiles(self) -> list[float]:
        """Quantiles of all scores at the tracked levels."""
        one_segment = torch.zeros_like(self.bundle)
        return [float(segment_quantile(self.score, one_segment, 1, level)) for level in LEVELS]


@dataclass(frozen=True)
class TailRisk(Term):
    """g = (ω g_low + g_mid)/(ω + 1) divided by the std of the scores S of a bundle, distributed among the members of a
    rollout:

    g_mid = [(S − q_a)₊ − (S − q_b)₊]/(b − a),  g_low = −(q_a − S)₊/a;  ``baseline`` adds q_a − q_b inside the bracket.

    The quantiles are those of the "batch" (of the bundle), those "track"ed over batches, q ← q + η (level − share below
    q), or the mean of both ("mix"). ``share``: "uniform" gives every member all of it; "std" divides by the std of its
    task; "sum-mean" distributes it by R − mean of the task; "score" gives right ones ½ of it, wrong ones 1½."""

    compares_peers = True

    bundle: int = number(5, least=1)
    a: float = number(0.2, above=0, below="b")
    b: float = number(0.8, below=1)
    omega: float = number(1.5, least=0)
    eta: float = number(0.1, least=0)
    mode: str = choice("batch", "track", "mix", default="track")
    share: str = choice("uniform", "std", "sum-mean", "score", default="sum-mean")
    baseline: bool = False
    eps: float = 1e-6

    updates_after_credit = True

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"verdict"}) if self.share == "score" else frozenset()

    # -------------------------------------------------------------- memory
    def initial_state(self) -> State:
        return {"quantiles": []}

    def memory_columns(self, state: State, batch: Batch) -> dict[object, Field]:
        """The tracked quantiles nearest to a and b; NaN before the first batch, which uses its own."""
        tracked = state["quantiles"] or [float("nan")] * len(LEVELS)
        nearest_level = lambda level: min(range(len(LEVELS)), key=lambda k: abs(LEVELS[k] - level))  # noqa: E731
        return {
            (self, n): batch.tree.full(BATCH, tracked[nearest_level(getattr(self, n))], torch.float64)
            for n in ("a", "b")
        }

    def next_state(self, state: State, view: StepView) -> State:
        rollouts, tracked = BundledRollouts.draw(view.batch, self.bundle), state["quantiles"]
        if not tracked:
            return {"quantiles": rollouts.quantiles()}
        share_below = lambda q: float((rollouts.score < q - 1e-9).double().mean())  # noqa: E731
        return {"quantiles": [q + self.eta * (level - share_below(q)) for q, level in zip(tracked, LEVELS)]}

    # -------------------------------------------------------------- credit
    def __call__(self, batch: Batch) -> Field:
        rollouts = BundledRollouts.draw(batch, self.bundle)
        spread = segments.std(rollouts.score, rollouts.bundle, rollouts.bundles)[rollouts.bundle]
        has_peers = segments.size(rollouts.bundle, rollouts.bundles)[rollouts.bundle] > 1
        advantage = torch.where(
            has_peers, self.risk(rollouts.score, *self._bounds(batch, rollouts)) / (spread + self.eps), 0.0
        )
        return Field(batch.tree, TRAJECTORY, advantage[rollouts.index]) * self._share(batch, rollouts)

    def risk(self, score: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """g before the division by the std, from the scores and the quantiles q_a, q_b."""
        middle = (score - low).clamp(min=0) - (score - high).clamp(min=0)
        middle = (middle + (low - high) if self.baseline else middle) / (self.b - self.a)
        return (middle - self.omega * (low - score).clamp(min=0) / self.a) / (self.omega + 1)

    def _bounds(self, batch: Batch, rollouts: BundledRollouts) -> tuple[Tensor, Tensor]:
        current = [rollouts.bundle_quantile(level) for level in (self.a, self.b)]
        if self.mode == "batch":
            return current[0], current[1]
        tracked = [batch[self, name].x for name in ("a", "b")]
        if bool(torch.isnan(tracked[0]).any()):
            first = self.memory_columns({"quantiles": rollouts.quantiles()}, batch)
            tracked = [first[self, name].x for name in ("a", "b")]
        bounds = [(o + h) / 2 if self.mode == "mix" else h.expand_as(o) for o, h in zip(current, tracked)]
        return bounds[0], bounds[1]

    def _share(self, batch: Batch, rollouts: BundledRollouts) -> Field:
        r = named_reward(batch, None)
        if self.share == "std":
            width = r.std(GROUP)
            return where(width > 1e-3, 1 / where(width > 1e-3, width, 1.0), 1.0).at(TRAJECTORY)
        if self.share == "score":
            return where(batch.success > 0.5, 0.5, 1.5)
        if self.share == "uniform":
            return batch.tree.full(TRAJECTORY, 1.0, torch.float64)
        gap, n = r - r.mean(GROUP), rollouts.score.numel()
        total = Field(batch.tree, TRAJECTORY, segments.total(gap.x, rollouts.index, n)[rollouts.index])
        members = Field(batch.tree, TRAJECTORY, segments.size(rollouts.index, n)[rollouts.index].to(r.x.dtype))
        degenerate = total.abs() < 1e-6
        return where(degenerate, 1 / members, gap / where(degenerate, 1.0, total))


__all__ = ["LEVELS", "BundledRollouts", "TailRisk"]
