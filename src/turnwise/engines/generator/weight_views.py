"""Where each weight of a model lies in a decoder that keeps them fused and turned: a published one goes there by one copy.

Knows names and views; neither what is computed with them nor who publishes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

Place = tuple[str, Tensor]
"""A weight's name, and a view of its shape (or one it can be spread over) of the tensor that holds it."""


def outside(embedding: Tensor, norm: Tensor, head: Tensor) -> Iterator[Place]:
    yield from (("model.embed_tokens.weight", embedding), ("model.norm.weight", norm), ("lm_head.weight", head.t()))


def inside(number: int, layer: Any, heads: int, key_heads: int, size: int) -> Iterator[Place]:
    """Of the ``number``-th layer. Not every model has all of them."""
    a, parts = "self_attn", [heads * size, key_heads * size, key_heads * size]
    found = {"input_layernorm.weight": layer.norm, "post_attention_layernorm.weight": layer.mlp_norm}
    found |= zip((f"{a}.{x}_proj.weight" for x in "qkv"), layer.qkv.t().split(parts))
    found |= zip(("mlp.gate_proj.weight", "mlp.up_proj.weight"), layer.gate_up.t().chunk(2))
    found |= {f"{a}.o_proj.weight": layer.out.t(), "mlp.down_proj.weight": layer.down.t()}
    if layer.qkv_bias is not None:
        found |= zip((f"{a}.{x}_proj.bias" for x in "qkv"), layer.qkv_bias.split(parts))
    if layer.out_bias is not None:
        found[f"{a}.o_proj.bias"] = layer.out_bias
    if layer.qk_norm is not None:
        found |= zip((f"{a}.q_norm.weight", f"{a}.k_norm.weight"), layer.qk_norm.split([heads, key_heads]))
    yield from ((f"model.layers.{number}.{name}", view) for name, view in found.items())
