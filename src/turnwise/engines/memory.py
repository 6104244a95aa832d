"""How much memory a run takes on its device, from the shape of its model: weights, gradients, moments, KV cache, activations.

Activations are counted, as the hand-written layers keep them (c: bytes of the compute dtype, d width, a attention's width, m the
MLP's). For each id, of every layer: the residual stream before and after attention in float32 (8 d), attention's output (c a);
without ``recompute`` also q, k, v and gate, up (c (a + kv + 2 m)). Of one layer at a time, in the backward pass: the activation,
its gradient and that of gate and up (4 c m), with ``recompute`` gate and up again (6 c m). The head keeps probabilities and some
logits before that begins; CUDA graphs, which run without ``recompute``, hold the memory of both. Mixtures run the stock forward,
whose layers keep more (``tests/training/test_mixture_memory.py`` counts it); recomputed, their input alone. Where a step of a
mixture is one micro-batch, there are no gradients before its backward pass: they grow while the activations go.

The two shares of ``FRAGMENTS`` are fitted, and so is what they are shares of: what a GPU reserves beyond this sum, presumably in
free blocks that fit nothing (docs/large-models.md has the comparison). Knows no device and no setting of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from turnwise.engines.kernels.four_bit import BYTES_EACH
from turnwise.engines.learner import logprobs

MASTER = 4  # bytes of a trained weight, of its gradient, of each of Adam's two moments, and of the residual stream
FRAGMENTS = 0.25  # where layers are recomputed ...
CAPTURED_FRAGMENTS = 0.1  # ... and where CUDA graphs hold a step's memory in place
RECOMPUTE_FROM = 4096  # ids of a micro-batch below which recomputing layers costs less time than smaller batches
GIB = 1 << 30
HEAD_ON_CPU = (logprobs.KEEP_BYTES, logprobs.CHUNK_BYTES)
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class ModelShape:
    """What of a model decides its memory."""

    parameters: int
    layers: int
    hidden: int
    mlp: int  # width of the MLP, of all experts that one id passes
    kv: int  # numbers that one id keeps in the cache of a layer: keys and values
    embeddings: int = 0  # parameters of the embedding and of a head of its own
    attention: int = 0  # numbers of all query heads for one id; 0: the hidden width
    vocabulary: int = 0
    experts: int = 0  # of a layer, whose matrices are one parameter
    expert: int = 0  # width of one of them
    chosen: int = 0  # experts that one id passes

    @classmethod
    def of(cls, config: Any, parameters: int) -> ModelShape:
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        number = lambda *names: next((int(v) for n in names if (v := getattr(config, n, None))), 0)  # noqa: E731
        hidden, heads = number("hidden_size", "n_embd"), number("num_attention_heads", "n_head") or 1
        head = number("head_dim") or hidden // heads
        chosen = number("num_experts_per_tok", "num_experts_per_token") or 1
        experts = number(*EXPERT_COUNTS)
        expert = number("moe_intermediate_size", "intermediate_size") if experts else 0
        mlp = chosen * expert or number("intermediate_size", "n_inner") or 4 * hidden
        kv = 2 * head * (number("num_key_value_heads") or heads)
        tables = 1 if getattr(config, "tie_word_embeddings", False) else 2
        embeddings = min(parameters, tables * hidden * number("vocab_size"))
        return cls(
            parameters, number("num_hidden_layers", "n_layer"), hidden, mlp, kv, embeddings, attention=heads * head,
            vocabulary=number("vocab_size"), experts=experts, expert=expert, chosen=chosen if experts else 0,
        )  # fmt: skip

    def adapter_parameters(self, rank: int, experts: bool = True) -> int:
        """Roughly: two matrices of ``rank`` beside each product of a layer; for every expert, if ``experts`` have them, of twice
        that rank beside gate and up together."""
        mlp = 3 * (self.hidden + self.mlp)
        if self.experts:
            mlp = self.experts * (3 * self.hidden + 5 * self.expert) * experts
        return rank * self.layers * (4 * 2 * self.hidden + mlp)

    def packed(self) -> int:
        """Bytes of the frozen weights in 4 bits."""
        return int((self.parameters - self.embeddings) * BYTES_EACH)

    def dequantised(self, compute: int) -> int:
        """Of the largest weights that are whole at once: gate and up and their fused copy, or all experts of a layer."""
        return self.hidden * compute * max(4 * self.mlp, 3 * self.experts * self.expert)

    def activations(self, ids: int, bytes_each: int, recompute: bool) -> int:
        """Of one micro-batch, without its head."""
        return self.kept(ids, bytes_each, recompute) + self.of_one_layer(ids, bytes_each, recompute)

    def kept(self, ids: int, bytes_each: int, recompute: bool) -> int:
        """What all layers keep for the backward pass."""
        attention = self.attention or self.hidden
        if self.experts:
            return ids * self.layers * (MASTER * self.hidden if recompute else bytes_each * self._of_a_mixture)
        numbers = attention if recompute else 2 * attention + self.kv + 2 * self.mlp
        return ids * self.layers * (2 * MASTER * self.hidden + bytes_each * numbers)

    def of_one_layer(self, ids: int, bytes_each: int, recompute: bool) -> int:
        """What one layer at a time needs in the backward pass."""
        if self.experts:
            gradients = 4 * self.mlp + 4 * self.chosen * self.hidden
            return ids * bytes_each * (gradients + self._of_a_mixture * recompute)
        return ids * bytes_each * self.mlp * (6 if recompute else 4)

    @property
    def _of_a_mixture(self) -> int:
        """Numbers of the compute dtype that a layer of the stock forward keeps for each id: of its width, of attention's, and of
        each chosen expert the row before and after it, gate, up, activation and their product."""
        attention = self.attention or self.hidden
        return 12 * self.hidden + 9 * attention + 4 * self.mlp + 2 * self.chosen * self.hidden

    def head(self, ids: int, compute: int, trained: bool) -> int:
        """Probabilities that are kept if they are few, chunks of logits, and gradients of a trained head. Half of the ids are
        taken to be sampled."""
        keep, chunk = (logprobs.KEEP_BYTES_CUDA, logprobs.CHUNK_BYTES_CUDA) if compute < MASTER else HEAD_ON_CPU
        probabilities = ids // 2 * self.vocabulary * compute
        gradients = (2 * MASTER + compute) * self.vocabulary * self.hidden if trained and ids else 0
        return probabilities * (probabilities <= keep) + min(3 * chunk, 6 * probabilities) + gradients

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
    one_micro_batch: bool = False  # a step is no more than one
    ranks: int = 1
    one_memory: bool = False  # all ranks take from it, and gather the weights for a whole step

    def parts(self) -> dict[str, int]:
        """Bytes by name, in the order of a table."""
        s, each = self.shape, 1 / self.ranks if not self.one_memory else 1.0  # a rank's share
        trained = s.adapter_parameters(self.lora_rank, not self.four_bit) if self.lora_rank else s.parameters
        frozen = (s.embeddings if self.four_bit else s.parameters) if self.lora_rank else 0
        rounded = self.compute if self.compute < MASTER and not self.lora_rank else 0
        copies = self.ranks if self.one_memory else 1  # of what every rank does by itself
        of_all, layer = (of(self.ids, self.compute, self.recompute) for of in (s.kept, s.of_one_layer))
        head = s.head(self.ids, self.compute, not self.lora_rank)
        active = of_all + (max(layer, head) if self.recompute else layer + head)
        if s.experts and self.one_micro_batch and self.ranks == 1:
            active = max(layer, active - trained * MASTER)  # beside all gradients, or before there are any
        gathered = (
            self.ranks if self.one_memory and self.ranks > 1 else 0
        )  # ranks that gather all weights in this memory
        parts = {
            "weights": int(each * (trained * MASTER + frozen * self.compute)) + self._whole(trained * MASTER, frozen),
            "weights in compute precision": copies * s.parameters * rounded,
            "gradients": int(each * trained * MASTER) + gathered * trained * MASTER,
            "optimizer moments": 0 if self.offload else int(each * 2 * trained * MASTER),
            "generator's weights": (self.samplers - self.shared_weights) * s.parameters * self.rollout,
            "frozen models": int(each * self.models * s.parameters * (self.compute if self.lora_rank else MASTER)),
            "KV cache": self.samplers * s.cache(self.dialogues, self.context, self.rollout),
            "activations": copies * active,
        }
        moved = sum(parts[n] for n in ("weights", "weights in compute precision", "gradients", "optimizer moments"))
        share = FRAGMENTS if self.recompute else CAPTURED_FRAGMENTS
        return {**parts, "fragments": int(share * moved) if self.compute < MASTER else 0}

    def _whole(self, trained: int, frozen: int) -> int:
        """Bytes that ranks do not divide: packed matrices, with the one that is dequantised; what a step gathers, of which one
        memory also holds the copy that is published, and a GPU the embeddings and two layers."""
        s = self.shape
        packed = s.packed() + s.dequantised(self.compute) if self.four_bit else 0
        if self.ranks == 1:
            return packed
        loose = trained + frozen * self.compute
        if self.one_memory:
            return (self.ranks + 1) * (packed + loose)
        table = s.embeddings * (self.compute if self.lora_rank else MASTER)
        return packed + table + 2 * max(0, loose - table) // max(1, s.layers)

    @property
    def total(self) -> int:
        return sum(self.parts().values())

    @property
    def fixed(self) -> int:
        """Without activations and cache, which smaller settings reduce."""
        return replace(self, ids=0, dialogues=0).total

    def describe(self) -> str:
        """``5.1 GiB: weights 0.5, gradients 0.5, ...``"""
        return f"{self.total / GIB:.1f} GiB: " + describe_parts(self.parts())


def describe_parts(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size >= GIB // 20)
