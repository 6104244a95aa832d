"""What the tests of the local generator share: small models of several families, and a generator over one."""

from __future__ import annotations

from collections.abc import Callable

from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM, PreTrainedModel

from support.prompting import V, family, peaked
from turnwise.engines.generator.generator import LocalGenerator

Decode = Callable[[list[int]], str]
SHAPE = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
MAKERS: dict[str, Callable[[], PreTrainedModel]] = {
    **family(SHAPE),
    "window": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=6)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=V, n_embd=32, n_layer=2, n_head=4, n_positions=256, bos_token_id=None, eos_token_id=None)
    ),
}
STEPPED = {"llama", "llama3", "qwen2", "qwen3", "mistral"}  # those the hand-written decoder fits


def make(kind: str = "llama", seed: int = 0) -> PreTrainedModel:
    return peaked(MAKERS[kind], seed)


def generator(model: PreTrainedModel | None = None, decode: Decode | None = None, **options: object) -> LocalGenerator:
    options = {"slots": 4, "context": 128, "stop_ids": (), **options}
    return LocalGenerator(model or make(), decode, **options)  # type: ignore[arg-type]
