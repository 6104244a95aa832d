"""The KV cache in pages against the cache in rows, on one GPU: kernels, throughput, and a load of long dialogues.

    python benchmarks/paged_cache.py [--parts check same gen1b gen8b long long_both] [--repeats 3] [--device cpu]

check   kernels over pages against their PyTorch reference, largest error relative to the largest value
same    a small model in float32 and bfloat16: greedy tokens and log-probabilities of both layouts, with CUDA graphs
gen1b   a model of 1.5 B parameters (random weights): 256 requests of 128 + 128 ids, both layouts in turn
gen8b   a model of 8 B parameters: 64 requests of 128 + 128 ids, both layouts in turn
turns   a small model, 256 dialogues of 5 short turns in groups of 8, both layouts in turn: many admissions, little to compute
long    1.5 B, 512 dialogues: prompts of heavy-tailed length up to 16,000 ids in groups of 4, 64 new ids each
long_both  a load that rows can hold, both layouts: 384 dialogues, prompts up to 8,000 ids, context 8,192 (84 GiB of rows)

With ``--device cpu`` gen1b, gen8b and turns run a small model in float32.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import time
from collections.abc import Callable
from itertools import takewhile
from typing import Any

import torch
from large_models import make

from turnwise.bench.generation import Workload, equal, local
from turnwise.bench.hardware_limits import synchronize
from turnwise.bench.models import small
from turnwise.core.records import Completion, Sampling
from turnwise.engines.generator.generator import LocalGenerator
from turnwise.engines.generator.kv_cache import PAGE, CacheChoice
from turnwise.engines.kernels import reference

GIB = 1 << 30
ROWS = CacheChoice(page=0)


def check() -> None:
    """Print the largest error of every kernel over pages, for the head shapes of both models and a long, split row."""
    from turnwise.engines.kernels.triton import decode

    random_numbers = torch.Generator("cuda").manual_seed(0)
    normal = lambda *shape, dtype=torch.bfloat16: torch.randn(  # noqa: E731
        *shape, generator=random_numbers, device="cuda"
    ).to(dtype)
    for (H, K, D), dtype, context in (
        ((12, 2, 128), torch.bfloat16, 300), ((12, 2, 128), torch.bfloat16, 5000), ((32, 8, 128), torch.bfloat16, 300),
        ((9, 3, 64), torch.float32, 300), ((9, 3, 64), torch.float32, 2500),
    ):  # fmt: skip
        lanes, per_row = 6, -(-context // PAGE)
        table = (1 + torch.randperm(lanes * per_row, device="cuda")).view(lanes, per_row).int()
        keys, values = normal(2, lanes * per_row + 1, K, PAGE, D, dtype=dtype)
        angle = torch.arange(context, device="cuda")[:, None] * 1e4 ** (-torch.arange(D // 2, device="cuda") / (D // 2))
        cos, sin = torch.cat((angle.cos(),) * 2, 1), torch.cat((-angle.sin(), angle.sin()), 1)
        qkv = normal(lanes, (H + 2 * K) * D, dtype=dtype)
        position = torch.tensor([context - 1, 0, -1, context, 63, 64], device="cuda")
        q, ends = normal(150, H * D, dtype=dtype), torch.tensor([0, 70, 71, 150], device="cuda")
        start, rows = torch.tensor([10, 64, context - 79], device="cuda"), torch.tensor([2, 0, 5], device="cuda")
        both = []
        for module in (decode, reference):
            k, v, out = keys.clone(), values.clone(), torch.zeros(lanes, H * D, dtype=dtype, device="cuda")
            module.decode_attention(qkv, k, v, table, context, cos, sin, None, position, out, D**-0.5, 1e-6)
            chunks = torch.zeros_like(q)
            module.prefill_attention(q, keys, values, table, ends, start, rows, 128, chunks, D**-0.5)
            both.append((k, v, out, chunks))
        errors = [float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in zip(*both)]
        print(f"check {H} heads, {K} key heads, {D}, {dtype}, context {context}: keys, values, decode, prefill off by "
              + ", ".join(f"{e:.1e}" for e in errors), flush=True)  # fmt: skip


def same() -> None:
    """Three turns of 48 dialogues in groups of four, greedy, with both layouts; the pages are few, so that some are evicted."""
    for dtype in (torch.float32, torch.bfloat16):
        model, found = small("llama").to("cuda"), []
        for cache in (
            ROWS,
            CacheChoice(page=PAGE),
            CacheChoice(page=PAGE, room=(80 * PAGE) * cache_column(model, dtype)),
        ):
            generator = LocalGenerator(
                model, slots=48, context=512, stop_ids=(), device="cuda", dtype=dtype, cache=cache
            )
            found.append(asyncio.run(greedy_dialogues(generator)))
            print(f"same: {generator.describe()}; preemptions {generator.stats()['preemptions']:.0f}", flush=True)
        for name, other in zip(("pages", "few pages"), found[1:]):
            pairs = [(a, b) for turns, again in zip(found[0], other) for a, b in zip(turns, again)]
            equal_turns = sum(a.tokens == b.tokens for a, b in pairs)
            common = [pair for a, b in pairs for pair in before_first_difference(a, b)]
            worst = max(abs(p - q) for p, q in common)
            print(f"same {dtype}, rows and {name}: {equal_turns} of {len(pairs)} turns equal, log-probabilities before "
                  f"the first other token differ by at most {worst:.1e}", flush=True)  # fmt: skip


def before_first_difference(a: Completion, b: Completion) -> list[tuple[float, float]]:
    """Log-probabilities of both while they read the same ids."""
    same_tokens = takewhile(lambda t: t[0] == t[1], zip(a.tokens, b.tokens, a.logp, b.logp))
    return [(p, q) for _, _, p, q in same_tokens]


def cache_column(model: Any, dtype: torch.dtype) -> int:
    """Bytes of a column of the cache."""
    c = model.config
    head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return 2 * c.num_hidden_layers * c.num_key_value_heads * head * dtype.itemsize


async def greedy_dialogues(generator: LocalGenerator) -> list[list[Completion]]:
    async def one(session: Any, number: int) -> list[Completion]:
        dice, turns = random.Random(number // 4), []
        ids = [dice.randrange(3, 500) for _ in range(40 + 5 * (number // 4))]
        for _ in range(3):
            turns.append(await session.generate(ids, Sampling(temperature=0, max_tokens=24 + number)))
            ids = [*ids, *turns[-1].tokens, 3 + number, 7, 11]
        session.close()
        return turns

    return list(await asyncio.gather(*(one(generator.open(n), n) for n in range(48))))


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def timed(generator: LocalGenerator, loads: list[Workload]) -> list[float]:
    run, times = local(generator), []
    for load in loads:
        synchronize(generator.model_runner.device.type)
        began = time.perf_counter()
        run(load)
        synchronize(generator.model_runner.device.type)
        times.append(time.perf_counter() - began)
    return times


def in_turn(name: str, model: Any, batch: int, context: int, load: Callable[[int], Workload], repeats: int) -> None:
    """Both layouts on the same loads, in turn, so that a slow minute of the machine affects both; two loads warm up."""
    device = model.device.type
    generators = {
        layout: LocalGenerator(
            model, slots=batch, context=context, stop_ids=(), dtype=torch.bfloat16 if device == "cuda" else None,
            cache=cache, share_weights=True,
        )
        for layout, cache in (("rows", ROWS), ("pages", CacheChoice(page=PAGE)))
    }  # fmt: skip
    times: dict[str, list[float]] = {layout: [] for layout in generators}
    for n in range(repeats + 2):
        for layout, generator in generators.items():
            times[layout] += timed(generator, [load(n)])
    medians = {layout: statistics.median(seconds[2:]) for layout, seconds in times.items()}
    for layout, generator in generators.items():
        print(f"{name}, {layout}: {load(0).tokens / medians[layout]:,.0f} tok/s; {generator.describe()}", flush=True)
    print(f"{name}: pages/rows {medians['rows'] / medians['pages']:.3f}", flush=True)


def short(size: str, batch: int, repeats: int, device: str) -> None:
    """128 + 128 ids."""
    model = make(size) if device == "cuda" else small("llama")
    load = lambda n: equal(batch, 128, 128, 500 if device == "cpu" else 10000, n)  # noqa: E731
    in_turn(f"{size} batch {batch}, 128+128", model, batch, 264, load, repeats)


def turns(batch: int, repeats: int, device: str) -> None:
    """Dialogues of 5 turns of 16 ids, prompts of 96 in groups of 8, replies of 20."""

    def load(n: int) -> Workload:
        dice = random.Random(n)
        some = lambda count: [dice.randrange(3, 500) for _ in range(count)]  # noqa: E731
        prompts = [some(96) for _ in range(batch // 8)]
        replies = [[some(20) for _ in range(5)] for _ in range(batch)]
        return Workload("turns", [prompts[i // 8] for i in range(batch)], [[16] * 5] * batch, replies)

    in_turn(f"small model, {batch} dialogues of 5 turns", small("llama").to(device), batch, 320, load, repeats)


def heavy_tailed(dialogues: int, longest: int, new: int, seed: int) -> Workload:
    """Prompts in groups of four, of lengths with a Pareto tail."""
    dice = random.Random(seed)
    prompts = []
    for _ in range(dialogues // 4):
        length = min(longest, int(200 * dice.paretovariate(1.0)))
        prompts += [[dice.randrange(10000) for _ in range(length)]] * 4
    return Workload("long", prompts, [[new]] * dialogues, [[[]]] * dialogues)


def long_context(
    model: Any, dialogues: int, most: int, context: int, repeats: int, layouts: dict[str, CacheChoice]
) -> None:
    """Rows take the longest context for every dialogue: 512 x 16,384 columns of 28 KiB are 224 GiB and do not fit."""
    new = 64
    load = heavy_tailed(dialogues, most, new, 0)
    columns, longest = sum(map(len, load.prompts)), max(map(len, load.prompts))
    for name, cache in layouts.items():
        generator = LocalGenerator(
            model, slots=dialogues, context=context, stop_ids=(), device=model.device, dtype=torch.bfloat16, cache=cache,
            share_weights=True,
        )  # fmt: skip
        times = timed(generator, [load] * repeats)
        kv_cache, stats = generator.model_runner.kv_cache, generator.stats()
        print(
            f"long: {dialogues} dialogues, {columns:,} prompt ids, longest {longest:,}, + {new} each, {name}: "
            f"{min(times):.2f} s (first {times[0]:.2f}), cache {kv_cache.nbytes / GIB:.1f} GiB, prefilled "
            f"{stats['prefill_tokens'] / repeats:,.0f}, preemptions {stats['preemptions']:.0f}; {kv_cache.describe()}",
            flush=True,
        )
        del generator, kv_cache
        free()


def long(repeats: int) -> None:
    model = make("1b")
    room = int(0.6 * torch.cuda.mem_get_info()[0])
    long_context(model, 512, 16000, 16384, repeats, {"pages": CacheChoice(room=room)})


def long_both(repeats: int) -> None:
    """Pages get a quarter of the memory of the rows."""
    model = make("1b")
    room = 384 * 8192 * cache_column(model, torch.bfloat16) // 4
    long_context(model, 384, 8000, 8192, repeats, {"rows": ROWS, "pages": CacheChoice(page=PAGE, room=room)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["check", "same", "gen1b", "gen8b", "turns", "long", "long_both"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch", type=int, default=0, help="requests at a time of gen1b, gen8b and turns")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options = parser.parse_args()
    work: dict[str, Any] = {
        "check": check,
        "same": same,
        "gen1b": lambda: short("1b", options.batch or 256, options.repeats, options.device),
        "gen8b": lambda: short("8b", options.batch or 64, options.repeats, options.device),
        "turns": lambda: turns(options.batch or 256, options.repeats, options.device),
        "long": lambda: long(options.repeats),
        "long_both": lambda: long_both(options.repeats),
    }
    for part in options.parts:
        began = time.perf_counter()
        free()
        try:
            work[part]()
        except Exception as fault:  # report the others all the same
            print(f"{part} failed: {type(fault).__name__}: {str(fault)[:600]}", flush=True)
        print(f"    ({time.perf_counter() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
