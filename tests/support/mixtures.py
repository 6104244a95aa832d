"""A small mixture of experts whose routers often have near ties, and dialogues sampled from it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from turnwise.core.batch import Batch, pack
from turnwise.core.records import Group, Sampling, Task, Trajectory, Turn
from turnwise.engines.generator.generator import LocalGenerator

TASK = Task("probe", 0)
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_mixture(seed: int = 0, **changes: object) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SHAPE, **changes})).eval()
        with torch.no_grad():
            for p in model.parameters():
                if p.dim() > 1:
                    p.mul_(4)
    return model


def make_generator(model: PreTrainedModel, **options: object) -> LocalGenerator:
    return LocalGenerator(model, **{"slots": 8, "context": 128, "stop_ids": (), **options})


def new_turn(context: list[int], done, all_routes: bool = False) -> Turn:
    """A turn as an episode records it."""
    size = len(done.routes) if all_routes else len(context) + len(done.tokens)
    return Turn(
        context=tuple(context),
        tokens=tuple(done.tokens),
        logp=tuple(done.logp),
        version=tuple(done.version),
        routes=tuple(done.routes[max(0, len(done.routes) - size) :]),
    )


def play(generator: LocalGenerator, dialogues: int = 5, turns: int = 2, size: int = 16) -> list[Trajectory]:
    """Dialogues with one prompt, so that rows share a prefix, and answers of different lengths."""

    async def one(n: int) -> Trajectory:
        session, taken = generator.open(n), []
        new = [3, 5, 7, 9, 11, 13, 15, 17, 19, 21]
        ids = new
        for _ in range(turns):
            done = await session.generate(ids, Sampling(max_tokens=size + n))
            taken.append(new_turn(new, done))
            new = [11, 12]
            ids = [*ids, *done.tokens, *new]
        session.close()
        return Trajectory(f"t{n}", TASK, tuple(taken), {})

    async def all_of_them() -> list[Trajectory]:
        return list(await asyncio.gather(*(one(n) for n in range(dialogues))))

    return asyncio.run(all_of_them())


def batch_of(trajectories: list[Trajectory]) -> Batch:
    return pack([Group("g", TASK, tuple(trajectories))])


def without_routes(batch: Batch) -> Batch:
    return replace(batch, sequences=replace(batch.sequences, routes=None))
