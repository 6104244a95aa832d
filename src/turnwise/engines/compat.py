"""Every private interface of PyTorch that the engines use, each behind a plain function.

Verified with torch 2.13.0: the ``foreach_*`` functions on a CPU, the others by name and schema
(``tests/engines/test_compat.py``), and on a GPU by the tests of kernels and learner. The project requires torch >= 2.8.
If a new torch release renames one of these, change this module and nothing else. Knows no models, kernels or batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

Tensors = list[Tensor] | tuple[Tensor, ...]


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """(a · scale_a) (b · scale_b) for e4m3 matrices: a [L, d] row-major, b [d, n] column-major, scales [L, 1] and [1, n].

    Wraps ``torch._scaled_mm``. Needs a GPU with fp8 units."""
    return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype)


def flash_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen: tuple[int, int], scale: float,
    window: int | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention of packed sequences: q [L, H, D], k and v [M, Hkv, D] -> [L, H, D]. ``window``: sliding window, or None.

    Wraps ``aten::_flash_attention_forward``, which is differentiable. Needs a GPU and a 16-bit dtype."""
    sides = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    flash = torch.ops.aten._flash_attention_forward
    return flash(q, k, v, cu_seqlens_q, cu_seqlens_k, *max_seqlen, 0.0, True, False, scale=scale, **sides)[0]


def foreach_copy_(targets: Tensors, sources: Tensors) -> None:
    """Copy each source into its target, in one call. Wraps ``torch._foreach_copy_``."""
    torch._foreach_copy_(targets, sources)


def foreach_zero_(tensors: Tensors) -> None:
    """Zero all tensors in one call. Wraps ``torch._foreach_zero_``."""
    torch._foreach_zero_(tensors)


def foreach_add_(targets: Tensors, others: Tensors) -> None:
    """Add each other tensor to its target, in one call. Wraps ``torch._foreach_add_``."""
    torch._foreach_add_(targets, others)


def foreach_mul_(tensors: Tensors, factor: float) -> None:
    """Multiply all tensors by ``factor``, in one call. Wraps ``torch._foreach_mul_``."""
    torch._foreach_mul_(tensors, factor)


def foreach_lerp_(targets: Tensors, others: Tensors, weight: float) -> None:
    """target += weight · (other − target) for each pair, in one call. Wraps ``torch._foreach_lerp_``."""
    torch._foreach_lerp_(targets, others, weight)


def saved_tensors_are_hooked() -> bool:
    """Whether a hook decides what autograd keeps here, as activation checkpointing does; only the innermost one is asked.

    Wraps ``torch._C._autograd._top_saved_tensors_default_hooks``."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
