"""How a device computes: in which dtype, by which kernels, in micro-batches of which size, with how many threads of the host."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import torch
from torch import Tensor

from turnwise.engines.kernels import reference
from turnwise.engines.kernels.cpu import layers as native


def kind_of(weight: Tensor) -> torch.dtype:
    """The dtype of products: autocast's where it is on."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def _for_triton(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64 and importlib.util.find_spec("triton") is not None


def ops_for(x: Tensor) -> ModuleType:
    """Triton's kernels on a GPU, C kernels on a CPU, where there is a compiler for them; else their plain twins."""
    if _for_triton(x):
        from turnwise.engines.kernels.triton import layers  # late: Triton is there only where CUDA is

        return layers
    return native if native.fits(x) else reference


def attention_for(x: Tensor, size: int) -> ModuleType | None:
    """Triton's attention for heads of this size; None where it does not know them or does not work, or there is no Triton."""
    if not _for_triton(x):
        return None
    from turnwise.engines.kernels.triton import attention

    return attention if attention.fits(size, x.device) else None


def calm(device: torch.device) -> None:
    """One thread for the host beside a GPU, in this whole process: what it computes there are small index tensors, and waking the
    threads of a large machine for each costs milliseconds (a learner's step took a quarter longer)."""
    if device.type == "cuda":
        torch.set_num_threads(1)


def ids_at_once(device: torch.device) -> int:
    """Ids per micro-batch where nobody says: a GPU wants larger ones to be busy, and one with much memory has room for them."""
    if device.type != "cuda":
        return 8192
    return 24576 if torch.cuda.get_device_properties(device).total_memory > 60 << 30 else 16384
