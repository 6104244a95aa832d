"""Models of 1 to 8 billion parameters on one GPU: adapters, long sequences, generation; and how far from the limits.

    python benchmarks/large_models.py [--parts lora8b nf4 long1b recompute gen1b gen8b adapters8b context32k] [--quick]
    python benchmarks/large_models.py --device cpu --quick     every part with tiny shapes, to try the script

Weights are random, of the shapes of Qwen2.5-1.5B and Llama-3-8B; speed does not depend on them. A learning step is counted as the
products it needs: 2 N forward, 2 N for the gradient of inputs, 2 N for that of weights (none for frozen ones), and attention.
Recomputed products are not counted. The limit of generation is reading all weights once per step and all keys and values once
per token at the measured copy bandwidth, or the products at the measured peak. ``context32k`` compares 32,768 ids with 1,024 in
the same run: learning, prefill, and decode steps alone, each as a share of its limit.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from turnwise import recipes
from turnwise.bench.generation import equal, local
from turnwise.bench.hardware_limits import HardwareLimits, synchronize
from turnwise.bench.learning import batch_of
from turnwise.bench.models import parameters
from turnwise.engines.generator.generator import LocalGenerator
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner

EIGHT_B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 65536, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
ONE_B = {
    "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 65536, "rope_theta": 1000000.0,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


TINY = {
    "vocab_size": 10000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
DEVICE = "cuda"
SHORTEN = 256  # on a CPU every length is divided by it


def scaled(length: int) -> int:
    """A length of the benchmark, or a short one where the script is only tried."""
    return length if DEVICE == "cuda" else max(length // SHORTEN, 4)


def make(size: str) -> Any:
    """A model with random weights in bfloat16, made on the device."""
    torch.manual_seed(0)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    shape = EIGHT_B if size == "8b" else ONE_B
    shape = shape if DEVICE == "cuda" else {**shape, **TINY}
    try:
        with torch.device(DEVICE):
            model = LlamaForCausalLM(LlamaConfig(**shape)) if size == "8b" else Qwen2ForCausalLM(Qwen2Config(**shape))
    finally:
        torch.set_default_dtype(previous)
    if size == "1b":  # random biases of zero would hide an error
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(p, std=0.02)
    return model.eval()


def free() -> None:
    gc.collect()
    gc.collect()  # what only the autograd graph referred to was found by the first
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def reserved() -> float:
    """GiB that the device reserved since ``free``."""
    return torch.cuda.max_memory_reserved() / 2**30 if DEVICE == "cuda" else 0.0


def timed(call: Callable[[], Any]) -> float:
    synchronize(DEVICE)
    began = time.perf_counter()
    call()
    synchronize(DEVICE)
    return time.perf_counter() - began


def matrix_and_attention(model: Any, length: int, answers: float) -> tuple[float, float]:
    """(Weights that one id is multiplied by, with the head for answers only; FLOP of QKᵀ and PV over half of the square)."""
    c = model.config
    head = c.vocab_size * c.hidden_size
    body = parameters(model) - head * (1 if c.tie_word_embeddings else 2)
    return body + answers * head, 2 * 2 * (length / 2) * c.num_hidden_layers * c.hidden_size


def flop_per_id(model: Any, length: int, answers: float, trained: bool) -> float:
    """Products of one id: forward, input gradients, and weight gradients if weights are trained."""
    weights, attention = matrix_and_attention(model, length, answers)
    return (6 if trained else 4) * weights + 3 * attention


def forward_flop_per_id(model: Any, length: int, answers: float) -> float:
    weights, attention = matrix_and_attention(model, length, answers)
    return 2 * weights + attention


def learn(size: str, sequences: int, length: int, limits: HardwareLimits, repeats: int, **settings: Any) -> str:
    free()
    model, length = make(size), scaled(length)
    flop = flop_per_id(model, length, 0.5, not settings.get("lora_rank"))
    learner = LocalLearner(model, LearnerSettings(**{"dtype": "bfloat16", **settings}), device=DEVICE)
    objective = recipes.build("grpo", beta=0.0).objective
    batch = batch_of(sequences, length, 10000, False, siblings=min(8, sequences))
    credited = objective.credit(batch)
    metrics: list[Any] = []
    times = [timed(lambda: metrics.append(learner.update(credited, objective))) for _ in range(repeats + 2)]
    assert not metrics[-1]["skipped"], metrics[-1]
    seconds, peak = statistics.median(times[2:]), reserved()
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
    model, prompt, new = make(size), scaled(prompt), scaled(new)
    generator = LocalGenerator(
        model, slots=batch, context=prompt + new + 8, stop_ids=(), device=DEVICE, dtype=torch.bfloat16
    )
    if rank:
        import asyncio

        learner = LocalLearner(model, LearnerSettings(dtype="bfloat16", lora_rank=rank), device=DEVICE)
        asyncio.run(generator.publish(learner.weights(), 1))
    limit = limits.generation(model, batch, prompt, new, 2)
    del model
    run = local(generator)
    loads = [equal(batch, prompt, new, 10000, n) for n in range(repeats + 2)]
    times = [timed(lambda load=load: run(load)) for load in loads]  # type: ignore[misc]
    if profile:
        profiled(lambda: run(equal(batch, prompt, 32, 10000, 99)))
    rate, memory = batch * new / statistics.median(times[2:]), reserved()
    return (
        f"generate {size} batch {batch}, {prompt}+{new}{f', adapters of rank {rank}' if rank else ''}: {rate:,.0f} tok/s, "
        f"{100 * rate / limit:.1f} % of the limit {limit:,.0f}, {memory:.1f} GiB; {generator.describe()}"
    )


def prefill_and_decode(size: str, batch: int, prompt: int, new: int, limits: HardwareLimits, repeats: int) -> str:
    """Prefill as a share of the peak, and decode steps alone as a share of what reading weights and keys allows."""
    free()
    model, prompt, new = make(size), scaled(prompt), scaled(new)
    width = prompt + new + 8
    generator = LocalGenerator(model, slots=batch, context=width, stop_ids=(), device=DEVICE, dtype=torch.bfloat16)
    limit = limits.generation(model, batch, prompt, new, 2)
    forward = forward_flop_per_id(model, prompt, 1 / prompt)
    del model
    run, loads = local(generator), itertools.count()

    def seconds(count: int) -> float:
        times = [timed(lambda: run(equal(batch, prompt, count, 10000, next(loads)))) for _ in range(repeats + 2)]
        return statistics.median(times[2:])

    whole, first = seconds(new), seconds(1)
    rate = batch * (new - 1) / (whole - first)
    return (
        f"context {size} batch {batch}, {prompt}+{new}: prefill {batch * prompt / first:,.0f} tok/s, "
        f"{100 * forward * batch * prompt / first / limits.peak:.1f} % of the peak; decode {rate:,.0f} tok/s, "
        f"{100 * rate / limit:.1f} % of the limit {limit:,.0f}; {reserved():.1f} GiB; {generator.describe()}"
    )


def profiled(call: Callable[[], Any]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as report:
        call()
        torch.cuda.synchronize()
    print(report.key_averages().table(sort_by="cuda_time_total", row_limit=14, max_name_column_width=60), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["lora8b", "long1b", "recompute", "gen1b", "gen8b", "adapters8b", "context32k"]
    parser.add_argument("--parts", nargs="+", default=parts, choices=[*parts, "nf4"], help="nf4 needs bitsandbytes")
    parser.add_argument("--profile", action="store_true", help="print the slowest kernels of generation")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: tiny shapes, to try the script")
    options = parser.parse_args()
    global DEVICE
    DEVICE = options.device
    repeats, profile = 2 if options.quick else 5, options.profile
    limits = HardwareLimits.measured(DEVICE, torch.bfloat16)
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
        "context32k": [
            lambda: learn("1b", 64, 1024, limits, repeats, positions=32768, recompute=True),
            lambda: learn("1b", 2, 32768, limits, repeats, positions=32768, recompute=True),
            lambda: learn("8b", 64, 1024, limits, repeats, lora_rank=16, positions=32768, recompute=True),
            lambda: learn("8b", 2, 32768, limits, repeats, lora_rank=16, positions=32768, recompute=True),
            lambda: prefill_and_decode("1b", 64, 1024, 128, limits, repeats),
            lambda: prefill_and_decode("1b", 16, 32512, 128, limits, repeats),
            lambda: prefill_and_decode("8b", 64, 1024, 128, limits, repeats),
            lambda: prefill_and_decode("8b", 8, 32512, 128, limits, repeats),
        ],
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
