"""Small models that are trained beside the policy: a probe of the reward, a flow over hidden states; and what they train on.

An auxiliary model measures a batch using only what earlier batches taught it. While it measures, it buffers the features it
will train on. It trains when the batch returns with its rewards, once per trajectory, in the first update that contains it.

Knows hidden states, features and trajectories; does not know what the signals are for.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from turnwise.core.batch import Batch
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, Field, where
from turnwise.core.signals import Signal
from turnwise.engines.learner import optimizer
from turnwise.engines.learner.optimizer import LearnerSettings
from turnwise.engines.learner.packed_forward import ForwardPass

SCORE_TIME = 0.8  # s at which the deviation is measured
INNER, BLOCKS, FREQUENCIES = 128, 2, 4
STEPS, ROWS = 8, 1024  # optimizer steps per batch, and pairs of states per step
PER_TRAJECTORY = 64  # pairs buffered per trajectory, at most on average


class FeatureBuffer:
    """Feature rows keyed by the seed of their trajectory. Each row is taken once."""

    def __init__(self) -> None:
        self._seed: list[Tensor] = []
        self._rows: list[Tensor] = []

    def clear(self) -> None:
        self._seed, self._rows = [], []

    def add(self, seed: Tensor, rows: Tensor) -> None:
        """``seed`` [n]: the trajectory of each of the ``rows`` [n, ...]."""
        self._seed.append(seed)
        self._rows.append(rows.detach())

    def contents(self) -> tuple[Tensor, Tensor] | None:
        """All buffered seeds and rows, in the order in which they were added; None if there are none."""
        return (torch.cat(self._seed), torch.cat(self._rows)) if self._seed else None

    def take(self, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """Remove and return the rows of this batch, and the index of each row's trajectory in it; None if there are none."""
        if (buffered := self.contents()) is None or not len(batch):
            return None
        seed, rows = buffered
        batch_seeds, order = batch.seed.x.to(seed.device).sort(stable=True)
        index = torch.searchsorted(batch_seeds, seed).clamp(max=batch_seeds.numel() - 1)
        present = batch_seeds[index] == seed
        self._seed, self._rows = [seed[~present]], [rows[~present]]
        if not present.any():
            return None
        # by seed, then by insertion: neither micro-batches nor packing change the order
        by_seed = torch.argsort(seed[present], stable=True)
        return rows[present][by_seed], order[index[present][by_seed]]


# ------------------------------------------------------------ a probe of the reward


class RewardProbe:
    """Predicts a trajectory's reward from the policy's hidden states, by ridge regression.

        z = [state before the first sampled token ; mean state after the sampled ones]
        w = (Cov(z) + λ diag Cov(z))⁻¹ Cov(z, R₋),   prediction = mean(R₋) + w·(z − mean z)

    R₋ is the mean reward of the *other* trajectories of the task, so that the probe learns the value of the task and not the luck
    of one attempt; a trajectory without peers uses its own reward. Its state is the second moments of (1, z, R₋), summed over all
    batches; each new batch scales the older ones by ``forget``. The prediction is 0 before the first batch."""

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
        tree = forward.batch.tree
        owner, count = tree.ancestor(TOKEN, TRAJECTORY), tree.size(TOKEN, TRAJECTORY).x
        first, has_tokens = (tree.index(TOKEN, TRAJECTORY).x == 0).nonzero().squeeze(1), count > 0
        zeros = forward.before.new_zeros(len(forward.batch), forward.before.shape[1], dtype=torch.float64)
        prompt = zeros.index_copy(0, owner[first], forward.before[first].double())
        mean = zeros.index_add(0, owner, forward.after.double()) / count.clamp(min=1)[:, None]
        z = torch.cat([prompt, mean], 1)  # [K, 2 D]; zeros for a trajectory without tokens
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
        # older batches fade once for each new batch, however many updates read it
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


# -------------------------------------------------------- a flow of hidden states


class ModulatedBlock(nn.Module):
    """x + gate · MLP((1 + scale) · norm(x) + shift), modulated by a condition. Starts as the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift, gate = self.modulation(condition).chunk(3, -1)
        return x + gate * self.mlp(self.norm(x) * (1 + scale) + shift)


class VelocityNetwork(nn.Module):
    """v(x, s, c): the velocity of the flow at x and time s, given c."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.input, self.condition = nn.Linear(width, INNER), nn.Linear(width + 2 * FREQUENCIES, INNER)
        self.blocks = nn.ModuleList(ModulatedBlock(INNER) for _ in range(BLOCKS))
        self.output = nn.Linear(INNER, width)

    def forward(self, x: Tensor, s: Tensor, c: Tensor) -> Tensor:
        """x and c [n, D], s [n]."""
        angle = s[:, None] * torch.pi * 2.0 ** torch.arange(FREQUENCIES, device=s.device)
        condition = nn.functional.silu(self.condition(torch.cat([c, angle.sin(), angle.cos()], 1)))
        h = self.input(x)
        for block in self.blocks:
            h = block(h, condition)
        return self.output(h)


class FlowDeviation:
    """Distance of hidden states from those of successful trajectories: the error of a flow-matching model.

        xₛ = s x + (1 − s) e,   v(xₛ, s, c) → x − e,   deviation = mean_d (v(x₀.₈, 0.8, c) − (x − e))²

    x is the state after a sampled token, c the state before it, both scaled to unit RMS, e Gaussian noise. A small network of
    residual blocks, modulated by s and c, trains on the successful trajectories of each batch with its own optimizer; it measures
    the next batch. Scores use one fixed e for all tokens, so that tokens do not differ by the draw. The deviation is 0 before the
    first training step."""

    signal = Signal.FLOW_DEVIATION

    def __init__(self, width: int, device: torch.device, dtype: torch.dtype, rate: float = 1e-3) -> None:
        self.learned = 0  # number of batches trained on
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = VelocityNetwork(width).to(device=device, dtype=dtype)
            self.noise = torch.randn(width).to(device=device, dtype=dtype)
        self._parameters = dict(self.net.named_parameters())
        self._optimizer = optimizer.adamw(self._parameters, LearnerSettings(lr=rate), {})
        self.features = FeatureBuffer()

    def begin_batch(self) -> None:
        self.features.clear()

    def measure(self, forward: ForwardPass) -> Field:
        batch, states = forward.batch, torch.stack([forward.after, forward.before], 1).to(self.noise.dtype)
        pairs = states / (states.square().mean(-1, keepdim=True).sqrt() + 1e-6)  # (x, c) of each token, [N, 2, D]
        size = batch.tree.size(TOKEN, TRAJECTORY).at(TOKEN)
        selected = (batch.success.at(TOKEN).x == 1) & (batch.uniform_draws() * size < PER_TRAJECTORY).x
        self.features.add(batch.seed.at(TOKEN).x[selected], pairs[selected])
        if not self.learned:
            return Field(batch.tree, TOKEN, pairs.new_zeros(pairs.shape[0]))
        with torch.no_grad():
            return Field(batch.tree, TOKEN, self._error(pairs, self.noise.expand_as(pairs[:, 0]), SCORE_TIME))

    def _error(self, pairs: Tensor, e: Tensor, s: Tensor | float) -> Tensor:
        x, c = pairs.unbind(1)
        time = torch.as_tensor(s, dtype=x.dtype, device=x.device).expand(x.shape[0])
        velocity = self.net(time[:, None] * x + (1 - time)[:, None] * e, time, c)
        return (velocity - (x - e)).square().mean(1)

    @torch.enable_grad()
    def learn(self, batch: Batch) -> None:
        buffered = self.features.take(batch)
        if buffered is None:
            return
        pairs, _ = buffered
        rng = torch.Generator().manual_seed(self.learned)
        for _ in range(STEPS):
            rows = pairs[torch.randint(pairs.shape[0], (min(ROWS, pairs.shape[0]),), generator=rng).to(pairs.device)]
            e = torch.randn(rows[:, 0].shape, generator=rng).to(rows)
            s = torch.randn(rows.shape[0], generator=rng).to(rows).sigmoid()
            self._error(rows, e, s).mean().backward()
            optimizer.guarded_step({self._optimizer: 1.0}, 1.0)
        self.learned += 1

    def tensors(self) -> dict[str, Tensor]:
        if not self.learned:
            return {}
        weights = {f"net/{n}": p.detach().clone() for n, p in self._parameters.items()}
        moments = {f"optimiser/{n}": t for n, t in optimizer.state_tensors([self._optimizer], self._parameters).items()}
        return weights | moments | {"learned": torch.tensor(self.learned)}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.features.clear()
        self.learned = int(tensors["learned"]) if tensors else 0
        if tensors:
            for name, p in self._parameters.items():
                p.copy_(tensors[f"net/{name}"])
            saved = {n.removeprefix("optimiser/"): t for n, t in tensors.items() if n.startswith("optimiser/")}
            optimizer.restore_state([self._optimizer], self._parameters, saved)
