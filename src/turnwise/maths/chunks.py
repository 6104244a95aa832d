"""Runs of items that fit somewhere, as even as can be; and what neighbours begin with alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def even_runs(order: Sequence[int], alone: Sequence[int], beside: Sequence[int], limit: int) -> list[list[int]]:
    """Runs of ``order`` of at most ``limit`` each (or one item): as many as there are if each is filled, then as even as that
    allows. The first item of a run costs what it does ``alone``, the others what they do ``beside`` another, never more."""
    full = _cut(order, alone, beside, limit, 1)
    even = _cut(order, alone, beside, limit, len(full))
    return even if len(even) <= len(full) else full


def _cut(order: Sequence[int], alone: Sequence[int], beside: Sequence[int], limit: int, wanted: int) -> list[list[int]]:
    """Each run ends when it is full, or holds its share of what is left for the rest of the ``wanted`` runs."""
    parts: list[list[int]] = []
    filled, rest = 0, sum(beside[k] for k in order)
    for k in order:
        share = (filled + rest) / max(1, wanted - len(parts) + 1)
        if not parts or filled + beside[k] > limit or filled + beside[k] / 2 > share:
            parts.append([])
            filled = 0
        filled += beside[k] if parts[-1] else alone[k]
        rest -= beside[k]
        parts[-1].append(k)
    return parts


def shared_beginnings(ids: Tensor, start: Tensor) -> Tensor:
    """Packed sequences, the last entry of ``start`` their end: with how many ids each begins as the one before it does, [S]."""
    numbers, ends, found = ids.numpy(), start.tolist(), [0]
    for a, b, c in zip(ends, ends[1:], ends[2:]):
        apart = numbers[a : a + min(b - a, c - b)] != numbers[b : b + min(b - a, c - b)]
        found.append(int(apart.argmax()) if apart.any() else len(apart))
    return torch.tensor(found[: len(ends) - 1])
