"""Bin packing of ordered items into evenly filled chunks, and shared prefixes of packed sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from turnwise.maths.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


def even_runs(order: Sequence[int], alone: Sequence[int], after: Sequence[int], limit: int) -> list[list[int]]:
    """Split ``order`` into chunks of cost at most ``limit`` (or one item): as few as greedy filling gives, then as even as that
    allows. The first item of a chunk costs ``alone[k]``, the others ``after[k]``, which is never more."""
    full = _split(order, alone, after, limit, 1)
    even = _split(order, alone, after, limit, len(full))
    return even if len(even) <= len(full) else full


def _split(order: Sequence[int], alone: Sequence[int], after: Sequence[int], limit: int, count: int) -> list[list[int]]:
    """A chunk ends when it is full, or holds its share of the cost that remains for the rest of ``count`` chunks."""
    parts: list[list[int]] = []
    filled, remaining = 0, sum(after[k] for k in order)
    for k in order:
        share = (filled + remaining) / max(1, count - len(parts) + 1)
        if not parts or filled + after[k] > limit or filled + after[k] / 2 > share:
            parts.append([])
            filled = 0
        filled += after[k] if parts[-1] else alone[k]
        remaining -= after[k]
        parts[-1].append(k)
    return parts


def shared_prefix_lengths(ids: Tensor, start: Tensor) -> Tensor:
    """How many leading ids each packed sequence shares with the one before it, [S]. The last entry of ``start`` is the total."""
    numbers, ends, lengths = ids.numpy(), start.tolist(), [0]
    for a, b, c in zip(ends, ends[1:], ends[2:]):
        differs = numbers[a : a + min(b - a, c - b)] != numbers[b : b + min(b - a, c - b)]
        lengths.append(int(differs.argmax()) if differs.any() else len(differs))
    return torch.tensor(lengths[: len(ends) - 1])
