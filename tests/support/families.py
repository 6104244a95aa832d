"""Tiny random models of every family of causal LMs that Turnwise is tested with."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GQA = {**BASE, "num_key_value_heads": 2}
HEAD = {**GQA, "head_dim": 8}
GPT = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {**GQA, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
FAMILIES: dict[
    str, Any
] = {  # name: settings, where the classes are NAMEConfig and NAMEForCausalLM; else both classes and settings
    "Llama": GQA,
    "Mistral": {**HEAD, "sliding_window": 6},
    "Qwen2": GQA,
    "Qwen3": HEAD,
    "Phi": BASE,
    "Phi3": GQA,
    "Gemma": HEAD,
    "Gemma2": HEAD,
    "Gemma3Text": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {**HEAD, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "GPT2": ("GPT2Config", "GPT2LMHeadModel", GPT),
    "GPTNeo": {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 6,
        "max_position_embeddings": 128,
    },
    "GPTNeoX": BASE,
    "GPTJ": {**GPT, "rotary_dim": 4},
    "GPTBigCode": GPT,
    "CodeGen": {**GPT, "rotary_dim": 4},
    "OPT": {
        "vocab_size": 64,
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "word_embed_proj_dim": 32,
    },
    "Bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "Falcon": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "FalconAlibi": (
        "FalconConfig",
        "FalconForCausalLM",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
    ),
    "Mpt": {"vocab_size": 64, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "StableLm": GQA,
    "Cohere": {**GQA, "logit_scale": 0.0625},
    "Cohere2": {**HEAD, "sliding_window": 6},
    "Granite": {**GQA, "logits_scaling": 8.0},
    "GraniteMoe": MOE,
    "Olmo": GQA,
    "Olmo2": GQA,
    "Olmo3": GQA,
    "Olmoe": MOE,
    "Starcoder2": GQA,
    "Mixtral": {**GQA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": {**MOE, "shared_expert_intermediate_size": 16},
    "Qwen3Moe": {**MOE, "head_dim": 8},
    "GptOss": {**HEAD, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    "DeepseekV2": {
        **MLA,
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "num_key_value_heads": 4,
    },
    "DeepseekV3": {
        **MLA,
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "num_key_value_heads": 4,
    },
    "Glm": HEAD,
    "Glm4": HEAD,
    "Nemotron": HEAD,
    "Persimmon": BASE,
    "SmolLM3": GQA,
    "Exaone4": HEAD,
    "HunYuanDenseV1": HEAD,
    "Ernie4_5": HEAD,
    "Seed": ("SeedOssConfig", "SeedOssForCausalLM", HEAD),
    "Arcee": GQA,
    "Apertus": GQA,
    "Helium": HEAD,
    "XGLM": {
        "vocab_size": 64,
        "d_model": 32,
        "ffn_dim": 48,
        "num_layers": 2,
        "attention_heads": 4,
        "max_position_embeddings": 128,
    },
    "BioGpt": BASE,
    "Dbrx": {
        "vocab_size": 64,
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 128,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "Mamba": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "Mamba2": {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 8,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "FalconMamba": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "Rwkv": {
        "vocab_size": 64,
        "hidden_size": 32,
        "attention_hidden_size": 32,
        "num_hidden_layers": 2,
        "context_length": 128,
    },
    "Jamba": {
        **GQA,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "Bamba": {
        **GQA,
        "attn_layer_indices": [1],
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
    },
    "RecurrentGemma": {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "lru_width": 32,
        "attention_window_size": 16,
        "num_key_value_heads": 1,
        "head_dim": 8,
    },
    "Qwen3Next": {
        **MOE,
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "shared_expert_intermediate_size": 16,
    },
    "Lfm2": {**GQA, "layer_types": ["conv", "full_attention"]},
    "MiniMax": {
        **HEAD,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "block_size": 8,
    },
    "Llama4Text": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            **HEAD,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 6,
            "layer_types": ["chunked_attention", "full_attention"],
            "moe_layers": [1],
        },
    ),
    "Doge": GQA,
    "Bert": ("BertConfig", "BertLMHeadModel", BASE),
}


def make_family(name: str) -> PreTrainedModel:
    """A random model whose weights are large enough that every part of its attention matters."""
    entry = FAMILIES[name]
    config, model, settings = entry if isinstance(entry, tuple) else (f"{name}Config", f"{name}ForCausalLM", entry)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        built = getattr(transformers, model)(getattr(transformers, config)(**settings)).eval()
        with torch.no_grad():
            for module in built.modules():
                if isinstance(module, nn.Linear | nn.Embedding):
                    module.weight.mul_(4)
    return built
