"""Frozen matrices in 4 bits: NormalFloat4 in blocks of 64 numbers, whose scales are quantised again, by bitsandbytes.

A matrix is kept packed and dequantised for each product, forward and backward, so that only one at a time takes its full size.
Quantising is deterministic: the same weights give the same numbers.

The experts of a mixture are parameters [E, n, d]; packed, every implementation reads them as before. ``module.gate_up_proj``
dequantises. While the module runs it does so once, and the numbers are gone when it returns: autograd would keep them for the
backward pass, so hooks on saved tensors keep the place of each view instead, and dequantise the experts it covers when the
backward pass asks for it. Inside activation checkpointing nothing is kept anyway, and the hooks stay away: they would replace
those of the checkpoint. Experts have no adapters.

Knows linear layers and stacked experts; neither routers nor how experts are multiplied.

Legend: L rows, E experts, d inputs, n outputs. Matrices are [n, d], as ``nn.Linear`` stores them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from turnwise.engines import compat
from turnwise.errors import SettingError

BLOCK, KIND = 64, "nf4"
BYTES_EACH = 0.5 + 1 / BLOCK + 4 / (BLOCK * 256)  # of a number: its code, a byte for a block, a float for 256 blocks


def functional() -> Any:
    """bitsandbytes, or the reason why there is none."""
    try:
        import bitsandbytes.functional
    except ImportError as fault:
        raise SettingError(
            "dtype nf4 needs bitsandbytes: install `turnwise-rl[quantized]`, or write --dtype auto"
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
    embeddings and whatever else is no linear layer stay as they are; ``pack_experts`` packs the experts of a mixture."""
    layers = [(name, m) for name, m in module.named_modules() if type(m) is nn.Linear and not name.endswith("gate")]
    for name, layer in layers:
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, FourBitLinear(layer, dtype, device))
    return len(layers)


def packed_layers(module: nn.Module) -> dict[str, FourBitLinear]:
    """The packed layers of a module by name."""
    return {name: m for name, m in module.named_modules() if isinstance(m, FourBitLinear)}


# ------------------------------------------------------------------ the experts of a mixture


class FourBitStack(nn.Module):
    """Matrices [E, n, d], packed as one whose rows are experts, so that no block of scales holds numbers of two."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.shape = weight.shape
        rows = weight.detach().flatten(1)
        self.size = rows.shape[1]
        self.matrix = FourBitMatrix(nn.functional.pad(rows, (0, -self.size % BLOCK)))

    def dequantised(self, dtype: torch.dtype, first: int = 0, last: int | None = None) -> Tensor:
        """Experts ``first`` to before ``last``, [.., n, d]."""
        last = self.shape[0] if last is None else last
        rows = self.matrix.dequantised_rows(first, last, dtype)
        return rows[:, : self.size].contiguous().view(-1, *self.shape[1:])


@dataclass(frozen=True, eq=False)
class _Place:
    """A view of dequantised experts, in place of its numbers."""

    stack: FourBitStack
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def numbers(self) -> Tensor:
        end = self.offset + sum((n - 1) * step for n, step in zip(self.size, self.stride))
        first, last = self.offset // self.stack.size, end // self.stack.size + 1
        experts = self.stack.dequantised(self.dtype, first, last)
        return experts.as_strided(self.size, self.stride, self.offset - first * self.stack.size)


class FourBitExperts(nn.Module):
    """The part of a module with packed experts that is not its family's: see ``pack_experts``."""

    packed_experts: nn.ModuleDict
    _read: dict[str, Tensor]  # while the module runs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        keeping: AbstractContextManager[Any] = nullcontext()
        if torch.is_grad_enabled() and not compat.saved_tensors_are_hooked():
            keeping = saved_tensors_hooks(self._place_of, lambda x: x.numbers() if isinstance(x, _Place) else x)
        self._read = {}
        self._running = True
        try:
            with keeping:
                return super().__call__(*args, **kwargs)
        finally:
            self._read, self._running = {}, False

    def _dequantised(self, name: str) -> Tensor:
        if name in self._read:
            return self._read[name]
        stack: Any = self.packed_experts[name]
        kind = stack.matrix.packed.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
        weights: Tensor = stack.dequantised(dtype)
        if self._running:
            self._read[name] = weights
        return weights

    def _place_of(self, tensor: Tensor) -> Tensor | _Place:
        """What autograd keeps of a tensor: its place, if it is a view of dequantised experts."""
        for name, whole in self._read.items():
            if tensor.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():
                stack: Any = self.packed_experts[name]
                return _Place(stack, whole.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        return tensor

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _without_contents, (type(self).__mro__[2], tuple(self.packed_experts)), self.__dict__


_classes: dict[tuple[Any, ...], type[nn.Module]] = {}


def _packed_class(family: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The class of a family's experts whose parameters ``names`` are packed."""
    read = {name: property(partial(FourBitExperts._dequantised, name=name)) for name in names}
    return _classes.setdefault((family, names), type(f"FourBit{family.__name__}", (FourBitExperts, family), read))


def _without_contents(family: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    kind = _packed_class(family, names)
    made: nn.Module = kind.__new__(kind)
    return made


def pack_experts(module: nn.Module, dtype: torch.dtype, device: torch.device) -> int:
    """Pack the parameters [E, n, d] that hold the matrices of all experts of a module inside ``module``, one at a time, on
    ``device``; returns how many. Biases of experts stay as they are."""
    count = 0
    for m in list(module.modules()):
        parameters = {n: p for n, p in m.named_parameters(recurse=False) if p.dim() == 3}
        parameters = {n: p for n, p in parameters.items() if len(p) == getattr(m, "num_experts", None)}
        if not parameters:
            continue
        packed = nn.ModuleDict()
        for name, p in parameters.items():
            packed[name] = FourBitStack(p.detach().to(device=device, dtype=dtype))
            delattr(m, name)
        m.packed_experts, m._read, m._running = packed, {}, False  # type: ignore[assignment]
        m.__class__ = _packed_class(type(m), tuple(parameters))
        count += len(parameters)
    return count


def packed_experts(module: nn.Module) -> dict[str, FourBitStack]:
    """The packed experts of a module by the names of the parameters that they were."""
    stacks: dict[str, Any] = {
        f"{name}.{parameter}": stack
        for name, m in module.named_modules()
        if isinstance(m, FourBitExperts)
        for parameter, stack in m.packed_experts.items()
    }
    return stacks
