"""Tokens per second of SmolLM2-135M on a CPU: the local generator, transformers.generate and, if installed, vLLM.

    turnwise model fetch smollm2
    python benchmarks/smollm2_cpu.py [--batch 16] [--prompt 41] [--new 64] [--repeats 3] [--threads 2]
        [--out FILE.json] [--vllm-python PATH]

Everything runs in float32. The first two alternate; vLLM, which has its own torch, runs afterwards.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from turnwise.bench.generation import equal, local, measure, stock, vllm
from turnwise.engines.generator.generator import LocalGenerator
from turnwise.models.fetch import home


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("batch", 16), ("prompt", 41), ("new", 64), ("repeats", 3), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, help="also write the figures to this file")
    parser.add_argument("--vllm-python", help="an interpreter that can import vllm")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    net = AutoModelForCausalLM.from_pretrained(home() / "smollm2", dtype=torch.float32).eval()
    net.config.eos_token_id = net.generation_config.eos_token_id = None  # no early stop
    context = options.prompt + options.new
    load = lambda n: equal(options.batch, options.prompt, options.new, net.config.vocab_size, n)  # noqa: E731
    generator = LocalGenerator(net, slots=options.batch, context=context, stop_ids=())
    rates, _ = measure({"turnwise": local(generator), "transformers": stock(net, options.batch)}, load, options.repeats)
    if options.vllm_python:
        print(f"without vLLM: {rates}", file=sys.stderr)
        vllm_rates = vllm(options.vllm_python, net, [load(1)], options.repeats)
        rates |= dict(zip(["vllm"], vllm_rates.values()))
    results = {**vars(options), "out": None, "path": generator.describe(), "tokens_per_second": rates}
    results |= {"times_" + name: rates["turnwise"] / rate for name, rate in rates.items() if name != "turnwise"}
    results = {name: value for name, value in results.items() if name not in ("out", "vllm_python")}
    print(json.dumps(results, indent=1))
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
