"""Every private interface of PyTorch that the engines use, each under a plain name.

Verified with torch 2.13.0: the ``foreach_*`` functions on a CPU, the others by name and schema
(``tests/engines/test_compat.py``), and on a GPU by the tests of kernels and learner. The project requires torch >= 2.8.
If a new torch release renames one of these, change this module and nothing else. Knows no models, kernels or batches.
"""

from __future__ import annotations

import torch
from torch import Tensor


def flash_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen: tuple[int, int], scale: float,
    window: int | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention of packed sequences: q [L, H, D], k and v [M, Hkv, D] -> [L, H, D]. ``window``: sliding window, or None.

    Wraps ``aten::_flash_attention_forward``, which is differentiable. Needs a GPU and a 16-bit dtype."""
    sides = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    flash = torch.ops.aten._flash_attention_forward
    return flash(q, k, v, cu_seqlens_q, cu_seqlens_k, *max_seqlen, 0.0, True, False, scale=scale, **sides)[0]


# (a · scale_a) (b · scale_b) for e4m3 matrices: a [L, d] row-major, b [d, n] column-major, scales [L, 1] and [1, n]. Needs a
# GPU with fp8 units.
scaled_mm = torch._scaled_mm

# One call for whole lists of tensors: on a GPU one launch instead of one for each. In order: target = source; tensor = 0;
# target += other; tensor *= factor; target += weight · (other − target).
foreach_copy_ = torch._foreach_copy_
foreach_zero_ = torch._foreach_zero_
foreach_add_ = torch._foreach_add_
foreach_mul_ = torch._foreach_mul_
foreach_lerp_ = torch._foreach_lerp_


def saved_tensors_are_hooked() -> bool:
    """Whether a hook decides what autograd keeps here, as activation checkpointing does; only the innermost one is asked.

    Wraps ``torch._C._autograd._top_saved_tensors_default_hooks``."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
