"""Generation on one GPU: tokens per second against `transformers.generate` and the memory-bandwidth limit, in one run.

    python bench/gpu.py [--batch 16 256] [--prompt 128] [--new 128] [--out FILE.json]

The model has the architecture of SmolLM2-135M with random weights. The limit is what reading the weights once a step and
every lane's keys and values once a token would take at the measured copy bandwidth.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from turnwise.batch import pack
from turnwise.data import Group, Sampling, Task, Trajectory, Turn
from turnwise.engines.generator import LocalGenerator

SMOL = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "max_position_embeddings": 8192, "rope_theta": 100000.0, "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
}  # fmt: skip


def smol(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMOL)).to(dtype).eval()


def copy_bandwidth() -> float:
    """Bytes a second of a large device copy, read and written."""
    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        began = time.perf_counter()
        b.copy_(a)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return 2 * a.numel() / min(times)


def limit(model: Any, batch: int, prompt: int, new: int, bandwidth: float) -> float:
    """Tokens a second if a step cost its reads alone."""
    c = model.config
    weights = 2 * sum(p.numel() for p in model.parameters())
    token = 2 * 2 * c.num_hidden_layers * c.num_key_value_heads * (c.hidden_size // c.num_attention_heads)
    return batch / ((weights + batch * token * (prompt + new / 2)) / bandwidth)


async def wave(generator: LocalGenerator, prompts: list[list[int]], new: int) -> list[Any]:
    sessions = [generator.open(seed) for seed in range(len(prompts))]
    found = await asyncio.gather(*(s.generate(ids, Sampling(max_tokens=new)) for s, ids in zip(sessions, prompts)))
    for session in sessions:
        session.close()
    return found


def ours(model: Any, prompts: list[list[int]], new: int, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    generator = LocalGenerator(
        model, slots=len(prompts), context=len(prompts[0]) + new, stop_ids=(), tick=64, device="cuda", dtype=dtype
    )
    asyncio.run(wave(generator, prompts, new))  # graphs are captured, kernels compiled
    times = []
    for turn in range(repeats):
        fresh = [[*ids[:-1], (ids[-1] + turn + 1) % 49152] for ids in prompts]
        generator.network.slots.forget()
        torch.cuda.synchronize()
        began = time.perf_counter()
        found = asyncio.run(wave(generator, fresh, new))
        times.append(time.perf_counter() - began)
    size = sum(len(c.tokens) for c in found)
    graphs = generator.network.graphs
    assert graphs is not None, "the graph decoder is not in use"
    n = len(prompts)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(4):
        with torch.inference_mode():
            for _ in graphs.run(16, [1] * n, [len(prompts[0])] * n, list(range(n)), [1.0] * n):
                pass
    step = (time.perf_counter() - began) / 64
    rate = size / statistics.median(times)
    return {"tokens_per_second": rate, "step_ms": 1e3 * step, "found": found, "prompts": fresh, "times": times}


def stock(model: Any, prompts: list[list[int]], new: int, dtype: torch.dtype) -> float:
    model = model.to("cuda", dtype)
    ids = torch.tensor(prompts, device="cuda")
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": True, "top_k": 0, "pad_token_id": 0}
    model.generate(
        ids[:, :8], attention_mask=torch.ones_like(ids[:, :8]), **{**options, "max_new_tokens": 4, "min_new_tokens": 4}
    )
    torch.cuda.synchronize()
    began = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    torch.cuda.synchronize()
    return len(prompts) * new / (time.perf_counter() - began)


def mismatch(model: Any, prompts: list[list[int]], found: list[Any], dtype: str) -> dict[str, float]:
    """|sampler − learner| log-probabilities of what was just sampled."""
    from turnwise.engines.learner import LearnerSettings, LocalLearner
    from turnwise.signals import Signal

    learner = LocalLearner(model, LearnerSettings(dtype=dtype, positions=1 << 15), device="cuda")
    task = Task("bench", 0)
    turns = [Turn(tuple(i), tuple(c.tokens), tuple(c.logp), version=tuple(c.version)) for i, c in zip(prompts, found)]
    batch = pack([Group("0", task, tuple(Trajectory(str(k), task, (t,)) for k, t in enumerate(turns)))])
    logp = learner.measure(batch, frozenset({Signal.PROXIMAL}))[Signal.PROXIMAL].x.double()
    gap = (logp - batch.behaviour.x.double()).abs()
    return {"mean": float(gap.mean()), "p999": float(gap.quantile(0.999)), "largest": float(gap.max())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 256])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-stock", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copies at {bandwidth / 1e12:.2f} TB/s")
    rows = []
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        for batch in given.batch if name == "bfloat16" else given.batch[:1]:
            model = smol()
            prompts = torch.randint(
                0, 49152, (batch, given.prompt), generator=torch.Generator().manual_seed(1)
            ).tolist()
            mine = ours(model, prompts, given.new, dtype, given.repeats)
            found, asked = mine.pop("found"), mine.pop("prompts")
            try:
                gap = mismatch(smol(), asked, found, name)
            except Exception as fault:
                gap = repr(fault)
            row = {"dtype": name, "batch": batch, **mine, "mismatch": gap}
            if name == "bfloat16":
                row["limit"] = limit(model, batch, given.prompt, given.new, bandwidth)
                row["of_limit"] = row["tokens_per_second"] / row["limit"]
                if not given.no_stock:
                    row["generate"] = stock(smol(), prompts, given.new, dtype)
                    row["times_generate"] = row["tokens_per_second"] / row["generate"]
            print(json.dumps(row))
            rows.append(row)
    if given.out:
        given.out.write_text(
            json.dumps({"device": torch.cuda.get_device_name(), "bandwidth": bandwidth, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
