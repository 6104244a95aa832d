"""A mixture of experts on one GPU: sampling with the stock forward and with CUDA graphs, and a step of the learner.

    python benchmarks/mixtures.py [--shape tiny 3b 30b] [--rows 64 256] [--prompt 128] [--new 128] [--parts ...]

Random weights of the shape of a Qwen3 MoE. The limit of a decode step is reading, at the measured copy bandwidth, the experts
that its rows chose (counted from the recorded routes), the other weights and all keys and values once. ``implementations`` times
a decode step with the experts by each implementation. ``learner`` replays the routes of what was sampled, takes three steps with
the experts in the compute dtype and three as Transformers computes them, and compares the peak with the memory estimate.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from collections import deque
from typing import Any

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from turnwise import recipes
from turnwise.bench.hardware_limits import copy_bandwidth, synchronize
from turnwise.core.batch import Batch, pack
from turnwise.core.records import Completion, Group, Sampling, Task, Trajectory, Turn
from turnwise.core.signals import Signal
from turnwise.engines.experts import BATCHED, COMPUTE_DTYPE, EAGER, GROUPED, expert_modules, use
from turnwise.engines.generator.generator import LocalGenerator
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.engines.memory import GIB, MemoryPlan, ModelShape

PARTS = ("stock", "graphs", "implementations", "learner")
COMMON = {"head_dim": 128, "norm_topk_prob": True, "max_position_embeddings": 4096, "tie_word_embeddings": False}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 16, "num_experts_per_tok": 4, "head_dim": 16,
    },
    "3b": {
        "vocab_size": 32768, "hidden_size": 1536, "intermediate_size": 4096, "moe_intermediate_size": 384,
        "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 4, "num_experts": 64,
        "num_experts_per_tok": 8,
    },
    "30b": {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
        "num_experts_per_tok": 8,
    },
}  # fmt: skip
STOCK_TOKENS = 24  # sampled by each row where the host waits: enough for a rate


def make(shape: str, device: str) -> Any:
    """A model with random weights in bfloat16, made on the device."""
    torch.manual_seed(0)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**COMMON, **SHAPES[shape]}))
    finally:
        torch.set_default_dtype(previous)
    return model.eval()


def free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def sample(
    generator: LocalGenerator, prompts: list[list[int]], new: int, device: str
) -> tuple[float, list[Completion]]:
    """Seconds, and what was sampled after each prompt."""

    async def one(n: int, prompt: list[int]) -> Completion:
        session = generator.open(n)
        done = await session.generate(prompt, Sampling(max_tokens=new))
        session.close()
        return done

    async def all_of_them() -> list[Completion]:
        return list(await asyncio.gather(*(one(n, prompt) for n, prompt in enumerate(prompts))))

    synchronize(device)
    began = time.perf_counter()
    done = asyncio.run(all_of_them())
    synchronize(device)
    return time.perf_counter() - began, done


def prompts_of(rows: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (rows, length), generator=rng).tolist()


def step_bytes(model: Any, done: list[Completion], prompt: int) -> tuple[float, float]:
    """Bytes that a decode step must read, and experts of a layer that its rows chose, both in the mean over steps."""
    config, k = model.config, model.config.num_experts_per_tok
    routes = np.stack([np.frombuffer(b"".join(c.routes), "<i2").reshape(len(c.routes), -1, k) for c in done])
    steps = routes[:, prompt:]  # [rows, steps, routers, k]
    distinct = [len(np.unique(steps[:, t, r])) for t in range(steps.shape[1]) for r in range(steps.shape[2])]
    modules, layers = expert_modules(model), config.num_hidden_layers
    each = sum(p.nbytes for p in modules[0].parameters()) / modules[0].num_experts
    experts = sum(p.nbytes for m in modules for p in m.parameters())
    other = sum(p.nbytes for p in model.parameters()) - experts - model.get_input_embeddings().weight.nbytes
    length = prompt + steps.shape[1] / 2
    kv = len(done) * length * layers * 2 * config.num_key_value_heads * config.head_dim * 2
    return float(np.mean(distinct)) * each * layers + other + kv, float(np.mean(distinct))


def generation(model: Any, options: argparse.Namespace, device: str, bandwidth: float) -> tuple[list[Any], list[Any]]:
    """Print what sampling reaches; return the prompts and completions of the first number of rows."""
    vocabulary, kept = model.config.vocab_size, ([], [])
    common = {"slots": max(options.rows), "context": options.prompt + options.new + 8, "stop_ids": (), "device": device}
    if "stock" in options.parts:
        generator = LocalGenerator(model, **common, dtype=torch.bfloat16, fast=False, share_weights=True)
        for implementation in (EAGER, GROUPED):
            use(generator.model_runner.model, implementation)
            for rows in options.rows[:1]:
                sample(generator, prompts_of(rows, options.prompt, vocabulary, 0), 2, device)
                seconds, _ = sample(generator, prompts_of(rows, options.prompt, vocabulary, 1), STOCK_TOKENS, device)
                rate = rows * STOCK_TOKENS / seconds
                print(f"stock forward, experts by {implementation}, {rows} rows x {STOCK_TOKENS}: {rate:,.0f} tokens/s")
        del generator
        free(device)
    began = time.perf_counter()
    generator = LocalGenerator(model, **common, dtype=torch.bfloat16, share_weights=True)
    print(f"made in {time.perf_counter() - began:.1f} s: {generator.describe()}")
    graphs = generator.model_runner.graphs
    for rows in options.rows if "graphs" in options.parts else ():
        for seed in (0, 1):  # the first captures decoding, the second prefill
            sample(generator, prompts_of(rows, options.prompt, vocabulary, seed), 8, device)
        few, _ = sample(generator, prompts_of(rows, options.prompt, vocabulary, 2), 8, device)
        prompts = prompts_of(rows, options.prompt, vocabulary, 3)
        seconds, done = sample(generator, prompts, options.new, device)
        step = (seconds - few) / max(1, options.new - 8)
        reads, experts = step_bytes(model, done, options.prompt)
        captured = graphs is not None and bool(graphs.decode_graphs) and not graphs.capture_errors and device == "cuda"
        print(
            f"ours, {rows} rows x {options.prompt} + {options.new}: {rows * options.new / seconds:,.0f} tokens/s with prefill; "
            f"a decode step {1e3 * step:.2f} ms = {rows / step:,.0f} tokens/s; {experts:.1f} experts of a layer chosen, "
            f"{reads / GIB:.2f} GiB: {100 * reads / bandwidth / step:.0f} % of {bandwidth / 1e12:.2f} TB/s; "
            f"graphs captured: {captured}"
        )
        kept = kept if kept[0] else (prompts, done)
    if graphs is not None and "implementations" in options.parts:
        implementations(graphs, options, device)
    return kept


def implementations(decoder: Any, options: argparse.Namespace, device: str) -> None:
    """Print the time of a decode step by each implementation, by rows."""
    every, steps = decoder.experts, 32
    for rows in [n for n in (1, 4, 16, 64, 256) if n <= max(options.rows)]:
        texts = []
        for name in (GROUPED, BATCHED):
            if name not in every.proven or (name == BATCHED and rows > 16):
                continue
            decoder.experts = every.only(name)
            decoder._forget_graphs()
            inputs = ([0] * rows, [options.prompt] * rows, list(range(rows)), [1.0] * rows)
            with torch.inference_mode():
                deque(decoder.decode_steps(steps, *inputs), 0)
                synchronize(device)
                began = time.perf_counter()
                deque(decoder.decode_steps(steps, *inputs), 0)
                synchronize(device)
            texts.append(f"{name} {1e3 * (time.perf_counter() - began) / steps:.2f} ms")
        print(f"a decode step of {rows} rows: {', '.join(texts)}; the rule takes {every.for_rows(rows)}")
    decoder.experts = every
    decoder._forget_graphs()


def batch_of(prompts: list[list[int]], done: list[Completion]) -> Batch:
    task = Task("bench", 0)
    turns = [
        Turn(tuple(p), tuple(c.tokens), tuple(c.logp), reward=float(n % 2), routes=tuple(c.routes))
        for n, (p, c) in enumerate(zip(prompts, done))
    ]
    return pack([Group("g", task, tuple(Trajectory(f"t{n}", task, (turn,)) for n, turn in enumerate(turns)))])


def learning(model: Any, batch: Batch, device: str) -> None:
    settings = LearnerSettings(dtype="bfloat16", positions=16384)
    parameters = sum(p.numel() for p in model.parameters())
    learner = LocalLearner(model, settings, device=device)
    print(f"learner: {learner.describe()}; experts by {model.config._experts_implementation}")
    objective = recipes.build("grpo", beta=0.0).objective
    ids = min(settings.positions, batch.sequences.ids.numel())
    one = batch.sequences.ids.numel() <= settings.positions
    plan = MemoryPlan(ModelShape.of(model.config, parameters), ids, 0, 0, shared_weights=True, one_micro_batch=one)
    gaps = {}
    for implementation in (COMPUTE_DTYPE, GROUPED):
        use(learner.model, implementation)
        logp = learner.measure(batch, frozenset({Signal.PROXIMAL}))[Signal.PROXIMAL].x.cpu()
        gaps[implementation] = (logp - batch.behaviour.x).abs().double()
    for implementation, gap in gaps.items():
        use(learner.model, implementation)
        credited, times = objective.credit(batch), []
        free(device)
        for _ in range(3):
            synchronize(device)
            began = time.perf_counter()
            metrics = learner.update(credited, objective)
            synchronize(device)
            times.append(time.perf_counter() - began)
        peaks = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if device == "cuda" else (0, 0)
        name = "compute dtype" if implementation == COMPUTE_DTYPE else "stock grouped_mm, float32"
        print(
            f"learner, experts in {name}: |log pi - sampler's| {float(gap.mean()):.4f} in the mean, 99.9 % "
            f"{float(gap.quantile(0.999)):.4f}; a step of {batch.sequences.ids.numel()} ids {min(times[1:]):.3f} s (first "
            f"{times[0]:.2f}), peak {peaks[0] / GIB:.1f} GiB, {peaks[1] / GIB:.1f} reserved, skipped {metrics['skipped']:.0f}"
        )
    print(f"the estimate, fragments of the reserved memory included: {plan.describe()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="3b")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bandwidth = copy_bandwidth(device)
    free(device)
    model = make(options.shape, device)
    size = sum(p.numel() for p in model.parameters())
    print(
        f"{options.shape}: {size / 1e9:.2f} B parameters on {device}, bandwidth {bandwidth / 1e12:.2f} TB/s", flush=True
    )
    prompts, done = generation(model, options, device, bandwidth)
    free(device)
    if "learner" in options.parts and done:
        learning(model, batch_of(prompts, done), device)


if __name__ == "__main__":
    main()
