"""How weights move: the learner's settings, AdamW groups, the learning-rate schedule, the guarded step.

This module does not know where gradients come from: no batches, no objectives, no models beyond their parameter names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from turnwise.errors import SettingError, nearest

SCHEDULES = ("constant", "linear", "cosine")
DTYPES = ("auto", "float32", "bfloat16", "float64", "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """Everything that can be chosen about a learner. ``LearnerSettings(lr=3e-4, clip=1.0, positions=8192)``"""

    lr: float = 1e-5
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    clip: float = 1.0  # largest norm of the whole gradient; infinity for never
    warmup: int = 0  # steps until the full learning rate
    schedule: str = "constant"  # after the warm-up: constant, or to zero at total_steps: linear, cosine
    total_steps: int | None = None
    positions: int = 16384  # packed ids in one micro-batch: memory, never the result
    dtype: str = "auto"  # float32 on CPU, bfloat16 (weights stay float32) on CUDA; fp8: that, its layers rounded
    lora_rank: int = 0  # 0 trains every weight
    lora_alpha: float | None = None  # None: twice the rank
    value_lr: float | None = None  # of the critic; None: lr
    recompute: bool = False  # keep only what enters each layer, and compute the layer again in the backward pass
    offload: bool = False  # the optimiser's memory lies in the host's memory between steps
    follow: float = 0.1  # how far the critic's slow copy follows it in one step

    def __post_init__(self) -> None:
        self._at_least(0, "lr", "weight_decay", "warmup", "lora_rank", "value_lr")
        self._at_least(1, "positions", "total_steps")
        for name in ("eps", "clip", "lora_alpha"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise SettingError(f"{name} is {value}; write a positive number")
        if not 0 < self.follow <= 1:
            raise SettingError(f"follow is {self.follow}; write a number in (0, 1]")
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise SettingError(f"betas is {self.betas}; write two numbers in [0, 1)")
        for name, known in (("schedule", SCHEDULES), ("dtype", DTYPES)):
            if getattr(self, name) not in known:
                raise SettingError(f"{name} is {getattr(self, name)!r}; {nearest(str(getattr(self, name)), known)}")
        if self.schedule != "constant" and self.total_steps is None:
            raise SettingError(f"schedule {self.schedule!r} needs total_steps")
        if self.total_steps is not None and self.warmup > self.total_steps:
            raise SettingError(f"warmup ({self.warmup}) is longer than total_steps ({self.total_steps})")

    def _at_least(self, least: int, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and not (value >= least and math.isfinite(value)):
                raise SettingError(f"{name} is {value}; write a number of at least {least}")

    @property
    def narrow(self) -> bool:
        """Are the layers' products those of an fp8 sampler?"""
        return self.dtype == "fp8"

    def arithmetic(self, device: torch.device) -> torch.dtype:
        """What ``dtype`` means on this device."""
        if self.dtype in ("auto", "fp8"):
            return torch.bfloat16 if device.type == "cuda" else torch.float32
        return getattr(torch, self.dtype)

    def factor(self, step: int) -> float:
        """What multiplies the learning rates in the ``step``-th step, counted from 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.schedule == "constant":
            return 1.0
        left = (self.total_steps or 1) - self.warmup
        done = min(1.0, (step - self.warmup) / left) if left else 1.0
        return 1.0 - done if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


def adamw(
    parameters: Mapping[str, nn.Parameter], settings: LearnerSettings, rates: Mapping[str, float | None]
) -> torch.optim.AdamW:
    """AdamW over named parameters; ``rates``: learning rates by the prefix of a name, ``lr`` for all others. Vectors never
    decay."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, p in parameters.items():
        decay = settings.weight_decay if p.dim() > 1 else 0.0
        own = next((rate for prefix, rate in rates.items() if name.startswith(prefix)), None)
        groups.setdefault((settings.lr if own is None else own, decay), []).append(p)
    return torch.optim.AdamW(
        [{"params": ps, "lr": lr, "base_lr": lr, "weight_decay": decay} for (lr, decay), ps in groups.items()],
        betas=settings.betas,
        eps=settings.eps,
        fused=True,
    )


def scale(optimiser: torch.optim.Optimizer, factor: float) -> None:
    """Multiply all gradients."""
    if factor != 1.0:
        torch._foreach_mul_([p.grad for g in optimiser.param_groups for p in g["params"] if p.grad is not None], factor)


def preconditioner(optimiser: torch.optim.Optimizer, p: Tensor, settings: LearnerSettings) -> Tensor:
    """What AdamW multiplies a new gradient of ``p`` with: (1 − β₁)/(√v̂ + ε); 1 − β₁ before its first step.

    v̂ is held at or above its mean: rows of tokens that never occurred have none, and would promise steps without bound."""
    fresh = 1 - settings.betas[0]
    state = optimiser.state.get(p)
    if not state:
        return torch.full_like(p, fresh)
    v = state["exp_avg_sq"] / (1 - settings.betas[1] ** float(state["step"]))
    return fresh / (v.clamp(min=v.mean()).sqrt() + settings.eps)


def guarded_step(
    movers: Mapping[torch.optim.Optimizer, float], clip: float, loss: Tensor | None = None
) -> tuple[list[Tensor], Tensor]:
    """Clip and step each optimiser at its factor of the learning rate, or leave all as they were if the loss or any gradient is
    not finite. Returns each one's norm before clipping and whether the step was taken. Gradients are gone afterwards.

    Nobody looks at a number here: the device itself decides, while the host may still be ahead of it."""
    parameters = [[p for group in mover.param_groups for p in group["params"]] for mover in movers]
    norms = [torch.nn.utils.get_total_norm([p.grad for p in own if p.grad is not None]) for own in parameters]
    finite = [torch.isfinite(x).to(norms[0].device) for x in (*norms, *([] if loss is None else [loss]))]
    taken = torch.stack(finite).all()
    for (mover, factor), own, norm in zip(movers.items(), parameters, norms):
        if math.isfinite(clip):
            torch.nn.utils.clip_grads_with_norm_(own, clip, norm)
        for group in mover.param_groups:
            group["lr"] = group["base_lr"] * factor
        with _unless(mover, ~taken):
            mover.step()
        mover.zero_grad(set_to_none=True)
    return norms, taken


@contextmanager
def _unless(mover: torch.optim.Optimizer, bad: Tensor) -> Iterator[None]:
    """Its next step changes nothing where ``bad`` is true: what fused optimisers offer to scalers of half-precision gradients."""
    mover.grad_scale, mover.found_inf = None, bad.float()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del mover.grad_scale, mover.found_inf  # type: ignore[attr-defined]


def move(optimisers: Sequence[torch.optim.Optimizer], device: torch.device) -> None:
    """The optimisers' memory to a device: beside the weights for a step, or to the host until the next one."""
    for mover in optimisers:
        for state in mover.state.values():
            for key, value in state.items():
                if value.dim() and value.device.type != device.type:  # step counts stay with the weights
                    state[key] = value.to(device).pin_memory() if device.type == "cpu" else value.to(device)


def moments(optimisers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The optimisers' memory by parameter name: ``exp_avg/<name>`` and so on. A snapshot."""
    return {
        f"{key}/{name}": value.detach().clone()
        for mover in optimisers
        for name, p in parameters.items()
        for key, value in mover.state.get(p, {}).items()
    }


def restore(
    optimisers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, nn.Parameter], saved: Mapping[str, Tensor]
) -> None:
    """The inverse of ``moments``."""
    owner = {p: mover for mover in optimisers for group in mover.param_groups for p in group["params"]}
    for mover in optimisers:
        mover.state.clear()
    for full, value in saved.items():
        key, name = full.split("/", 1)
        p = parameters[name]
        owner[p].state[p][key] = value.detach().clone().to(p.device)  # the next step moves it where it belongs
