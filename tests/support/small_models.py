"""Small random models and ragged batches for the engine tests."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from turnwise.algebra.gradient import Scales
from turnwise.algebra.objective import Loss
from turnwise.core.batch import Batch, pack
from turnwise.core.levels import TOKEN
from turnwise.core.records import Group, Task, Trajectory, Turn
from turnwise.core.signals import Signal

VOCABULARY = 61
SPECIAL = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    **SPECIAL,
}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, **SPECIAL}

MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "llama_tied": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
    "mistral_window": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=5)),
}


def make_model(name: str = "llama", seed: int = 0) -> PreTrainedModel:
    """A tiny random model with weights large enough that its distribution is far from flat."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODELS[name]().eval()
        with torch.no_grad():
            for p in model.parameters():
                if p.dim() > 1:
                    p.mul_(4)
    return model


def make_batch(seed: int = 0, groups: int = 3, *, restarts: bool = True, temperature: float | None = None) -> Batch:
    """Ragged groups of multi-turn trajectories: empty turns, restarts, several temperatures, some truncation."""
    rng = random.Random(seed)
    ids = lambda low, high: [rng.randrange(VOCABULARY) for _ in range(rng.randint(low, high))]  # noqa: E731

    def turn(first: bool) -> Turn:
        restart = restarts and not first and rng.random() < 0.2
        tokens = ids(0, 6) if not first else ids(1, 6)
        return Turn(
            context=ids(1, 9),
            tokens=tokens,
            logp=[-rng.random() for _ in tokens],
            mass=[-0.1 * rng.random() for _ in tokens],
            reward=rng.random(),
            restart=restart,
            temperature=rng.choice([1.0, 0.7, 0.0]) if temperature is None else temperature,
        )

    def trajectory(name: str, task: Task) -> Trajectory:
        turns = tuple(turn(i == 0) for i in range(rng.randint(1, 4)))
        return Trajectory(name, task, turns, answer=tuple(ids(1, 3)))

    tasks = [Task("random", seed=g) for g in range(groups)]
    return pack(
        [Group(t.key, t, tuple(trajectory(f"{t.key}/{i}", t) for i in range(rng.randint(1, 4)))) for t in tasks]
    )


@dataclass(frozen=True)
class Linear:
    """A made-up objective: a fixed weighted sum of whichever signals it needs, weights taken from the column ``w``."""

    signals_with_gradient: frozenset[Signal] = frozenset({Signal.LOGP})
    signals_before_step: frozenset[Signal] = frozenset()

    def plan(self, batch):
        return batch

    def scales(self, batch, sides):
        return Scales()

    def __call__(self, batch, policy):
        assert set(policy) == self.signals_with_gradient
        loss = torch.stack([(batch["weight"] * f.map(lambda x: x + 0.1 * x**2)).x.sum() for f in policy.values()]).sum()
        stats = {"tokens": torch.tensor(float(batch.tree.count(TOKEN))), "mean_w": batch["weight"].x.sum()}
        return Loss(loss, lambda: stats, {})


def weighted(batch: Batch, seed: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
    w = torch.randn(batch.tree.count(TOKEN), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return batch.put(weight=batch.tree.field(TOKEN, w.to(dtype) / max(1, w.numel())))
