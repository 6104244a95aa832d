"""A few tokens through all layers by one call: the products too are C kernels, over weights in panels that they read straight on.

OpenBLAS arranges both sides of a product anew each time, which pays for many rows; a decode step has few. Beside other libraries
(MKL, Accelerate) this was not measured, and is not used.

Knows weights and slots; neither requests nor sampling.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from turnwise.engines.kernels.cpu.build import library
from turnwise.engines.kernels.cpu.layers import at

WIDE = 16  # columns of a panel, as in kernels.c
FEW = 64  # rows up to which it is faster
MOST = 1 << 30  # bytes of the layers' weights, or of the head's, that may lie there a second time


@cache
def pays() -> bool:
    return "BLAS_INFO=open" in torch.__config__.show()


def fits(weights: Sequence[Tensor]) -> bool:
    """Whether products with these [in, out] weights can be computed so."""
    even = all(w.shape[1] % WIDE == 0 for w in weights)
    return even and pays() and sum(w.nbytes for w in weights) <= MOST


def panels(weight: Tensor) -> Tensor:
    """[in, out] -> [out / 16, in, 16]."""
    return weight.view(len(weight), -1, WIDE).transpose(0, 1).contiguous()


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [L, in] times panels -> [L, out]."""
    out = x.new_empty(len(x), len(weight) * WIDE)
    library()[0].product(at(x), at(weight), None, 0, at(out), len(x), x.shape[1], out.shape[1])  # type: ignore[union-attr]
    return out


class Layers:
    """The layers of a decoder, their products in panels, and its head where that fits."""

    def __init__(self, layers: Sequence[Any], head: Tensor) -> None:
        self.head = panels(head) if fits([head]) else None
        self.d, self.F = layers[0].down.shape[1], layers[0].down.shape[0]
        self.kept: list[Tensor] = []  # what the table points to
        table = [pointer for layer in layers for pointer in self._pointers(layer)]
        self.table = (ctypes.c_void_p * len(table))(*table)
        self.count = len(layers)

    def _pointers(self, layer: Any) -> list[int | None]:
        """In the order of the C struct."""
        qkv, out, gate_up, down = map(panels, (layer.qkv, layer.out, layer.gate_up, layer.down))
        every = (layer.norm, qkv, layer.qkv_bias, out, layer.out_bias, layer.mlp_norm, gate_up, down)
        self.kept += [t for t in every if t is not None]
        return [at(t) for t in every]

    def __call__(
        self, x: Tensor, slots: Any, cos: Tensor, sin: Tensor, row: Tensor, position: Tensor, heads: int, longest: int,
        scale: float, eps: float, last: bool,
    ) -> Tensor:  # fmt: skip
        """x [L, d] through all layers, in place; ``decoder.Decoder._through`` says what is computed."""
        keys = slots.keys[0]
        key_heads, width, size = keys.shape[1:]
        room = x.new_empty(len(x) * (self.d + (2 * heads + 2 * key_heads) * size + 3 * self.F))
        both = [(ctypes.c_void_p * self.count)(*(t.data_ptr() for t in every)) for every in (slots.keys, slots.values)]
        library()[0].through(  # type: ignore[union-attr]
            at(x), self.table, *both, at(cos), at(sin), at(row), at(position), at(room), len(x), self.count, last,
            self.d, self.F, heads, key_heads, size, width, longest, scale, eps,
        )  # fmt: skip
        return x
