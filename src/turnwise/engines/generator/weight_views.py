"""Views of a decoder's fused, transposed weights by the model's parameter names: one copy loads a published parameter.

Knows names and views; neither what is computed with the weights nor who publishes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

WeightView = tuple[str, Tensor]
"""A parameter's name, and a view of the tensor that holds it, of its shape or one that it broadcasts to."""


def model_views(embedding: Tensor, norm: Tensor, head: Tensor) -> Iterator[WeightView]:
    """The parameters outside the layers."""
    yield from (("model.embed_tokens.weight", embedding), ("model.norm.weight", norm), ("lm_head.weight", head.t()))


def layer_views(number: int, layer: Any, heads: int, key_heads: int, size: int) -> Iterator[WeightView]:
    """The parameters of the ``number``-th layer. Not every model has all of them."""
    a, parts = "self_attn", [heads * size, key_heads * size, key_heads * size]
    views = {"input_layernorm.weight": layer.norm, "post_attention_layernorm.weight": layer.mlp_norm}
    views |= zip((f"{a}.{x}_proj.weight" for x in "qkv"), layer.qkv.t().split(parts))
    views |= zip(("mlp.gate_proj.weight", "mlp.up_proj.weight"), layer.gate_up.t().chunk(2))
    views |= {f"{a}.o_proj.weight": layer.out.t(), "mlp.down_proj.weight": layer.down.t()}
    if layer.qkv_bias is not None:
        views |= zip((f"{a}.{x}_proj.bias" for x in "qkv"), layer.qkv_bias.split(parts))
    if layer.out_bias is not None:
        views[f"{a}.o_proj.bias"] = layer.out_bias
    if layer.qk_norm is not None:
        views |= zip((f"{a}.q_norm.weight", f"{a}.k_norm.weight"), layer.qk_norm.split([heads, key_heads]))
    yield from ((f"model.layers.{number}.{name}", view) for name, view in views.items())
