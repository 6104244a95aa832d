"""Runs of items that fit somewhere, as even as can be."""

from __future__ import annotations

from collections.abc import Sequence


def even_runs(order: Sequence[int], alone: Sequence[int], beside: Sequence[int], limit: int) -> list[list[int]]:
    """Runs of ``order`` of at most ``limit`` each (or one item), the first number of them for which even runs fit. The first item
    of a run costs what it does ``alone``, the others what they do ``beside`` the one before."""
    whole, wanted = sum(beside), max(1, -(-sum(beside) // limit))
    while True:
        parts: list[list[int]] = [[]]
        filled = done = 0
        for k in order:
            even = (whole - done) / max(1, wanted - len(parts) + 1)  # what each of the runs to come would hold
            if parts[-1] and (filled + beside[k] > limit or filled + beside[k] / 2 > even):
                parts.append([])
                done, filled = done + filled, 0
            filled += beside[k] if parts[-1] else alone[k]
            parts[-1].append(k)
        if len(parts) <= wanted or wanted >= len(order):
            return [part for part in parts if part]
        wanted = min(len(parts), wanted + 1)
