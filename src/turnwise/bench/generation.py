"""Tokens per second of generators on one load; they take turns, so that a slow minute of the machine hits all of them."""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from turnwise.bench.hardware_limits import Limits, settle
from turnwise.bench.models import Scene
from turnwise.bench.report import Row, against
from turnwise.bench.workloads import Load, equal, ragged
from turnwise.core.batch import pack
from turnwise.core.records import Completion, Group, Sampling, Task, Trajectory, Turn
from turnwise.core.signals import Signal
from turnwise.engines.generator.generator import LocalGenerator
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner

Engine = Callable[[Load], Any]


def local(generator: LocalGenerator) -> Engine:
    """Ours. Answers with the first turn's completions."""

    async def run(load: Load) -> list[Completion]:
        sessions = [generator.open(i) for i in range(len(load.prompts))]

        async def talk(i: int) -> Completion:
            ids, first = list(load.prompts[i]), None
            for asked, reply in zip(load.asked[i], load.replies[i]):
                done = await sessions[i].generate(ids, Sampling(max_tokens=asked))
                assert len(done.tokens) == asked
                first = first or done
                ids += [*done.tokens, *reply]
            sessions[i].close()
            assert first is not None
            return first

        return list(await asyncio.gather(*map(talk, range(len(sessions)))))

    return lambda load: asyncio.run(run(load))


def stock(net: Any, batch: int) -> Engine:
    """``transformers.generate``: left-padded batches, each until its longest, everything read again every turn."""

    def turn(ids: list[list[int]], new: int) -> list[list[int]]:
        longest = max(map(len, ids))
        padded = torch.tensor([[0] * (longest - len(row)) + row for row in ids], device=net.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids], device=net.device)
        out = net.generate(
            padded, attention_mask=mask, max_new_tokens=new, do_sample=True, top_k=0, top_p=1.0, pad_token_id=0
        )
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


def continuous(net: Any) -> Engine:
    """Transformers' own continuous batching; one call per turn."""
    from transformers import GenerationConfig

    def run(load: Load) -> None:
        for turn in range(len(load.asked[0])):
            longest = max(row[turn] for row in load.asked)
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


def vllm(python: str, net: PreTrainedModel, work: Sequence[Load], repeats: int) -> dict[str, float]:
    """In an interpreter of its own, since it brings its own torch."""
    with tempfile.TemporaryDirectory() as path:
        net.save_pretrained(path)
        job = {"path": path, "repeats": repeats, "loads": [{**load.__dict__, "tokens": load.tokens} for load in work]}
        done = subprocess.run([python, "-c", VLLM], input=json.dumps(job), capture_output=True, text=True, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("RATES")), None)
    if line is None:
        print(done.stderr[-2000:])
    return dict(json.loads(line[5:])) if line else {}


def measure(
    engines: Mapping[str, Engine], load: Callable[[int], Load], repeats: int, device: str = "cpu"
) -> tuple[dict[str, float], dict[str, Any]]:
    """Median useful tokens/s, and each engine's last answer. ``load(n)`` is that of the n-th round; the first warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    last: dict[str, Any] = {}
    for repeat in range(repeats + 1):
        work = load(repeat)
        for name, run in engines.items():
            settle(device)
            began = time.perf_counter()
            last[name] = run(work)
            settle(device)
            if repeat:
                seconds[name].append(time.perf_counter() - began)
    return {name: work.tokens / statistics.median(times) for name, times in seconds.items()}, last


def rows(scene: Scene, limits: Limits, repeats: int) -> list[Row]:
    """Each batch of the scene, and ragged requests."""
    found: list[Row] = []
    for batch in scene.batches:
        load = lambda n, b=batch: equal(b, scene.prompt, scene.new, scene.vocabulary, n)  # noqa: E731
        found += _compared(scene, load, scene.prompt + scene.new, batch, repeats, limits)
    return found + _compared(scene, lambda n: ragged(256, n, scene.vocabulary), 320, 256, repeats, None)


def _compared(
    scene: Scene, load: Callable[[int], Load], context: int, batch: int, repeats: int, limits: Limits | None
) -> list[Row]:
    mine, theirs = scene.model(), scene.there()
    generator = LocalGenerator(mine, slots=batch, context=context, stop_ids=(), device=scene.device, dtype=scene.dtype)
    engines = {"turnwise": local(generator), "transformers.generate": stock(theirs, batch)}
    rates, last = measure(engines, load, repeats, scene.device)
    most = None
    if limits is not None:
        width = torch.finfo(scene.dtype).bits // 8
        most = limits.generation(theirs, batch, scene.prompt, scene.new, width)
    gap = mismatch(scene, load(repeats).prompts, last["turnwise"])
    told = (
        f"sampler and learner differ by {gap['mean']:.1e} nats (99.9 %: {gap['p999']:.1e}; signed: {gap['signed']:.1e})"
    )
    name, share = load(0).name, lambda rate: rate / most if most else None
    made = [
        Row("generation", name, who, rate, "tok/s", of_limit=share(rate), note=told if who == "turnwise" else "")
        for who, rate in rates.items()
    ]
    if most is not None:
        made.append(Row("generation", name, "limit of the machine", most, "tok/s", of_limit=1.0))
    return against(made, "transformers.generate")


def mismatch(scene: Scene, prompts: Sequence[Sequence[int]], found: Sequence[Completion]) -> dict[str, float]:
    """|sampler − learner| of the log-probabilities of what was just sampled."""
    name = str(scene.dtype).removeprefix("torch.")
    learner = LocalLearner(scene.model(), LearnerSettings(dtype=name, positions=1 << 14), device=scene.device)
    task = Task("bench", 0)
    turns = [Turn(tuple(i), tuple(c.tokens), tuple(c.logp), version=tuple(c.version)) for i, c in zip(prompts, found)]
    batch = pack([Group("0", task, tuple(Trajectory(str(k), task, (t,)) for k, t in enumerate(turns)))])
    logp = learner.measure(batch, frozenset({Signal.PROXIMAL}))[Signal.PROXIMAL].x.double().cpu()
    apart = logp - batch.behaviour.x.double()
    gap = apart.abs()
    named = {"mean": gap.mean(), "signed": apart.mean(), "p999": gap.quantile(0.999), "largest": gap.max()}
    return {name: float(value) for name, value in named.items()}
