"""Distance of hidden states from those of successful trajectories: the error of a flow-matching model.

    xₛ = s x + (1 − s) e,   v(xₛ, s, c) → x − e,   deviation = mean_d (v(x₀.₈, 0.8, c) − (x − e))²

x is the state after a sampled token, c the state before it, both scaled to unit RMS, e Gaussian noise. A small network of
residual blocks, modulated by s and c, trains on the successful trajectories of each batch with its own optimizer; it measures
the next batch. Scores use one fixed e for all tokens, so that tokens do not differ by the draw. The deviation is 0 before the
first training step. Knows hidden states and success; does not know what the deviation is for.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from turnwise.core.batch import Batch
from turnwise.core.levels import TOKEN, TRAJECTORY, Field
from turnwise.core.signals import Signal
from turnwise.engines.learner import optimizer
from turnwise.engines.learner.forward_pass import ForwardPass
from turnwise.engines.learner.optimizer import LearnerSettings
from turnwise.engines.learner.signals.auxiliary import FeatureBuffer

SCORE_TIME = 0.8  # s at which the deviation is measured
INNER, BLOCKS, FREQUENCIES = 128, 2, 4
STEPS, ROWS = 8, 1024  # optimizer steps per batch, and pairs of states per step
PER_TRAJECTORY = 64  # pairs buffered per trajectory, at most on average


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
    """An ``auxiliary.AuxiliaryModel``."""

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

    def _pairs(self, forward: ForwardPass) -> Tensor:
        """The states after and before each token, scaled to unit RMS, [N, 2, D]."""
        pairs = torch.stack([forward.after, forward.before], 1).to(self.noise.dtype)
        return pairs / (pairs.square().mean(-1, keepdim=True).sqrt() + 1e-6)

    def measure(self, forward: ForwardPass) -> Field:
        batch, pairs = forward.batch, self._pairs(forward)
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
