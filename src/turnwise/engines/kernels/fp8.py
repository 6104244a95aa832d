"""A learner's linear layers, forward and backward, in the weights' own dtype, rounded to fp8 or dequantised from 4 bits.

Legend: L rows, d inputs, n outputs. Weights are [n, d], as ``nn.Linear`` stores them. Knows weights; no layers or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from turnwise.engines.kernels.four_bit import FourBitWeight
from turnwise.engines.kernels.reference import dequantise, quantise


@dataclass(frozen=True, eq=False)
class EmulatedFp8Weight:
    """A weight in e4m3 with a scale per output, multiplied by inputs rounded to e4m3 with a scale per row: emulates the
    generator's fp8 products. e4m3 numbers are exact in half precision, so only the order of sums differs."""

    data: Tensor  # [n, d] e4m3 numbers in the dtype of the products
    scale: Tensor  # [n, 1]

    @classmethod
    def of(cls, weight: Tensor) -> EmulatedFp8Weight:
        data, scale = quantise(weight)
        return cls(data.to(weight.dtype), scale)

    def matmul(self, h: Tensor) -> Tensor:
        data, scale = quantise(h)
        a, b = data.to(h.dtype), self.data.t()
        out = torch.mm(a, b, out_dtype=torch.float32) if h.is_cuda and h.dtype != torch.float32 else torch.mm(a, b)
        return (out.float() * scale * self.scale.t()).to(h.dtype)

    def dequantised(self) -> Tensor:
        return dequantise(self.data, self.scale).to(self.data.dtype)


Weight = Tensor | EmulatedFp8Weight | FourBitWeight


def linear(h: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """h Wᵀ + b in the dtype of h."""
    if isinstance(weight, EmulatedFp8Weight):
        return weight.matmul(h) if bias is None else weight.matmul(h) + bias
    weight = weight.dequantised() if isinstance(weight, FourBitWeight) else weight
    return torch.mm(h, weight.t()) if bias is None else torch.addmm(bias, h, weight.t())


def input_gradient(d: Tensor, weight: Weight) -> Tensor:
    """d W: the gradient of the input. Rounding is treated as the identity (straight-through)."""
    return torch.mm(d, weight if isinstance(weight, Tensor) else weight.dequantised())


def quantised_input(h: Tensor, weight: Weight) -> Tensor:
    """The input as the product uses it: rounded to fp8 if the weight is."""
    return dequantise(*quantise(h)).to(h.dtype) if isinstance(weight, EmulatedFp8Weight) else h


def weight_gradient(d: Tensor, h: Tensor, like: Tensor) -> Tensor:
    """dᵀ h, accumulated and returned in the dtype of the master weights."""
    if d.dtype == like.dtype:
        return torch.mm(d.t(), h)
    # only a GPU accumulates half-precision products into a float32 result
    return torch.mm(d.t(), h, out_dtype=like.dtype) if d.is_cuda else torch.mm(d.t(), h).to(like.dtype)


def split_gradient(grad: Tensor, weights: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor | None]:
    """Split the gradient of a fused weight into those of its parts; None for parts that need none."""
    parts = grad.split([len(w) for w in weights])
    return [g if need else None for g, need in zip(parts, needed)]
