"""A linear probe that predicts a trajectory's reward from the policy's own hidden states.

    z = [state before the first sampled token ; mean state after the sampled ones]
    w = (Cov(z) + λ diag Cov(z))⁻¹ Cov(z, R₋),   prediction = mean(R₋) + w·(z − mean z)

R₋ is the mean reward of the *other* trajectories of the task, so that the probe learns what the task is worth and not how
this one attempt went; a lone trajectory has only its own. Moments are sums over all batches so far, each older one weighing
``forget`` times less. Before the first batch the prediction is 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from turnwise.core.batch import Batch
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, Field, where
from turnwise.core.signals import Signal
from turnwise.engines.learner.forward_pass import Reading
from turnwise.engines.learner.signals.auxiliary import Notes


class Ridge:
    """A ``notes.Pupil``. All it knows are the second moments of (1, z, R₋)."""

    signal = Signal.PROBE

    def __init__(self, device: torch.device, penalty: float = 1.0, forget: float = 0.9) -> None:
        self.device, self.penalty, self.forget = device, penalty, forget
        self.moments: Tensor | None = None  # [1 + d + 1] squared, float64
        self._notes, self._fresh = Notes(), False
        self._centre, self._offset, self._slope = torch.zeros(0), 0.0, torch.zeros(0)

    def open(self) -> None:
        self._notes.clear()
        self._fresh = True

    def measure(self, reading: Reading) -> Field:
        z = features(reading)
        spoke = reading.batch.tree.size(TOKEN, TRAJECTORY).x > 0
        self._notes.add(reading.batch.seed.x[spoke], z[spoke])
        if self.moments is None:
            return Field(reading.batch.tree, TRAJECTORY, z.new_zeros(z.shape[0]))
        found = self._offset + (z - self._centre) @ self._slope
        return Field(reading.batch.tree, TRAJECTORY, torch.where(spoke, found, self._offset))

    def learn(self, batch: Batch) -> None:
        taken = self._notes.take(batch)
        if taken is None:
            return
        z, place = taken
        reward = batch.reward.sum(TRAJECTORY).to(torch.float64)
        peers = reward.map(torch.ones_like).sum(GROUP)
        target = where(peers > 1, reward.leave_one_out(GROUP), reward)
        y = target.x.to(z.device)[place]
        rows = torch.cat([torch.ones_like(z[:, :1]), z, y[:, None]], 1)
        kept = 0.0 if self.moments is None else self.moments * (self.forget if self._fresh else 1.0)
        self.moments, self._fresh = rows.T @ rows + kept, False
        self._fit()

    def _fit(self) -> None:
        assert self.moments is not None
        m = self.moments / self.moments[0, 0]
        mean = m[0, 1:]
        cov = m[1:, 1:] - mean[:, None] * mean
        spread = cov.diagonal()[:-1]
        ridge = self.penalty * spread.clamp(min=1e-6 * float(spread.mean()) + 1e-12)  # a constant feature has no spread
        self._slope = torch.linalg.solve(cov[:-1, :-1] + torch.diag(ridge), cov[:-1, -1])
        self._centre, self._offset = mean[:-1], float(mean[-1])

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.moments is None else {"moments": self.moments.clone()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self._notes.clear()
        self.moments = tensors["moments"].to(self.device, copy=True) if tensors else None
        if self.moments is not None:
            self._fit()


def features(reading: Reading) -> Tensor:
    """[K, 2 D] in float64; zeros for a trajectory without tokens."""
    tree = reading.batch.tree
    owner, count = tree.ancestor(TOKEN, TRAJECTORY), tree.size(TOKEN, TRAJECTORY).x
    first = (tree.index(TOKEN, TRAJECTORY).x == 0).nonzero().squeeze(1)
    blank = reading.before.new_zeros(len(reading.batch), reading.before.shape[1], dtype=torch.float64)
    prompt = blank.index_copy(0, owner[first], reading.before[first].double())
    mean = blank.index_add(0, owner, reading.after.double()) / count.clamp(min=1)[:, None]
    return torch.cat([prompt, mean], 1)
