"""How much memory a run takes on its device, from the shape of its model: weights, gradients, moments, KV cache, activations.

Activations of a layer are counted as ``STORED_HIDDEN`` vectors of the hidden width and ``STORED_MLP`` of the MLP's width for each
id: what the hand-written layers keep for the backward pass, fitted to measured peaks (docs/scaling.md has the comparison). Knows
no device and no setting of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turnwise.engines.kernels.four_bit import BYTES_EACH

STORED_HIDDEN, STORED_MLP = 5.5, 3.0
RECOMPUTED_HIDDEN, RECOMPUTED_MLP = 2.0, 1.5  # the same where layers are recomputed
MASTER = 4  # bytes of a trained weight, of its gradient, and of each of Adam's two moments
RECOMPUTE_FROM = 4096  # ids of a micro-batch below which recomputing layers costs less time than smaller batches
GIB = 1 << 30


@dataclass(frozen=True)
class ModelShape:
    """What of a model decides its memory."""

    parameters: int
    layers: int
    hidden: int
    mlp: int  # width of the MLP, of all experts that one id passes
    kv: int  # numbers that one id keeps in the cache of a layer: keys and values
    embeddings: int = 0  # parameters of the embedding and of a head of its own

    @classmethod
    def of(cls, config: Any, parameters: int) -> ModelShape:
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        number = lambda *names: next((int(v) for n in names if (v := getattr(config, n, None))), 0)  # noqa: E731
        hidden, heads = number("hidden_size", "n_embd"), number("num_attention_heads", "n_head") or 1
        head = number("head_dim") or hidden // heads
        experts = number("num_experts_per_tok", "num_experts_per_token") or 1
        mlp = experts * number("moe_intermediate_size") or number("intermediate_size", "n_inner") or 4 * hidden
        kv = 2 * head * (number("num_key_value_heads") or heads)
        tables = 1 if getattr(config, "tie_word_embeddings", False) else 2
        embeddings = min(parameters, tables * hidden * number("vocab_size"))
        return cls(parameters, number("num_hidden_layers", "n_layer"), hidden, mlp, kv, embeddings)

    def adapter_parameters(self, rank: int) -> int:
        """Roughly: two matrices of ``rank`` beside each product of a layer."""
        widths = 4 * 2 * self.hidden + 3 * (self.hidden + self.mlp)
        return rank * self.layers * widths

    def packed(self, compute: int) -> int:
        """Bytes of the frozen weights in 4 bits, and of the largest product's weight while it is dequantised."""
        layers = int((self.parameters - self.embeddings) * BYTES_EACH)
        return layers + self.embeddings * compute + 2 * self.hidden * self.mlp * compute

    def activations(self, ids: int, bytes_each: int, recompute: bool) -> int:
        """Of one micro-batch."""
        hidden, mlp = (RECOMPUTED_HIDDEN, RECOMPUTED_MLP) if recompute else (STORED_HIDDEN, STORED_MLP)
        return int(ids * bytes_each * self.layers * (hidden * self.hidden + mlp * self.mlp))

    def cache(self, dialogues: int, context: int, bytes_each: int) -> int:
        return dialogues * context * self.layers * self.kv * bytes_each


@dataclass(frozen=True)
class MemoryPlan:
    """What a run keeps on its device. Sizes in bytes for each number."""

    shape: ModelShape
    ids: int  # of a micro-batch
    dialogues: int
    context: int
    compute: int = 2  # of an activation, and of a frozen weight beside adapters
    rollout: int = 2  # of a generator's weight and cached number
    lora_rank: int = 0
    recompute: bool = False
    offload: bool = False
    shared_weights: bool = False  # the generator reads the learner's weights
    four_bit: bool = False  # frozen weights of linear layers in 4 bits, beside adapters
    samplers: int = 1  # generators, each with its own KV cache: the policy's, and one for opponents or drafts
    models: int = 0  # frozen models of the same size beside the policy: reference, teacher

    def parts(self) -> dict[str, int]:
        """Bytes by name, in the order of a table."""
        s = self.shape
        trained = s.adapter_parameters(self.lora_rank) if self.lora_rank else s.parameters
        frozen = s.parameters * self.compute if self.lora_rank else 0
        frozen = s.packed(self.compute) if self.four_bit else frozen
        rounded = self.compute if self.compute < MASTER and not self.lora_rank else 0
        return {
            "weights": trained * MASTER + frozen,
            "weights in compute precision": s.parameters * rounded,
            "gradients": trained * MASTER,
            "optimizer moments": 0 if self.offload else 2 * trained * MASTER,
            "generator's weights": (self.samplers - self.shared_weights) * s.parameters * self.rollout,
            "frozen models": self.models * s.parameters * (self.compute if self.lora_rank else MASTER),
            "KV cache": self.samplers * s.cache(self.dialogues, self.context, self.rollout),
            "activations": s.activations(self.ids, self.compute, self.recompute),
        }

    @property
    def total(self) -> int:
        return sum(self.parts().values())

    @property
    def fixed(self) -> int:
        """Without activations and cache, which smaller settings reduce."""
        parts = self.parts()
        return self.total - parts["activations"] - parts["KV cache"]

    def describe(self) -> str:
        """``5.1 GiB: weights 0.5, gradients 0.5, ...``"""
        return f"{self.total / GIB:.1f} GiB: " + describe_parts(self.parts())


def describe_parts(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size >= GIB // 20)
