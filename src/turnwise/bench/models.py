"""The models and sizes of the benchmarks. Weights are random, so nothing is fetched; speed does not depend on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

SMALL: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024, "tie_word_embeddings": True,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
SMOL: dict[str, Any] = {  # the architecture of SmolLM2-135M
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "max_position_embeddings": 8192, "rope_theta": 100000.0, "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


@dataclass(frozen=True)
class BenchSetup:
    """Model and workload sizes for one kind of machine."""

    device: str
    dtype: torch.dtype
    shape: dict[str, Any]
    batches: tuple[int, ...]  # batch sizes of generation
    prompt: int
    new: int
    learn: tuple[int, int]  # sequences, ids per sequence
    step: tuple[int, int, int]  # of a whole step: prompts, samples per prompt, new tokens
    repeats: int = 5

    def model(self) -> PreTrainedModel:
        return llama(self.shape)

    def model_on_device(self) -> Any:
        """The model on the device, in this setup's dtype."""
        return llama(self.shape).to(self.device).to(self.dtype)  # type: ignore[arg-type]

    @property
    def vocabulary(self) -> int:
        return int(self.shape["vocab_size"])


def setup_for(device: str = "auto", quick: bool = False) -> BenchSetup:
    """A small model on a CPU, one of 135 M parameters on a GPU. ``quick``: fewer repeats."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    repeats = 2 if quick else 5
    if device == "cpu":
        return BenchSetup(device, torch.float32, SMALL, (16, 256), 16, 32, (64, 64), (8, 8, 32), repeats)
    return BenchSetup(device, torch.bfloat16, SMOL, (16, 256), 128, 128, (64, 512), (64, 8, 256), repeats)


def llama(shape: dict[str, Any]) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**shape)).eval()


def small(kind: str = "llama") -> PreTrainedModel:
    """0.85 M parameters."""
    torch.manual_seed(0)
    return (Qwen3ForCausalLM(Qwen3Config(**SMALL)) if kind == "qwen3" else llama(SMALL)).eval()


def parameters(model: PreTrainedModel) -> int:
    return sum(p.numel() for p in model.parameters())
