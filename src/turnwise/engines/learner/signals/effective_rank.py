"""Effective rank of a trajectory's hidden states, and how it grows along the trajectory.

    ER(Z) = exp(−Σ pₖ ln(pₖ + ε)),  p = σ / (Σσ + ε),  σ the singular values of Z without its column means
    mⱼ = ER(Z[: j·stride + 1]),  dⱼ = mⱼ − mean(m₁ … mⱼ₋₁),  velocity = mean dⱼ,  acceleration = mean (dⱼ − dⱼ₋₁)

Legend: K trajectories, T states of the longest, D hidden size, J prefixes.

Singular values are square roots of the eigenvalues of ZZᵀ or ZᵀZ, whichever is smaller, for all trajectories at once.
Knows hidden states; does not know what a rank is for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnwise.core.levels import TOKEN, TRAJECTORY, Field, Tree
from turnwise.core.signals import Signal

STRIDE = 40
LONGEST = 512  # a longer trajectory counts with its last states
EPS = 1e-8
CHUNK = 1 << 26  # elements in the matrices of one call


def effective_rank_signals(
    tree: Tree, hidden: Tensor, stride: int = STRIDE, longest: int = LONGEST
) -> dict[Signal, Field]:
    """``hidden`` [N, D]: one state per token. A trajectory without tokens has rank 0; the mean of an empty set is 0."""
    z, length = _padded_states(tree, hidden, longest)
    whole = torch.where(length > 0, effective_rank(z, length), 0.0)
    sizes = range(stride + 1, int(length.max()) + 1 if length.numel() else 0, stride)
    m = z.new_zeros(z.shape[0], len(sizes))
    for j, n in enumerate(sizes):  # at most a dozen prefixes
        long = (length >= n).nonzero().squeeze(1)
        m[long, j] = effective_rank(z[long, :n], torch.full_like(long, n))
    values = (whole, *_growth(m, (length - 1).clamp(min=0) // stride))
    names = (Signal.EFFECTIVE_RANK, Signal.EFFECTIVE_RANK_VELOCITY, Signal.EFFECTIVE_RANK_ACCELERATION)
    return {name: Field(tree, TRAJECTORY, x) for name, x in zip(names, values)}


def _padded_states(tree: Tree, hidden: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """The states [K, T, D] in float64, right-padded with zeros, and the lengths [K]."""
    owner, index = tree.ancestor(TOKEN, TRAJECTORY), tree.index(TOKEN, TRAJECTORY).x
    size = tree.size(TOKEN, TRAJECTORY).x
    index = index - (size - longest).clamp(min=0)[owner]
    length = size.clamp(max=longest)
    z = hidden.new_zeros(size.numel(), int(length.max()) if length.numel() else 0, hidden.shape[1], dtype=torch.float64)
    last = index >= 0  # of a longer trajectory, its last states
    z[owner[last], index[last]] = hidden[last].double()
    return z, length


def effective_rank(z: Tensor, length: Tensor) -> Tensor:
    """``z`` [K, T, D], zero after each ``length`` [K] -> [K]."""
    real = torch.arange(z.shape[1], device=z.device) < length[:, None]
    z = (z - (z.sum(1) / length.clamp(min=1)[:, None])[:, None]) * real[:, :, None]
    z = z.mT if z.shape[1] > z.shape[2] else z
    size = max(1, CHUNK // max(1, z.shape[1] * z.shape[1]))
    gram = [torch.linalg.eigvalsh(part @ part.mT) for part in z.split(size)] if z.numel() else []
    squares = torch.cat(gram) if gram else z.new_zeros(z.shape[0], 1)
    noise = squares.amax(1, keepdim=True) * squares.shape[1] * torch.finfo(squares.dtype).eps
    sigma = torch.where(squares > noise, squares, 0.0).sqrt()  # an eigenvalue of 0 comes out as rounding noise
    p = sigma / (sigma.sum(1, keepdim=True) + EPS)
    return (-(p * (p + EPS).log()).sum(1)).exp()


def _growth(m: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Velocity and acceleration [K] of the ranks ``m`` [K, J], of which the first ``count`` exist."""
    if m.shape[1] < 2:
        return m.new_zeros(m.shape[0]), m.new_zeros(m.shape[0])
    number = torch.arange(m.shape[1], device=m.device)
    d = m - torch.nn.functional.pad(m.cumsum(1), (1, -1)) / number.clamp(min=1)
    d = torch.where((number > 0) & (number < count[:, None]), d, 0.0)
    velocity = d.sum(1) / (count - 1).clamp(min=1)
    last = d.gather(1, (count - 1).clamp(min=0)[:, None]).squeeze(1)
    mean_change = (last - d[:, 1]) / (count - 2).clamp(min=1)  # the sum of differences telescopes
    return velocity, torch.where(count > 2, mean_change, 0.0)
