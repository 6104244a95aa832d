"""Frozen matrices in 4 bits: NormalFloat4 in blocks of 64 numbers, whose scales are quantised again, by bitsandbytes.

A matrix is kept packed and dequantised for each product, forward and backward, so that only one at a time takes its full size.
Quantising is deterministic: the same weights give the same numbers. Knows tensors; neither layers nor models.

Legend: L rows, d inputs, n outputs. Matrices are [n, d], as ``nn.Linear`` stores them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from turnwise.errors import SettingError

BLOCK, KIND = 64, "nf4"
BYTES_EACH = 0.5 + 1 / BLOCK + 4 / (BLOCK * 256)  # of a number: its code, a byte for a block, a float for 256 blocks


def functional() -> Any:
    """bitsandbytes, or the reason why there is none."""
    try:
        import bitsandbytes.functional
    except ImportError as fault:
        raise SettingError(
            "dtype nf4 needs bitsandbytes: install `turnwise[quantized]`, or write --dtype auto"
        ) from fault
    return bitsandbytes.functional


class FourBitMatrix(nn.Module):
    """A packed matrix. Its tensors are buffers, so that they follow the module to a device and into copies; a state dict leaves
    them out: they are made again from the frozen weights."""

    packed: Tensor
    scale: Tensor
    code: Tensor
    offset: Tensor
    scale_of_scale: Tensor
    scale_code: Tensor

    def __init__(self, weight: Tensor) -> None:
        """``weight`` [n, d]: in the dtype of the products, to which dequantised numbers are rounded."""
        super().__init__()
        packed, state = functional().quantize_4bit(
            weight.detach().contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type=KIND
        )
        self.shape, self.dtype = weight.shape, weight.dtype
        tensors = {
            "packed": packed, "scale": state.absmax, "code": state.code, "offset": state.offset,
            "scale_of_scale": state.state2.absmax, "scale_code": state.state2.code,
        }  # fmt: skip
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)
        self._scale_block: int = state.state2.blocksize

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The numbers [n, d], rounded to the dtype they were given in."""
        f, scales = functional(), self._scale_state()
        state = f.QuantState(
            self.scale, shape=self.shape, code=self.code, blocksize=BLOCK, quant_type=KIND, dtype=self.dtype,
            offset=self.offset, state2=scales,
        )  # fmt: skip
        return f.dequantize_4bit(self.packed, state).to(dtype)

    def dequantised_rows(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Rows ``first`` to before ``last`` of a matrix whose rows are whole blocks."""
        f, (_, d) = functional(), self.shape
        assert d % BLOCK == 0, self.shape
        scales = f.dequantize_blockwise(self.scale, self._scale_state()) + self.offset
        state = f.QuantState(
            scales[first * d // BLOCK : last * d // BLOCK].contiguous(), shape=torch.Size((last - first, d)), code=self.code,
            blocksize=BLOCK, quant_type=KIND, dtype=self.dtype,
        )  # fmt: skip
        return f.dequantize_4bit(self.packed[first * d // 2 : last * d // 2], state).to(dtype)

    def _scale_state(self) -> Any:
        return functional().QuantState(
            self.scale_of_scale, code=self.scale_code, blocksize=self._scale_block, dtype=torch.float32
        )


@dataclass(frozen=True, eq=False)
class FourBitWeight:
    """Matrices that read the same input, as the weight of one product."""

    parts: tuple[FourBitMatrix, ...]
    dtype: torch.dtype

    def dequantised(self) -> Tensor:
        parts = [part.dequantised(self.dtype) for part in self.parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class FrozenProduct(torch.autograd.Function):
    """x Wᵀ + b with a frozen matrix: keeps neither x nor W for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: FourBitMatrix, bias: Tensor | None) -> Tensor:
        ctx.matrix = matrix
        return nn.functional.linear(x, matrix.dequantised(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad @ ctx.matrix.dequantised(grad.dtype), None, None


class FourBitLinear(nn.Linear):
    """A frozen linear layer with a packed matrix. ``weight`` is dequantised whenever it is read."""

    def __init__(self, layer: nn.Linear, dtype: torch.dtype, device: torch.device) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.matrix = FourBitMatrix(layer.weight.detach().to(device=device, dtype=dtype))
        self.bias = layer.bias

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.matrix.dequantised(torch.float32)  # PEFT makes adapters in the dtype of the weight

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return FrozenProduct.apply(x, self.matrix, None if self.bias is None else self.bias.to(x.dtype))

    def sizes(self) -> Tensor:
        """Stands for the weight where only its number of outputs counts: [n, 0]."""
        return self.matrix.packed.new_empty(self.out_features, 0)


def quantise_linear_layers(module: nn.Module, dtype: torch.dtype, device: torch.device) -> int:
    """Replace the linear layers inside ``module`` by packed ones on ``device``, one at a time; returns how many. Routers,
    embeddings and whatever else is no linear layer stay as they are; ``four_bit_experts`` packs the experts of a mixture."""
    found = [(name, m) for name, m in module.named_modules() if type(m) is nn.Linear and not name.endswith("gate")]
    for name, layer in found:
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, FourBitLinear(layer, dtype, device))
    return len(found)


def packed_layers(module: nn.Module) -> dict[str, FourBitLinear]:
    """The packed layers of a module by name."""
    return {name: m for name, m in module.named_modules() if isinstance(m, FourBitLinear)}


__all__ = ["BYTES_EACH", "FourBitLinear", "FourBitWeight", "functional", "packed_layers", "quantise_linear_layers"]
