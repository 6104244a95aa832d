"""What tests of generators share: small models with peaked distributions, prompts, and ways to ask."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from turnwise.core.records import Completion, Sampling
from turnwise.engines.generator.generator import LocalGenerator

V = 64
Shape = Mapping[str, Any]
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def family(
    shape: Shape, wide: Shape | None = None, equal: Shape | None = None
) -> dict[str, Callable[[], PreTrainedModel]]:
    """Models the hand-written decoder fits. ``wide`` and ``equal``: other shapes for some of them."""
    wide, equal = wide or shape, {k: v for k, v in (equal or shape).items() if k != "head_dim"}
    return {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True)),
        "llama3": lambda: LlamaForCausalLM(LlamaConfig(**wide, attention_bias=True, rope_parameters=LLAMA3)),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**equal)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**shape)),
        "mistral": lambda: MistralForCausalLM(MistralConfig(**wide, sliding_window=None)),
    }


def peaked(maker: Callable[[], PreTrainedModel], seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = maker().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3.0 if p.dim() > 1 else 1.0).add_(0.02 * torch.randn_like(p))  # peaked; no zero bias, no unit norm
    return model


def prompts(n: int, low: int = 1, high: int = 20, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(V) for _ in range(rng.randint(low, high))] for _ in range(n)]


def ask(g: LocalGenerator, asked: list[list[int]], sampling: Sampling | list[Sampling], seeds: list[int] | None = None):
    """Every prompt in a session of its own, all at once."""
    settings = sampling if isinstance(sampling, list) else [sampling] * len(asked)

    async def main() -> list[Completion]:
        sessions = [g.open(s) for s in seeds or range(len(asked))]

        async def one(i: int) -> Completion:
            done = await sessions[i].generate(asked[i], settings[i])
            sessions[i].close()
            return done

        return list(await asyncio.gather(*map(one, range(len(asked)))))

    return asyncio.run(asyncio.wait_for(main(), 60))


def run(main: Awaitable[object]):
    async def limited():
        return await asyncio.wait_for(main, 60)

    return asyncio.run(limited())


def full_logp(model: PreTrainedModel, ids: list[int], done: Completion, temperature: float = 1.0) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([[*ids, *done.tokens]])).logits[0] / temperature
    at = torch.arange(len(ids) - 1, len(ids) - 1 + len(done.tokens))
    return logits.log_softmax(-1)[at, torch.tensor(done.tokens)]


def check_logp(model: PreTrainedModel, ids: list[int], done: Completion, atol: float = 1e-4) -> None:
    got = torch.tensor(done.logp, dtype=torch.float64)
    torch.testing.assert_close(got, full_logp(model, ids, done).double(), atol=atol, rtol=0)


async def dialogues(g: LocalGenerator, delay: random.Random | None, n: int = 9, turns: int = 3):
    sessions = [g.open(i) for i in range(n)]

    async def one(i: int) -> list[Completion]:
        rng, ids, out = random.Random(i), [1, 2, 3 + i], []
        for _ in range(turns):
            done = await sessions[i].generate(ids, Sampling(max_tokens=rng.randint(1, 25)))
            out.append(done)
            ids = [*ids, *done.tokens, *(rng.randrange(V) for _ in range(rng.randint(1, 6)))]
            if delay is not None and delay.random() < 0.7:
                await asyncio.sleep(delay.random() * 0.01)
        sessions[i].close()
        return out

    return list(await asyncio.gather(*map(one, range(n))))


def bits(out: list[list[Completion]]) -> list[object]:
    return [[(c.tokens, c.logp, c.mass, c.version, c.stop) for c in turns] for turns in out]
