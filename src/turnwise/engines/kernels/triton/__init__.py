"""Triton kernels for NVIDIA GPUs: the operations of ``kernels.reference``, one kernel each. Importing this imports Triton."""

from turnwise.engines.kernels.triton.decode import (
    decode_attention,
    fp8_matmul,
    prefill_attention,
    quantise,
    rope_and_cache,
    sample,
)
from turnwise.engines.kernels.triton.layers import (
    add_norm,
    gather_copies,
    log_probs,
    log_probs_backward,
    norm_backward,
    rotate_,
    rotate_backward,
    sum_copies,
    swiglu,
    swiglu_backward,
)

__all__ = [
    "add_norm", "decode_attention", "fp8_matmul", "gather_copies", "log_probs", "log_probs_backward", "norm_backward",
    "prefill_attention", "quantise", "rope_and_cache", "rotate_", "rotate_backward", "sample", "sum_copies", "swiglu",
    "swiglu_backward",
]  # fmt: skip
