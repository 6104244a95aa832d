"""How a mixture computes its experts: the interchangeable implementations of Transformers, and one in the compute dtype.

The loop over experts (``eager``) asks the device which experts were chosen: the host waits for it in every layer, and no CUDA
graph can be captured. ``grouped_mm`` sorts the (row, expert) pairs by expert and multiplies all groups in one launch: each chosen
expert is read once. ``batched_mm`` gathers the weights of every pair first: fewer launches, more bytes. On a GPU whose grouped
product is a loop of the host too (before Hopper), only ``batched_mm`` can be captured.

None of them follows autocast: float32 weights are multiplied in float32. ``COMPUTE_DTYPE``, registered here, rounds weights and
rows as autocast does for a linear layer, and multiplies groups. Knows modules and rows; neither routers, caches nor batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from turnwise.engines.kernels.dispatch import compute_dtype

EAGER, GROUPED, BATCHED = "eager", "grouped_mm", "batched_mm"
COMPUTE_DTYPE = "turnwise"  # the name of our own, as of our attention
MARKS = (
    "config",
    "num_experts",
    "has_gate",
    "has_bias",
    "is_transposed",
)  # what Transformers gives experts it dispatches
GATHERED_BYTES = (
    32 << 20
)  # of one layer's gathered weights, up to which fewer launches outweigh more bytes (calculated)


def expert_modules(model: nn.Module) -> list[Any]:
    """The modules whose implementation their configuration chooses; none for a family with experts of its own kind."""
    return [m for m in model.modules() if is_experts(m)]


def is_experts(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in MARKS)


def expert_configs(model: nn.Module) -> list[Any]:
    """The configurations that choose this model's implementation."""
    return list({id(m.config): m.config for m in expert_modules(model)}.values())


def use(model: nn.Module, implementation: str | None) -> None:
    """Compute all experts of this model so from now on; copies keep it."""
    for config in expert_configs(model):
        config._experts_implementation = implementation


@contextmanager
def using(configs: Sequence[Any], implementation: str) -> Iterator[None]:
    """Inside, experts with these configurations are computed so."""
    before = [config._experts_implementation for config in configs]
    try:
        for config in configs:
            config._experts_implementation = implementation
        yield
    finally:
        for config, name in zip(configs, before):
            config._experts_implementation = name


# ------------------------------------------------------------------ in the compute dtype


class _Rounded:
    """A module's experts with their weights in another dtype. The rounded ones live as long as autograd needs them."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to(self._dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _in_compute_dtype(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Rows [N, d] -> [N, d] in the dtype of the rows. The products round as those of a linear layer under autocast do."""
    dtype = compute_dtype(hidden_states)
    grouped: Callable[..., Tensor] = ALL_EXPERTS_FUNCTIONS[GROUPED]
    return grouped(_Rounded(module, dtype), hidden_states.to(dtype), top_k_index, top_k_weights).to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(COMPUTE_DTYPE, _in_compute_dtype)


# ------------------------------------------------------------------ a choice by rows


@dataclass(frozen=True)
class ExpertChoice:
    """Which implementation computes a number of rows, among those that are ``proven``: that give the model's own logits, and on
    a GPU run without the host."""

    expert_bytes: int  # weights of one expert
    k: int  # experts of a row
    proven: tuple[str, ...] = (GROUPED, BATCHED)
    refused: dict[str, str] = field(default_factory=dict)  # the others, and why

    @classmethod
    def of(cls, model: PreTrainedModel, k: int) -> ExpertChoice | None:
        """None: the family's experts cannot be exchanged."""
        modules = expert_modules(model)
        if not modules:
            return None
        sizes = [sum(p.nbytes for p in m.parameters()) // m.num_experts for m in modules]
        return cls(max(sizes), k)

    def for_rows(self, rows: int) -> str:
        few = rows * self.k * self.expert_bytes <= GATHERED_BYTES
        return next(name for name in ((BATCHED, GROUPED) if few else (GROUPED, BATCHED)) if name in self.proven)

    def without(self, name: str, why: str) -> ExpertChoice:
        return replace(self, proven=tuple(n for n in self.proven if n != name), refused={**self.refused, name: why})

    def only(self, name: str) -> ExpertChoice:
        return replace(self, proven=(name,))

    def describe(self) -> str:
        """``experts by grouped_mm and batched_mm``, and why not by others."""
        return f"experts by {' and '.join(self.proven)}" + "".join(
            f", not {n}: {why}" for n, why in self.refused.items()
        )


__all__ = [
    "COMPUTE_DTYPE", "EAGER", "ExpertChoice", "expert_configs", "expert_modules", "is_experts", "use", "using",
]  # fmt: skip
