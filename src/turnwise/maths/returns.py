"""Discounted returns and GAE of ragged episodes by parallel scans: no loop over tokens or turns.

Legend: items [n] packed so that those of one episode are adjacent and in time order; ``last`` [n] marks each episode's end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnwise.maths.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


def backward_recurrence(b: Tensor, a: Tensor) -> Tensor:
    """xₜ = bₜ + aₜ xₜ₊₁ for all t at once; aₜ = 0 ends an episode.

    Doubling: after pass k each item has absorbed its next 2ᵏ − 1 successors, so log₂ n passes suffice. In float64:
    products of discounts lose digits otherwise."""
    x, carry = b.double(), a.double()
    shift = 1
    while shift < x.numel() and bool((carry != 0).any()):
        ahead = torch.nn.functional.pad(x[shift:], (0, shift))
        x = x + carry * ahead
        carry = carry * torch.nn.functional.pad(carry[shift:], (0, shift))
        shift *= 2
    return x.to(b.dtype)


def discounted(r: Tensor, gamma: float, last: Tensor) -> Tensor:
    """Gₜ = rₜ + γ Gₜ₊₁."""
    return backward_recurrence(r, gamma * (~last).double())


def gae(r: Tensor, v: Tensor, gamma: float, lam: float, last: Tensor) -> Tensor:
    """Generalised advantage estimation: δₜ = rₜ + γ vₜ₊₁ − vₜ and Aₜ = δₜ + γλ Aₜ₊₁; the value after an end is 0."""
    following = torch.where(last, 0.0, torch.nn.functional.pad(v[1:], (0, 1)))
    delta = r + gamma * following - v
    return backward_recurrence(delta, gamma * lam * (~last).double())
