"""Choices per device: the dtype of matrix products, the kernel modules, the micro-batch size, the number of threads.

Knows devices and tensors; neither models, batches nor settings.
"""

from __future__ import annotations

import importlib.util
import os
import time
from types import ModuleType

import torch
from torch import Tensor

from turnwise.engines.kernels import cpu, reference

ROUNDS = 6
PRODUCTS = 20  # per round: a few milliseconds
ROWS, WIDTH = 512, 192  # a micro-batch of the tiny model
TRITON = "turnwise.engines.kernels.triton."
MARGIN = 1.15  # fewer threads must be this much faster: a quiet machine always keeps all of its cores


def compute_dtype(weight: Tensor) -> torch.dtype:
    """The dtype of matrix products: autocast's where it is enabled."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def _triton_supports(x: Tensor) -> bool:
    """Triton is installed only with CUDA, so its modules are imported late."""
    return x.is_cuda and x.dtype != torch.float64 and importlib.util.find_spec("triton") is not None


def ops_for(x: Tensor) -> ModuleType:
    """The operations of a learner's layers for a tensor: Triton on a GPU, C on a CPU with a compiler, else the reference."""
    if _triton_supports(x):
        return importlib.import_module(TRITON + "layers")
    return cpu if cpu.fits(x) else reference


def decode_ops(device: torch.device) -> tuple[ModuleType | None, str]:
    """The operations of a decoder in CUDA graphs for a device, or the reason why there are none."""
    if device.type != "cuda":
        return None, "no GPU"
    if importlib.util.find_spec("triton") is None:
        return None, "no Triton to compile kernels with"
    return importlib.import_module(TRITON + "decode"), ""


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


def available_cores() -> int:
    """The cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measured_threads() -> int:
    """The thread count with the shortest time for a series of small matrix products; all cores unless fewer clearly win.

    On a machine whose cores are all free, more threads are faster. Beside another busy process they wait for each other at the
    end of every operation, and one thread can be several times faster than two. The number changes the order of sums and so the
    last bits of a result: a run measures once, records it, and a resumed run uses it again."""
    cores, previous = available_cores(), torch.get_num_threads()
    candidates = sorted({1, max(1, cores // 2), cores})
    if candidates == [1]:
        return 1
    seconds = dict.fromkeys(candidates, 0.0)
    try:
        for round_number in range(ROUNDS):
            for count in candidates:
                torch.set_num_threads(count)
                elapsed = _time_products()
                seconds[count] += elapsed if round_number else 0.0  # the first round starts the threads
    finally:
        torch.set_num_threads(previous)
    fastest = min(candidates, key=lambda count: seconds[count])
    return fastest if seconds[cores] > MARGIN * seconds[fastest] else cores


def _time_products() -> float:
    x, weight = torch.ones(ROWS, WIDTH), torch.ones(WIDTH, 4 * WIDTH)
    start = time.perf_counter()
    for _ in range(PRODUCTS):
        torch.nn.functional.silu(x @ weight)
    return time.perf_counter() - start
