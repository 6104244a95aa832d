"""Choices per device: the dtype of matrix products, the kernel modules, the micro-batch size, the number of host threads.

Knows devices and tensors; neither models nor batches.
"""

from __future__ import annotations

import importlib.util
from types import ModuleType

import torch
from torch import Tensor

from turnwise.engines.kernels import reference
from turnwise.engines.kernels.cpu import layers as c_layers


def compute_dtype(weight: Tensor) -> torch.dtype:
    """The dtype of matrix products: autocast's where it is enabled."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def _triton_supports(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64 and importlib.util.find_spec("triton") is not None


def ops_for(x: Tensor) -> ModuleType:
    """The layer kernels for a tensor: Triton on a GPU, C on a CPU with a compiler, else the PyTorch reference."""
    if _triton_supports(x):
        from turnwise.engines.kernels.triton import layers  # imported late: Triton is installed only with CUDA

        return layers
    return c_layers if c_layers.fits(x) else reference


def attention_for(x: Tensor, size: int) -> ModuleType | None:
    """The Triton attention for heads of this size; None where it does not support them, does not work, or Triton is missing."""
    if not _triton_supports(x):
        return None
    from turnwise.engines.kernels.triton import attention

    return attention if attention.fits(size, x.device) else None


def limit_host_threads(device: torch.device) -> None:
    """Use one host thread in this process if the device is a GPU: the host then computes only small index tensors, and waking the
    threads of a large machine for each costs milliseconds (a learner step took a quarter longer)."""
    if device.type == "cuda":
        torch.set_num_threads(1)


def default_micro_batch(device: torch.device) -> int:
    """Default number of ids per micro-batch: larger on a GPU, to keep it busy, and larger still with much memory."""
    if device.type != "cuda":
        return 8192
    return 24576 if torch.cuda.get_device_properties(device).total_memory > 60 << 30 else 16384
