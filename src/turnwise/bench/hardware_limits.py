"""What the machine could do: measured copies and matrix products, and what they would allow. Knows no engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from turnwise.bench.models import parameters


def settle(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def fastest(call: Callable[[], Any], device: str, repeats: int = 6) -> float:
    """Seconds of the fastest call, after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        settle(device)
        began = time.perf_counter()
        call()
        settle(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def copy_bandwidth(device: str) -> float:
    """Bytes a second of a large copy, read and written."""
    size = 1 << (30 if device == "cuda" else 27)
    a = torch.zeros(size, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return 2 * size / fastest(lambda: b.copy_(a), device)


def matrix_peak(device: str, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a large square product."""
    n = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / fastest(lambda: a @ b, device)


@dataclass(frozen=True)
class Limits:
    bandwidth: float
    peak: float

    @classmethod
    def measured(cls, device: str, dtype: torch.dtype) -> Limits:
        return cls(copy_bandwidth(device), matrix_peak(device, dtype))

    def generation(self, model: Any, batch: int, prompt: int, new: int, width: int) -> float:
        """Tokens/s = B / max((2 reads) / bandwidth, 2 N B / peak): a step reads every weight once and every lane's keys and
        values once, or it is bound by its products. ``width``: bytes of a number."""
        c, n = model.config, parameters(model)
        head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        token = 2 * width * c.num_hidden_layers * c.num_key_value_heads * head
        reads = width * n + batch * token * (prompt + new / 2)
        return batch / max(reads / self.bandwidth, 2 * n * batch / self.peak)

    def learning(self, model: Any) -> float:
        """Tokens/s = peak / 6 N: two products forward, four backward, attention not counted."""
        return self.peak / (6 * parameters(model))
