"""How far hidden states lie from the flow of good ones: flow matching on the states of successful trajectories.

    xₛ = s x + (1 − s) e,   v(xₛ, s, c) → x − e,   deviation = mean_d (v(x₀.₈, 0.8, c) − (x − e))²

x is the state after a sampled token, c the one before it, both at unit size, e Gaussian noise. A small network of residual
blocks, shifted and scaled by s and c, learns on each batch what the successful trajectories of it did, with an optimiser of its
own; it measures the next. Scores use one fixed draw of e for all tokens: what differs between two tokens is then not the draw.
Before it has learned from anything the deviation is 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from turnwise.core.batch import Batch
from turnwise.core.levels import TOKEN, TRAJECTORY, Field
from turnwise.core.signals import Signal
from turnwise.engines.learner import optimizer
from turnwise.engines.learner.forward_pass import Reading
from turnwise.engines.learner.optimizer import LearnerSettings
from turnwise.engines.learner.signals.auxiliary import Notes

AT = 0.8
INNER, BLOCKS, WAVES = 128, 2, 4
STEPS, ROWS = 8, 1024  # optimiser steps on each batch, and pairs of states in each
PER_TRAJECTORY = 64  # pairs noted of a trajectory, on average at most


class Block(nn.Module):
    """x + gate · MLP(scale · norm(x) + shift); scale, shift and gate follow from what it is told. Begins as the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.told = nn.Linear(width, 3 * width)
        self.inside = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
        nn.init.zeros_(self.told.weight)
        nn.init.zeros_(self.told.bias)

    def forward(self, x: Tensor, told: Tensor) -> Tensor:
        scale, shift, gate = self.told(told).chunk(3, -1)
        return x + gate * self.inside(self.norm(x) * (1 + scale) + shift)


class Velocity(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter, self.told = nn.Linear(width, INNER), nn.Linear(width + 2 * WAVES, INNER)
        self.blocks = nn.ModuleList(Block(INNER) for _ in range(BLOCKS))
        self.leave = nn.Linear(INNER, width)

    def forward(self, x: Tensor, s: Tensor, c: Tensor) -> Tensor:
        """x and c [n, D], s [n]."""
        angle = s[:, None] * torch.pi * 2.0 ** torch.arange(WAVES, device=s.device)
        told = nn.functional.silu(self.told(torch.cat([c, angle.sin(), angle.cos()], 1)))
        h = self.enter(x)
        for block in self.blocks:
            h = block(h, told)
        return self.leave(h)


class Flow:
    """A ``notes.Pupil``."""

    signal = Signal.DEVIATION

    def __init__(self, width: int, device: torch.device, dtype: torch.dtype, rate: float = 1e-3) -> None:
        self.learned = 0  # batches
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = Velocity(width).to(device=device, dtype=dtype)
            self.noise = torch.randn(width).to(device=device, dtype=dtype)
        self.named = dict(self.net.named_parameters())
        self._optimiser = optimizer.adamw(self.named, LearnerSettings(lr=rate), {})
        self._notes = Notes()

    def open(self) -> None:
        self._notes.clear()

    def _pairs(self, reading: Reading) -> Tensor:
        """States after and before each token, each of unit size, [N, 2, D]."""
        both = torch.stack([reading.after, reading.before], 1).to(self.noise.dtype)
        return both / (both.square().mean(-1, keepdim=True).sqrt() + 1e-6)

    def measure(self, reading: Reading) -> Field:
        batch, pairs = reading.batch, self._pairs(reading)
        size = batch.tree.size(TOKEN, TRAJECTORY).at(TOKEN)
        good = (batch.success.at(TOKEN).x == 1) & (batch.lots() * size < PER_TRAJECTORY).x
        self._notes.add(batch.seed.at(TOKEN).x[good], pairs[good])
        if not self.learned:
            return Field(batch.tree, TOKEN, pairs.new_zeros(pairs.shape[0]))
        with torch.no_grad():
            return Field(batch.tree, TOKEN, self._error(pairs, self.noise.expand_as(pairs[:, 0]), AT))

    def _error(self, pairs: Tensor, e: Tensor, s: Tensor | float) -> Tensor:
        x, c = pairs.unbind(1)
        time = torch.as_tensor(s, dtype=x.dtype, device=x.device).expand(x.shape[0])
        found = self.net(time[:, None] * x + (1 - time)[:, None] * e, time, c)
        return (found - (x - e)).square().mean(1)

    @torch.enable_grad()
    def learn(self, batch: Batch) -> None:
        taken = self._notes.take(batch)
        if taken is None:
            return
        pairs, _ = taken
        dice = torch.Generator().manual_seed(self.learned)
        for _ in range(STEPS):
            rows = pairs[torch.randint(pairs.shape[0], (min(ROWS, pairs.shape[0]),), generator=dice).to(pairs.device)]
            e = torch.randn(rows[:, 0].shape, generator=dice).to(rows)
            s = torch.randn(rows.shape[0], generator=dice).to(rows).sigmoid()
            self._error(rows, e, s).mean().backward()
            optimizer.guarded_step({self._optimiser: 1.0}, 1.0)
        self.learned += 1

    def tensors(self) -> dict[str, Tensor]:
        if not self.learned:
            return {}
        weights = {f"net/{n}": p.detach().clone() for n, p in self.named.items()}
        memory = {f"optimiser/{n}": t for n, t in optimizer.moments([self._optimiser], self.named).items()}
        return weights | memory | {"learned": torch.tensor(self.learned)}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self._notes.clear()
        self.learned = int(tensors["learned"]) if tensors else 0
        if tensors:
            for name, p in self.named.items():
                p.copy_(tensors[f"net/{name}"])
            saved = {n.removeprefix("optimiser/"): t for n, t in tensors.items() if n.startswith("optimiser/")}
            optimizer.restore([self._optimiser], self.named, saved)
