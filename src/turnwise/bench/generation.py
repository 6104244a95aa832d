"""Tokens per second of generators on one workload. Engines alternate, so that a slow minute of the machine affects all of them.

Workloads sample at temperature 1 without truncation and never stop early, so that every engine produces the same number of useful
tokens. Knows engines only as callables."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from turnwise.bench.hardware_limits import HardwareLimits, synchronize
from turnwise.bench.models import BenchSetup
from turnwise.bench.report import BenchRow, with_ratio_to
from turnwise.core.batch import pack
from turnwise.core.records import Completion, Group, Sampling, Task, Trajectory, Turn
from turnwise.core.signals import Signal
from turnwise.engines.generator.generator import LocalGenerator
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner


@dataclass(frozen=True)
class Workload:
    """Per request its prompt, and per turn the number of tokens to sample and the tool reply that follows."""

    name: str
    prompts: list[list[int]]
    new_tokens: list[list[int]]
    replies: list[list[list[int]]]

    @property
    def tokens(self) -> int:
        return sum(map(sum, self.new_tokens))


def ids(rng: random.Random, low: int, high: int, vocabulary: int = 512) -> list[int]:
    return [rng.randrange(3, vocabulary) for _ in range(rng.randint(low, high))]


def equal(batch: int, prompt: int, new: int, vocabulary: int = 512, seed: int = 0) -> Workload:
    """Prompts and completions of one length; each seed has other prompts, so that no prefix cache helps."""
    rng = random.Random(seed)
    prompts = [ids(rng, prompt, prompt, vocabulary) for _ in range(batch)]
    return Workload(f"batch {batch}, {prompt}+{new}", prompts, [[new]] * batch, [[[]]] * batch)


def ragged(requests: int = 256, seed: int = 0, vocabulary: int = 512) -> Workload:
    """Prompts 8-64, new tokens geometric with mean 32, at most 256; only requested tokens count."""
    rng = random.Random(seed)
    lengths = [min(256, 1 + int(rng.expovariate(1 / 31.5))) for _ in range(requests)]
    return Workload("ragged", [ids(rng, 8, 64, vocabulary) for _ in lengths], [[n] for n in lengths], [[[]]] * requests)


def dialogue(sessions: int = 64, seed: int = 0) -> Workload:
    """Four turns of 24 tokens, with a tool reply of 8-16 tokens between turns."""
    rng = random.Random(seed)
    replies = [[ids(rng, 8, 16) for _ in range(3)] + [[]] for _ in range(sessions)]
    return Workload("dialogue", [ids(rng, 4, 8) for _ in range(sessions)], [[24] * 4] * sessions, replies)


def standard() -> list[Workload]:
    """64 equal requests, 256 ragged ones, 64 dialogues."""
    rng = random.Random(0)
    prompts = [ids(rng, 4, 8) for _ in range(64)]
    return [Workload("equal", prompts, [[32]] * 64, [[[]]] * 64), ragged(), dialogue()]


# -------------------------------------------------------------------- engines

Engine = Callable[[Workload], Any]


def local(generator: LocalGenerator) -> Engine:
    """The local generator. Returns the completions of the first turn."""

    async def run(load: Workload) -> list[Completion]:
        # all are opened before the first token, as in a run
        sessions = [generator.open(i) for i in range(len(load.prompts))]

        async def dialogue(i: int) -> Completion:
            ids, first = list(load.prompts[i]), None
            for count, reply in zip(load.new_tokens[i], load.replies[i]):
                completion = await sessions[i].generate(ids, Sampling(max_tokens=count))
                assert len(completion.tokens) == count
                first = first or completion
                ids += [*completion.tokens, *reply]
            sessions[i].close()
            assert first is not None
            return first

        return list(await asyncio.gather(*map(dialogue, range(len(sessions)))))

    return lambda load: asyncio.run(run(load))


def stock(net: Any, batch: int) -> Engine:
    """``transformers.generate``: left-padded batches that run until their longest request, with a full prefill every turn."""

    def turn(ids: list[list[int]], new: int) -> list[list[int]]:
        longest = max(map(len, ids))
        padded = torch.tensor([[0] * (longest - len(row)) + row for row in ids], device=net.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids], device=net.device)
        out = net.generate(
            padded, attention_mask=mask, max_new_tokens=new, do_sample=True, top_k=0, top_p=1.0, pad_token_id=0
        )
        return out[:, longest:].tolist()

    def run(load: Workload) -> None:
        order = range(len(load.prompts))  # arrival order: completion lengths are unknown beforehand
        for at in range(0, len(order), batch):
            part = order[at : at + batch]
            ids = [list(load.prompts[i]) for i in part]
            for t in range(len(load.new_tokens[part[0]])):
                counts = [load.new_tokens[i][t] for i in part]
                for i, row, new, n in zip(part, ids, turn(ids, max(counts)), counts):
                    row += [*new[:n], *load.replies[i][t]]

    return run


def continuous(net: Any) -> Engine:
    """Continuous batching of Transformers, one call per turn."""
    from transformers import GenerationConfig

    def run(load: Workload) -> None:
        for turn in range(len(load.new_tokens[0])):
            longest = max(row[turn] for row in load.new_tokens)
            config = GenerationConfig(max_new_tokens=longest, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0)
            net.generate_batch(inputs=load.prompts, generation_config=config, progress_bar=False)

    return run


VLLM = """
import json, sys, time
from vllm import LLM, SamplingParams
job = json.load(sys.stdin)
llm = LLM(job["path"], skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=512)
def run(load):
    ids = [list(p) for p in load["prompts"]]
    for turn in range(len(load["new_tokens"][0])):
        sizes = [dict(max_tokens=a[turn], min_tokens=a[turn]) for a in load["new_tokens"]]
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


def vllm(python: str, net: PreTrainedModel, work: Sequence[Workload], repeats: int) -> dict[str, float]:
    """vLLM in another interpreter, because it has its own torch."""
    with tempfile.TemporaryDirectory() as path:
        net.save_pretrained(path)
        job = {"path": path, "repeats": repeats, "loads": [{**load.__dict__, "tokens": load.tokens} for load in work]}
        result = subprocess.run(
            [python, "-c", VLLM], input=json.dumps(job), capture_output=True, text=True, check=False
        )
    line = next((line for line in result.stdout.splitlines() if line.startswith("RATES")), None)
    if line is None:
        print(result.stderr[-2000:])
    return dict(json.loads(line[5:])) if line else {}


def measure(
    engines: Mapping[str, Engine], load: Callable[[int], Workload], repeats: int, device: str = "cpu"
) -> tuple[dict[str, float], dict[str, Any]]:
    """Median useful tokens/s, and each engine's last result. ``load(n)``: the workload of round n; round 0 warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    last: dict[str, Any] = {}
    for repeat in range(repeats + 1):
        work = load(repeat)
        for name, run in engines.items():
            synchronize(device)
            began = time.perf_counter()
            last[name] = run(work)
            synchronize(device)
            if repeat:
                seconds[name].append(time.perf_counter() - began)
    return {name: work.tokens / statistics.median(times) for name, times in seconds.items()}, last


def rows(setup: BenchSetup, limits: HardwareLimits, repeats: int) -> list[BenchRow]:
    """Rows for each batch size of the setup, and for requests of ragged lengths."""
    table: list[BenchRow] = []
    for batch in setup.batches:
        load = lambda n, b=batch: equal(b, setup.prompt, setup.new, setup.vocabulary, n)  # noqa: E731
        table += _compared(setup, load, setup.prompt + setup.new, batch, repeats, limits)
    return table + _compared(setup, lambda n: ragged(256, n, setup.vocabulary), 320, 256, repeats, None)


def _compared(
    setup: BenchSetup,
    load: Callable[[int], Workload],
    context: int,
    batch: int,
    repeats: int,
    limits: HardwareLimits | None,
) -> list[BenchRow]:
    policy, stock_model = setup.model(), setup.model_on_device()
    generator = LocalGenerator(
        policy, slots=batch, context=context, stop_ids=(), device=setup.device, dtype=setup.dtype
    )
    engines = {"turnwise": local(generator), "transformers.generate": stock(stock_model, batch)}
    rates, last = measure(engines, load, repeats, setup.device)
    # ragged lengths have no simple bound
    limit = None
    if limits is not None:
        width = torch.finfo(setup.dtype).bits // 8
        limit = limits.generation(stock_model, batch, setup.prompt, setup.new, width)
    gap = mismatch(setup, load(repeats).prompts, last["turnwise"])
    note = (
        f"sampler and learner differ by {gap['mean']:.1e} nats (99.9 %: {gap['p999']:.1e}; signed: {gap['signed']:.1e})"
    )
    name, share = load(0).name, lambda rate: rate / limit if limit else None
    table = [
        BenchRow("generation", name, who, rate, "tok/s", of_limit=share(rate), note=note if who == "turnwise" else "")
        for who, rate in rates.items()
    ]
    if limit is not None:
        table.append(BenchRow("generation", name, "limit of the machine", limit, "tok/s", of_limit=1.0))
    return with_ratio_to(table, "transformers.generate")


def mismatch(
    setup: BenchSetup, prompts: Sequence[Sequence[int]], completions: Sequence[Completion]
) -> dict[str, float]:
    """|generator − learner| of the log-probabilities of the tokens just sampled."""
    name = str(setup.dtype).removeprefix("torch.")
    learner = LocalLearner(setup.model(), LearnerSettings(dtype=name, positions=1 << 14), device=setup.device)
    task = Task("bench", 0)
    turns = [
        Turn(tuple(i), tuple(c.tokens), tuple(c.logp), version=tuple(c.version)) for i, c in zip(prompts, completions)
    ]
    batch = pack([Group("0", task, tuple(Trajectory(str(k), task, (t,)) for k, t in enumerate(turns)))])
    logp = learner.measure(batch, frozenset({Signal.PROXIMAL}))[Signal.PROXIMAL].x.double().cpu()
    signed = logp - batch.behaviour.x.double()
    gap = signed.abs()
    statistics = {"mean": gap.mean(), "signed": signed.mean(), "p999": gap.quantile(0.999), "largest": gap.max()}
    return {name: float(value) for name, value in statistics.items()}
