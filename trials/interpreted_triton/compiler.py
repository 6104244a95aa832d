"""The compiler of a backend that compiles nothing: kernels are interpreted."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import BaseBackend


class InterpretedBackend(BaseBackend):
    @staticmethod
    def supports_target(target: Any) -> bool:
        return target.backend == "cpu"


InterpretedBackend.__abstractmethods__ = frozenset()
