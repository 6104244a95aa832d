"""Hardware limits: measured copy bandwidth and matrix throughput, and the token rates they allow. Knows no engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from turnwise.bench.models import parameters


def synchronize(device: str) -> None:
    """Wait until the device has finished."""
    if device == "cuda":
        torch.cuda.synchronize()


def fastest(call: Callable[[], Any], device: str, repeats: int = 6) -> float:
    """Seconds of the fastest call, after one warm-up call."""
    times = []
    for _ in range(repeats + 1):
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def copy_bandwidth(device: str) -> float:
    """Bytes per second of a large copy, counting reads and writes."""
    size = 1 << (30 if device == "cuda" else 27)
    a = torch.zeros(size, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return 2 * size / fastest(lambda: b.copy_(a), device)


@dataclass(frozen=True)
class HardwareLimits:
    """What this machine reaches on large copies and matrix products."""

    bandwidth: float  # bytes/s
    peak: float  # FLOP/s

    @classmethod
    def measured(cls, device: str, dtype: torch.dtype) -> HardwareLimits:
        n = 8192 if device == "cuda" else 1024
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        peak = 2 * n**3 / fastest(lambda: a @ b, device)  # a large square product needs 2 n³ operations
        return cls(copy_bandwidth(device), peak)

    def generation(self, model: Any, batch: int, prompt: int, new: int, width: int) -> float:
        """Tokens/s = B / max(reads / bandwidth, 2 N B / peak): a decode step reads every weight once and the KV cache of every
        sequence once, or its matrix products bound it. ``width``: bytes per number."""
        c, n = model.config, parameters(model)
        head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        token = 2 * width * c.num_hidden_layers * c.num_key_value_heads * head
        # the cache is half full on average over the new tokens
        reads = width * n + batch * token * (prompt + new / 2)
        return batch / max(reads / self.bandwidth, 2 * n * batch / self.peak)

    def learning(self, model: Any) -> float:
        """Tokens/s = peak / 6 N: 2 N FLOP forward, 4 N backward, attention not counted."""
        return self.peak / (6 * parameters(model))
