"""Models of 1 to 8 billion parameters on one GPU: adapters, long sequences, generation; and how far from the limits.

    python benchmarks/large_models.py [--parts lora8b nf4 long1b recompute gen1b gen8b adapters8b] [--profile] [--quick]

Weights are random, of the shapes of Qwen2.5-1.5B and Llama-3-8B; speed does not depend on them. A learning step is counted as the
products it needs: 2 N forward, 2 N for the gradient of inputs, 2 N for that of weights (none for frozen ones), and attention.
Recomputed products are not counted. The limit of generation is reading all weights once per step and all keys and values once
per token at the measured copy bandwidth, or the products at the measured peak.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from turnwise import recipes
from turnwise.bench.generation import local
from turnwise.bench.hardware_limits import HardwareLimits
from turnwise.bench.learning import batch_of
from turnwise.bench.models import parameters
from turnwise.bench.workloads import equal
from turnwise.engines.generator.generator import LocalGenerator
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner

EIGHT_B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
ONE_B = {
    "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 32768, "rope_theta": 1000000.0,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def make(size: str) -> Any:
    """A model with random weights in bfloat16, made on the GPU."""
    torch.manual_seed(0)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = LlamaForCausalLM(LlamaConfig(**EIGHT_B)) if size == "8b" else Qwen2ForCausalLM(Qwen2Config(**ONE_B))
    finally:
        torch.set_default_dtype(previous)
    if size == "1b":  # random biases of zero would hide an error
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(p, std=0.02)
    return model.eval()


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def flop_per_id(model: Any, length: int, answers: float, trained: bool) -> float:
    """Products of one id: forward, input gradients, and weight gradients if weights are trained; the head for answers only."""
    c = model.config
    head = c.vocab_size * c.hidden_size
    body = parameters(model) - head * (1 if c.tie_word_embeddings else 2)
    attention = 2 * 2 * (length / 2) * c.num_hidden_layers * c.hidden_size  # QKᵀ and PV over half of the square
    return (6 if trained else 4) * (body + answers * head) + 3 * attention


def learn(size: str, sequences: int, length: int, limits: HardwareLimits, repeats: int, **settings: Any) -> str:
    free()
    model = make(size)
    flop = flop_per_id(model, length, 0.5, not settings.get("lora_rank"))
    learner = LocalLearner(model, LearnerSettings(**{"dtype": "bfloat16", **settings}), device="cuda")
    objective = recipes.build("grpo", beta=0.0).objective
    batch = batch_of(sequences, length, 10000, False, siblings=min(8, sequences))
    credited = objective.credit(batch)
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        metrics = learner.update(credited, objective)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    assert not metrics["skipped"], metrics
    seconds, peak = statistics.median(times[2:]), torch.cuda.max_memory_reserved() / 2**30
    share = flop * sequences * length / seconds / limits.peak
    path = learner.describe()
    return (
        f"learn {size} {sequences} x {length} {settings}: {seconds:.3f} s, {sequences * length / seconds:,.0f} tok/s, "
        f"{100 * share:.1f} % of the peak, {peak:.1f} GiB; first {times[0]:.1f} s; {path}"
    )


def generate(
    size: str, batch: int, prompt: int, new: int, limits: HardwareLimits, repeats: int, profile: bool, rank: int = 0
) -> str:
    free()
    model = make(size)
    generator = LocalGenerator(
        model, slots=batch, context=prompt + new + 8, stop_ids=(), device="cuda", dtype=torch.bfloat16
    )
    if rank:
        import asyncio

        learner = LocalLearner(model, LearnerSettings(dtype="bfloat16", lora_rank=rank), device="cuda")
        asyncio.run(generator.publish(learner.weights(), 1))
    limit = limits.generation(model, batch, prompt, new, 2)
    del model
    run = local(generator)
    times = []
    for n in range(repeats + 2):
        load = equal(batch, prompt, new, 10000, n)
        torch.cuda.synchronize()
        began = time.perf_counter()
        run(load)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    if profile:
        profiled(lambda: run(equal(batch, prompt, 32, 10000, 99)))
    rate = batch * new / statistics.median(times[2:])
    memory = torch.cuda.max_memory_reserved() / 2**30
    return (
        f"generate {size} batch {batch}, {prompt}+{new}{f', adapters of rank {rank}' if rank else ''}: {rate:,.0f} tok/s, "
        f"{100 * rate / limit:.1f} % of the limit {limit:,.0f}, {memory:.1f} GiB; {generator.describe()}"
    )


def profiled(call: Callable[[], Any]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as report:
        call()
        torch.cuda.synchronize()
    print(report.key_averages().table(sort_by="cuda_time_total", row_limit=14, max_name_column_width=60), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["lora8b", "long1b", "recompute", "gen1b", "gen8b", "adapters8b"]
    parser.add_argument("--parts", nargs="+", default=parts, choices=[*parts, "nf4"], help="nf4 needs bitsandbytes")
    parser.add_argument("--profile", action="store_true", help="print the slowest kernels of generation")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    repeats, profile = 2 if options.quick else 5, options.profile
    limits = HardwareLimits.measured("cuda", torch.bfloat16)
    print(f"peak {limits.peak / 1e12:.0f} TFLOP/s, copies {limits.bandwidth / 1e12:.2f} TB/s", flush=True)
    work: dict[str, list[Callable[[], str]]] = {
        "lora8b": [lambda: learn("8b", 64, 1024, limits, repeats, lora_rank=16, positions=8192)],
        "nf4": [
            lambda: learn("8b", 16, 1024, limits, repeats, lora_rank=16, positions=16384, recompute=True, dtype="nf4")
        ],
        "long1b": [lambda: learn("1b", 4, 16384, limits, repeats, positions=16384)],
        "recompute": [
            lambda: learn("1b", 4, 16384, limits, repeats, positions=16384, recompute=True),
            lambda: learn("8b", 16, 1024, limits, repeats, lora_rank=16, positions=16384, recompute=True),
        ],
        "gen1b": [lambda: generate("1b", 256, 128, 128, limits, repeats, profile)],
        "gen8b": [lambda: generate("8b", 64, 128, 128, limits, repeats, profile)],
        "adapters8b": [lambda: generate("8b", 64, 128, 128, limits, repeats, False, rank=16)],
    }
    for part in options.parts:
        for call in work[part]:
            began = time.perf_counter()
            try:
                print(call(), flush=True)
            except Exception as fault:  # report the others all the same
                print(f"{part} failed: {type(fault).__name__}: {str(fault)[:600]}", flush=True)
            print(f"    ({time.perf_counter() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
