"""A layer's products, forward and backward, in the weights' own numbers or rounded to fp8.

Legend: L rows, d inputs, n outputs. Weights are [n, d], as linear layers keep them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from turnwise.engines.kernels.decode_reference import quantise, widened


@dataclass(frozen=True, eq=False)
class Rounded:
    """A weight in e4m3, a scale for each output, whose inputs are rounded likewise, a scale for each row: what a sampler's fp8
    products compute. e4m3 numbers are exact in half precision, so only the order of sums differs."""

    data: Tensor  # [n, d] e4m3 numbers in the products' dtype
    scale: Tensor  # [n, 1]

    @classmethod
    def of(cls, weight: Tensor) -> Rounded:
        data, scale = quantise(weight)
        return cls(data.to(weight.dtype), scale)

    def product(self, h: Tensor) -> Tensor:
        data, scale = quantise(h)
        a, b = data.to(h.dtype), self.data.t()
        out = torch.mm(a, b, out_dtype=torch.float32) if h.is_cuda and h.dtype != torch.float32 else torch.mm(a, b)
        return (out.float() * scale * self.scale.t()).to(h.dtype)

    def wide(self) -> Tensor:
        return widened(self.data, self.scale).to(self.data.dtype)


Weight = Tensor | Rounded


def product(h: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """h Wᵀ + b in the dtype of h."""
    if isinstance(weight, Rounded):
        return weight.product(h) if bias is None else weight.product(h) + bias
    return torch.mm(h, weight.t()) if bias is None else torch.addmm(bias, h, weight.t())


def back(d: Tensor, weight: Weight) -> Tensor:
    """d W: the gradient of a product's input. Rounding passes gradients through as they are."""
    return torch.mm(d, weight.wide() if isinstance(weight, Rounded) else weight)


def seen(h: Tensor, weight: Weight) -> Tensor:
    """What a product really multiplied."""
    return widened(*quantise(h)).to(h.dtype) if isinstance(weight, Rounded) else h


def weight_gradient(d: Tensor, h: Tensor, like: Tensor) -> Tensor:
    """dᵀ h, accumulated and returned in the dtype of the master weights."""
    if d.dtype == like.dtype:
        return torch.mm(d.t(), h)
    return torch.mm(d.t(), h, out_dtype=like.dtype) if d.is_cuda else torch.mm(d.t(), h).to(like.dtype)


def parts_of(grad: Tensor, weights: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
    """One gradient of a fused product, cut into those of its weights."""
    cut = grad.split([len(w) for w in weights])
    return [g if want else None for g, want in zip(cut, wanted)]
