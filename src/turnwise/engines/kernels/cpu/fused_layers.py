"""A small batch through all decoder layers in one C call: the matrix products are C kernels too, over weights stored in panels.

OpenBLAS repacks both operands of every product, which pays for many rows; a decode step has few. ``benchmarks/cpu_products.py``
compares the two paths. Beside other libraries than OpenBLAS this one is disabled: with MKL on an x86-64 with AVX-512 (one thread,
CPU time of a decode step) it is 1.1 to 1.4 times faster up to 8 rows, equal at 16 and slower from 32 rows on, and a 135M
model with one row gains nothing. Accelerate was not measured.

Knows weights and the KV cache; neither requests nor sampling.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from turnwise.engines.kernels.cpu.attention import table_pointer
from turnwise.engines.kernels.cpu.build import library
from turnwise.engines.kernels.cpu.layers import pointer

PANEL_COLUMNS = 16  # as in kernels.c
MAX_ROWS = 64  # batch rows up to which it is faster
MAX_BYTES = 1 << 30  # of the layers' weights, or of the head's, that may be stored a second time


@cache
def enabled() -> bool:
    return "BLAS_INFO=open" in torch.__config__.show()


def fits(weights: Sequence[Tensor]) -> bool:
    """Whether products with these [in, out] weights can use panels."""
    divisible = all(w.shape[1] % PANEL_COLUMNS == 0 for w in weights)
    return divisible and enabled() and sum(w.nbytes for w in weights) <= MAX_BYTES


def to_panels(weight: Tensor) -> Tensor:
    """[in, out] -> [out / 16, in, 16]."""
    return weight.view(len(weight), -1, PANEL_COLUMNS).transpose(0, 1).contiguous()


def panel_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x [L, in] times panels -> [L, out]."""
    out = x.new_empty(len(x), len(weight) * PANEL_COLUMNS)
    sizes = (len(x), x.shape[1], out.shape[1])
    library()[0].panel_matmul(pointer(x), pointer(weight), None, 0, pointer(out), *sizes)  # type: ignore[union-attr]
    return out


class FusedLayers:
    """The layers of a decoder with their weights in panels, and its head where that fits."""

    def __init__(self, layers: Sequence[Any], head: Tensor) -> None:
        self.head = to_panels(head) if fits([head]) else None
        self.d, self.F = layers[0].down.shape[1], layers[0].down.shape[0]
        self.kept: list[Tensor] = []  # keeps the tensors alive that the table points to
        table = [address for layer in layers for address in self._pointers(layer)]
        self.table = (ctypes.c_void_p * len(table))(*table)
        self.count = len(layers)

    def _pointers(self, layer: Any) -> list[int | None]:
        """In the order of the C struct."""
        qkv, out, gate_up, down = map(to_panels, (layer.qkv, layer.out, layer.gate_up, layer.down))
        tensors = (layer.norm, qkv, layer.qkv_bias, out, layer.out_bias, layer.mlp_norm, gate_up, down)
        self.kept += [t for t in tensors if t is not None]
        return [pointer(t) for t in tensors]

    def __call__(
        self, x: Tensor, kv_cache: Any, cos: Tensor, sin: Tensor, row: Tensor, position: Tensor, heads: int, longest: int,
        scale: float, eps: float, last: bool,
    ) -> Tensor:  # fmt: skip
        """x [L, d] through all layers, in place; ``LlamaDecoder._forward_kernels`` says what is computed."""
        key_heads, width, size = kv_cache.keys[0].shape[1:]
        pages, per_row = table_pointer(kv_cache.table)
        workspace = x.new_empty(len(x) * (self.d + (2 * heads + 2 * key_heads) * size + 3 * self.F))
        caches = [
            (ctypes.c_void_p * self.count)(*(t.data_ptr() for t in tensors))
            for tensors in (kv_cache.keys, kv_cache.values)
        ]
        library()[0].forward_layers(  # type: ignore[union-attr]
            pointer(x), self.table, *caches, pointer(cos), pointer(sin), pointer(row), pointer(position), pages,
            pointer(workspace), len(x), self.count, last, self.d, self.F, heads, key_heads, size, width, per_row, longest,
            scale, eps,
        )  # fmt: skip
        return x
