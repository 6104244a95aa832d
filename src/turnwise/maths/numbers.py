"""Fast conversion of number lists to tensors, hashes as random numbers, lookup of the first size that is large enough."""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

from turnwise.maths.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


def tensor_of(values: Sequence[float], dtype: torch.dtype) -> Tensor:
    """``torch.tensor`` for long lists of numbers in a tenth of the time: it inspects every element twice."""
    if not values:
        return torch.zeros(0, dtype=dtype)
    letter, kind = ("q", torch.int64) if dtype == torch.int64 else ("d", torch.float64)
    return torch.frombuffer(bytearray(struct.pack(f"{len(values)}{letter}", *values)), dtype=kind).to(dtype)


def first_at_least(sizes: Sequence[int], n: int) -> int:
    """The smallest of the ascending sizes that is at least n."""
    return sizes[bisect_left(sizes, n)]


def uniform_hash(x: Tensor) -> Tensor:
    """Hash integers to floats in [0, 1): two rounds of multiply and shift."""
    x = x & 0x7FFFFFFF
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0x7FFFFFFF
    return (x ^ (x >> 16)).double() / 2**31
