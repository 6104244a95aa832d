"""A linear probe that predicts a trajectory's reward from the policy's hidden states, by ridge regression.

    z = [state before the first sampled token ; mean state after the sampled ones]
    w = (Cov(z) + λ diag Cov(z))⁻¹ Cov(z, R₋),   prediction = mean(R₋) + w·(z − mean z)

R₋ is the mean reward of the *other* trajectories of the task, so that the probe learns the value of the task and not the luck
of one attempt; a trajectory without peers uses its own reward. Moments are summed over all batches; each new batch scales the
older ones by ``forget``. The prediction is 0 before the first batch. Knows hidden states and rewards; not what it is used for.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from turnwise.core.batch import Batch
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, Field, where
from turnwise.core.signals import Signal
from turnwise.engines.learner.forward_pass import ForwardPass
from turnwise.engines.learner.signals.auxiliary import FeatureBuffer


class RewardProbe:
    """An ``auxiliary.AuxiliaryModel`` whose state is the second moments of (1, z, R₋)."""

    signal = Signal.REWARD_PROBE

    def __init__(self, device: torch.device, penalty: float = 1.0, forget: float = 0.9) -> None:
        self.device, self.penalty, self.forget = device, penalty, forget
        self.moments: Tensor | None = None  # [1 + d + 1, 1 + d + 1], float64
        self.features, self._new_batch = FeatureBuffer(), False
        self._centre, self._offset, self._slope = torch.zeros(0), 0.0, torch.zeros(0)

    def begin_batch(self) -> None:
        self.features.clear()
        self._new_batch = True

    def measure(self, forward: ForwardPass) -> Field:
        z, tree = features(forward), forward.batch.tree
        has_tokens = tree.size(TOKEN, TRAJECTORY).x > 0
        self.features.add(forward.batch.seed.x[has_tokens], z[has_tokens])
        if self.moments is None:
            return Field(tree, TRAJECTORY, z.new_zeros(z.shape[0]))
        prediction = self._offset + (z - self._centre) @ self._slope
        return Field(tree, TRAJECTORY, torch.where(has_tokens, prediction, self._offset))

    def learn(self, batch: Batch) -> None:
        buffered = self.features.take(batch)
        if buffered is None:
            return
        z, trajectory = buffered
        reward = batch.reward.sum(TRAJECTORY).to(torch.float64)
        peers = reward.map(torch.ones_like).sum(GROUP)
        target = where(peers > 1, reward.leave_one_out(GROUP), reward)
        y = target.x.to(z.device)[trajectory]
        rows = torch.cat([torch.ones_like(z[:, :1]), z, y[:, None]], 1)
        older = 0.0 if self.moments is None else self.moments * (self.forget if self._new_batch else 1.0)
        self.moments, self._new_batch = rows.T @ rows + older, False
        self._fit()

    def _fit(self) -> None:
        assert self.moments is not None
        m = self.moments / self.moments[0, 0]
        mean = m[0, 1:]
        cov = m[1:, 1:] - mean[:, None] * mean
        variance = cov.diagonal()[:-1]
        ridge = self.penalty * variance.clamp(min=1e-6 * float(variance.mean()) + 1e-12)  # a constant feature has none
        self._slope = torch.linalg.solve(cov[:-1, :-1] + torch.diag(ridge), cov[:-1, -1])
        self._centre, self._offset = mean[:-1], float(mean[-1])

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.moments is None else {"moments": self.moments.clone()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.features.clear()
        self.moments = tensors["moments"].to(self.device, copy=True) if tensors else None
        if self.moments is not None:
            self._fit()


def features(forward: ForwardPass) -> Tensor:
    """z [K, 2 D] in float64; zeros for a trajectory without tokens."""
    tree = forward.batch.tree
    owner, count = tree.ancestor(TOKEN, TRAJECTORY), tree.size(TOKEN, TRAJECTORY).x
    first = (tree.index(TOKEN, TRAJECTORY).x == 0).nonzero().squeeze(1)
    zeros = forward.before.new_zeros(len(forward.batch), forward.before.shape[1], dtype=torch.float64)
    prompt = zeros.index_copy(0, owner[first], forward.before[first].double())
    mean = zeros.index_add(0, owner, forward.after.double()) / count.clamp(min=1)[:, None]
    return torch.cat([prompt, mean], 1)
