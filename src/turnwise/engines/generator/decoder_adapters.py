"""Low-rank adapters of a decoder whose linear layers are fused: for each fused product one pair of factors, at fixed addresses.

A decode step adds (h down) up to the product of the frozen weight. Publishing a policy copies the factors alone, a hundredth of
the weights. Knows names and factors; neither graphs nor the KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from turnwise.engines.adapters import Adapter, fuse_down, fuse_up

PRODUCTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


@dataclass(frozen=True, eq=False)
class LowRankPair:
    down: Tensor  # [d, R]
    up: Tensor  # [R, n]


@dataclass
class DecoderAdapters:
    """The factors of every layer. ``queries`` and ``keys``: widths of q and of k and v."""

    queries: int
    keys: int
    layers: list[dict[str, LowRankPair]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(self.layers)

    def of(self, layer: int) -> Mapping[str, LowRankPair]:
        return self.layers[layer] if self.layers else {}

    def load(self, adapters: Mapping[str, Adapter], count: int, dtype: torch.dtype) -> bool:
        """Take over the adapters of ``count`` layers. True: into the tensors that are there; False: new ones were made."""
        new = [self._fused(adapters, number, dtype) for number in range(count)]
        shapes = lambda layers: [{name: p.up.shape for name, p in layer.items()} for layer in layers]  # noqa: E731
        if shapes(new) != shapes(self.layers or [{}] * count):
            self.layers = new
            return False
        for old, layer in zip(self.layers, new):
            for name, pair in layer.items():
                old[name].down.copy_(pair.down)
                old[name].up.copy_(pair.up)
        return True

    def _fused(self, adapters: Mapping[str, Adapter], number: int, dtype: torch.dtype) -> dict[str, LowRankPair]:
        out = {}
        for product, names in PRODUCTS.items():
            parts = [adapters.get(f"model.layers.{number}.{name}.weight") for name in names]
            sizes = [self.queries, self.keys, self.keys] if product == "qkv" else []
            known = [len(p.up) for p in parts if p is not None]
            sizes = sizes or [known[0] if known else 0] * len(parts)  # gate and up have the same size
            down, up = fuse_down(parts, dtype), fuse_up(parts, sizes, dtype)
            if down is not None and up is not None:
                out[product] = LowRankPair(down.t().contiguous(), up.t().contiguous())
        return out
