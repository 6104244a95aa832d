"""Linear layers that read the same input, as one product; with low-rank adapters beside frozen weights where there are any.

    y = h Wᵀ + b + (h downᵀ) upᵀ

Adapters are applied as they are trained, not merged: in half precision a merged weight would lose every change smaller than the
spacing of its numbers. The adapters of all layers are two products as well: ``up`` is block-diagonal.

Legend: L rows, d inputs, n outputs, R ranks of all adapters. Knows weights; neither layers nor models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from turnwise.engines.adapters import Adapter, fuse_down, fuse_up
from turnwise.engines.kernels.fp8 import (
    Weight,
    input_gradient,
    linear,
    quantised_input,
    split_gradient,
    weight_gradient,
)


@dataclass(frozen=True, eq=False)
class Projection:
    """``parameters`` are what autograd differentiates by: the layers' weights, their biases, then ``down`` and ``up`` of each."""

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    adapters: tuple[Adapter | None, ...]
    fused: Weight  # [n, d] in the dtype of the product
    bias: Tensor | None
    down: Tensor | None  # [R, d]
    up: Tensor | None  # [n, R]

    @classmethod
    def of(
        cls,
        weights: tuple[Tensor, ...],
        biases: tuple[Tensor, ...],
        adapters: tuple[Adapter | None, ...],
        fused: Weight,
        dtype: torch.dtype,
    ) -> Projection:
        bias = None
        if biases:
            bias = (biases[0] if len(biases) == 1 else torch.cat(biases)).to(dtype)
        up = fuse_up(adapters, [len(w) for w in weights], dtype)
        return cls(weights, biases, adapters, fused, bias, fuse_down(adapters, dtype), up)

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        factors = [t for a in self.adapters if a is not None for t in (a.down, a.up)]
        return *self.weights, *self.biases, *factors

    def __call__(self, h: Tensor) -> tuple[Tensor, Tensor | None]:
        """h [L, d] -> y [L, n], and h downᵀ [L, R] for the backward pass."""
        y = linear(h, self.fused, self.bias)
        if self.down is None or self.up is None:
            return y, None
        inner = torch.mm(h, self.down.t())
        return y.addmm_(inner, self.up.t()), inner

    def d_input(self, dy: Tensor) -> tuple[Tensor, Tensor | None]:
        """The gradient of h, and dy up [L, R] for ``d_parameters``."""
        dh = input_gradient(dy, self.fused)
        if self.down is None or self.up is None:
            return dh, None
        d_inner = torch.mm(dy, self.up)
        return dh.addmm_(d_inner, self.down), d_inner

    def d_parameters(
        self,
        dy: Tensor,
        h: Tensor,
        inner: Tensor | None,
        d_inner: Tensor | None,
        like: Tensor,
        needed: Sequence[bool],
    ) -> list[Tensor | None]:
        """Gradients of ``parameters`` in the dtype of ``like``; None where ``needed`` is false."""
        n, b = len(self.weights), len(self.biases)
        grads: list[Tensor | None] = [None] * n
        if any(needed[:n]):
            grads = split_gradient(weight_gradient(dy, quantised_input(h, self.fused), like), self.weights, needed[:n])
        biases: list[Tensor | None] = [None] * b
        if any(needed[n : n + b]):
            biases = split_gradient(dy.sum(0, dtype=like.dtype), self.biases, needed[n : n + b])
        return [*grads, *biases, *self._d_factors(dy, h, inner, d_inner, like, needed[n + b :])]

    def _d_factors(
        self,
        dy: Tensor,
        h: Tensor,
        inner: Tensor | None,
        d_inner: Tensor | None,
        like: Tensor,
        needed: Sequence[bool],
    ) -> list[Tensor | None]:
        if inner is None or d_inner is None or not any(needed):
            return [None] * len(needed)
        d_down, d_up = weight_gradient(d_inner, h, like), weight_gradient(dy, inner, like)
        grads: list[Tensor | None] = []
        row = column = 0
        for weight, adapter in zip(self.weights, self.adapters):
            if adapter is not None:
                rank = adapter.down.shape[0]
                block = d_up[row : row + len(weight), column : column + rank]
                grads += [d_down[column : column + rank], block * adapter.scale]
                column += rank
            row += len(weight)
        return grads
