"""The driver of a machine without a GPU. The interpreter launches kernels itself, so nothing of it is called."""

from __future__ import annotations

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class InterpretedDriver(DriverBase):
    def __init__(self) -> None:
        pass

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> Any:
        return GPUTarget("cpu", 0, 0)

    def get_active_torch_device(self) -> Any:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, name: str) -> str:
        return name

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("interpreted kernels are not tuned")
