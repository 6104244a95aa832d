"""Optimization: the learner's settings, AdamW parameter groups, the learning-rate schedule, the guarded step.

Does not know where gradients come from: no batches, no objectives, no models beyond their parameter names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from turnwise.core.limits import check_limits, choice, number
from turnwise.errors import SettingError

SCHEDULES = ("constant", "linear", "cosine")
Optimizers = Sequence[torch.optim.Optimizer]
DTYPES = ("auto", "float32", "bfloat16", "float64", "fp8", "nf4")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """All settings of a learner. ``LearnerSettings(lr=3e-4, clip=1.0, positions=8192)``"""

    lr: float = number(1e-5, least=0, below=math.inf)
    weight_decay: float = number(0.0, least=0, below=math.inf)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = number(1e-8, above=0)
    clip: float = number(1.0, above=0)  # maximum global gradient norm; infinity disables clipping
    warmup: int = number(0, least=0, below=math.inf)  # steps until the full learning rate
    schedule: str = choice(*SCHEDULES)  # after the warm-up: constant, or decay to zero at total_steps: linear, cosine
    total_steps: int | None = number(None, least=1, below=math.inf)
    positions: int = number(
        16384, least=1, below=math.inf
    )  # packed ids per micro-batch: affects memory, never the result
    # auto: float32 on CPU, bfloat16 with float32 weights on CUDA; fp8: auto with fp8 layers; nf4: auto with frozen 4-bit weights
    dtype: str = choice(*DTYPES)
    lora_rank: int = number(0, least=0, below=math.inf)  # 0 trains every weight
    lora_alpha: float | None = number(None, above=0)  # None: twice the rank
    value_lr: float | None = number(None, least=0, below=math.inf)  # of the critic; None: lr
    recompute: bool = False  # activation checkpointing: keep only each layer's input
    offload: bool = False  # keep optimizer state in host memory between steps
    follow: float = number(0.1, above=0, most=1)  # τ of the critic's target network: φ̄ ← (1 − τ) φ̄ + τ φ

    def __post_init__(self) -> None:
        check_limits(self, SettingError)
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise SettingError(f"betas is {self.betas}; write two numbers in [0, 1)")
        if self.schedule != "constant" and self.total_steps is None:
            raise SettingError(f"schedule {self.schedule!r} needs an end; write total_steps")
        if self.total_steps is not None and self.warmup > self.total_steps:
            raise SettingError(
                f"warmup ({self.warmup}) is longer than total_steps ({self.total_steps}); write a shorter one"
            )

    @property
    def fp8(self) -> bool:
        return self.dtype == "fp8"

    @property
    def four_bit(self) -> bool:
        return self.dtype == "nf4"

    def compute_dtype(self, device: torch.device) -> torch.dtype:
        if self.dtype in ("auto", "fp8", "nf4"):
            return torch.bfloat16 if device.type == "cuda" else torch.float32
        return getattr(torch, self.dtype)

    def lr_factor(self, step: int) -> float:
        """The factor of all learning rates in the ``step``-th step, counted from 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.schedule == "constant":
            return 1.0
        decay_steps = (self.total_steps or 1) - self.warmup
        progress = min(1.0, (step - self.warmup) / decay_steps) if decay_steps else 1.0
        return 1.0 - progress if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))


def adamw(
    parameters: Mapping[str, nn.Parameter], settings: LearnerSettings, rates: Mapping[str, float | None]
) -> torch.optim.AdamW:
    """AdamW over named parameters. ``rates``: learning rates by name prefix; ``lr`` for all others."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, p in parameters.items():
        decay = settings.weight_decay if p.dim() > 1 else 0.0  # not of vectors: biases and norms
        rate = next((rate for prefix, rate in rates.items() if name.startswith(prefix)), None)
        groups.setdefault((settings.lr if rate is None else rate, decay), []).append(p)
    rows = [{"params": ps, "lr": lr, "base_lr": lr, "weight_decay": decay} for (lr, decay), ps in groups.items()]
    return torch.optim.AdamW(rows, betas=settings.betas, eps=settings.eps, fused=True)


def guarded_step(
    lr_factors: Mapping[torch.optim.AdamW, float], clip: float, loss: Tensor | None = None
) -> tuple[list[Tensor], Tensor]:
    """Clip and step each optimizer at its factor of the learning rate, or change nothing if the loss or any gradient is not
    finite. Returns each gradient norm before clipping, and whether the step was taken. Clears the gradients."""
    # No sync with the device: it decides whether the step is taken, while the host may run ahead.
    parameters = [[p for group in each.param_groups for p in group["params"]] for each in lr_factors]
    norms = [whole(torch.nn.utils.get_total_norm([p.grad for p in g if p.grad is not None])) for g in parameters]
    finite = [torch.isfinite(x).to(norms[0].device) for x in (*norms, *([] if loss is None else [loss]))]
    taken = torch.stack(finite).all()
    for (each, factor), params, norm in zip(lr_factors.items(), parameters, norms):
        if math.isfinite(clip):
            torch.nn.utils.clip_grads_with_norm_(params, clip, norm)
        for group in each.param_groups:
            group["lr"] = group["base_lr"] * factor
        # fused optimizers offer this to ``GradScaler``: with found_inf the step is a no-op, and the host need not know
        each.grad_scale, each.found_inf = None, (~taken).float()  # type: ignore[attr-defined]
        try:
            each.step()
        finally:
            del each.grad_scale, each.found_inf  # type: ignore[attr-defined]
        each.zero_grad(set_to_none=True)
    return norms, taken


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or all of it where this rank holds a shard: then every rank must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def move_state(optimizers: Optimizers, device: torch.device) -> None:
    """Move optimizer state to a device: beside the weights for a step, or to the host until the next one."""
    for each in optimizers:
        for state in each.state.values():
            for key, value in state.items():
                if value.dim() and value.device.type != device.type:  # step counters stay beside the weights
                    state[key] = value.to(device).pin_memory() if device.type == "cpu" else value.to(device)


def state_tensors(optimizers: Optimizers, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The live optimizer state by parameter name: ``exp_avg/<name>`` and so on."""
    return {
        f"{key}/{name}": value.detach()
        for each in optimizers
        for name, p in parameters.items()
        for key, value in each.state.get(p, {}).items()
    }


def restore_state(optimizers: Optimizers, parameters: Mapping[str, nn.Parameter], saved: Mapping[str, Tensor]) -> None:
    """The inverse of ``state_tensors``."""
    owner = {p: each for each in optimizers for group in each.param_groups for p in group["params"]}
    for each in optimizers:
        each.state.clear()
    for path, value in saved.items():
        key, name = path.split("/", 1)
        p = parameters[name]
        owner[p].state[p][key] = value.detach().clone().to(p.device)  # with ``offload``, the next step moves it
