"""Throughput of one optimizer step: our learner's public interface, beside the textbook step in plain PyTorch.

Knows the learner and one method (grpo); measures no quality."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from turnwise import recipes
from turnwise.bench.hardware_limits import HardwareLimits, synchronize
from turnwise.bench.models import BenchSetup
from turnwise.bench.report import BenchRow, with_ratio_to
from turnwise.core.batch import Batch, pack
from turnwise.core.records import Group, Task, Trajectory, Turn
from turnwise.engines.kernels.dispatch import default_micro_batch
from turnwise.engines.learner.cuda_graphs import DEDICATED_AFTER
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner

SIBLINGS = 8


def batch_of(sequences: int, length: int, vocabulary: int, shared: bool, siblings: int = SIBLINGS) -> Batch:
    """Groups of ``siblings``, half prompt and half completion; one prompt per group if ``shared``, else one per sequence."""
    rng = torch.Generator().manual_seed(0)
    draw = lambda n: tuple(torch.randint(0, vocabulary, (n,), generator=rng).tolist())  # noqa: E731
    task, half, groups = Task("bench", 0), length // 2, []
    for g in range(sequences // siblings):
        prompt = draw(half)
        turns = [
            Turn(prompt if shared else draw(half), draw(length - half), (-5.0,) * (length - half), reward=float(i % 2))
            for i in range(siblings)
        ]
        groups.append(Group(str(g), task, tuple(Trajectory(f"{g}.{i}", task, (t,)) for i, t in enumerate(turns))))
    return pack(groups)


def ours(setup: BenchSetup, shared: bool) -> Callable[[], Any]:
    """A whole update of our learner: plan, forward, backward, clip, AdamW."""
    name = str(setup.dtype).removeprefix("torch.")
    settings = LearnerSettings(dtype=name, positions=default_micro_batch(torch.device(setup.device)))
    learner = LocalLearner(setup.model(), settings, device=setup.device)
    objective = recipes.build("grpo", beta=0.0).objective
    batch = batch_of(*setup.learn, setup.vocabulary, shared)
    if objective.signals_before_batch:
        batch = batch.put(learner.measure(batch, objective.signals_before_batch))
    # credit is computed once for all updates of a step, so it is not timed
    credited = objective.credit(batch)
    return lambda: learner.update(credited, objective)


def plain(setup: BenchSetup) -> Callable[[], Any]:
    """The stock model, all logits in float32, log-softmax, clipped ratio, AdamW; weights in the setup's dtype."""
    model = setup.model_on_device()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    rows, length = setup.learn
    ids = torch.randint(0, setup.vocabulary, (rows, length), device=setup.device)
    advantage = torch.randn(rows, 1, device=setup.device)
    old = torch.full((rows, length - 1), -5.0, device=setup.device)

    def step() -> None:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        logp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        ratio = (logp - old).exp()
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)[:, length // 2 :].mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def timed(call: Callable[[], Any], device: str, repeats: int) -> tuple[float, float]:
    """(median seconds, peak bytes reserved on the device, captured graphs included). The first calls warm up, compile and
    capture; on a GPU, until the size has occurred often enough for a dedicated graph."""
    times, warm = [], 2 + (DEDICATED_AFTER if device == "cuda" else 0)
    for repeat in range(repeats + warm):
        if device == "cuda" and repeat == warm:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_reserved() if device == "cuda" else 0
    return statistics.median(times[warm:]), peak


def rows(setup: BenchSetup, limits: HardwareLimits, repeats: int) -> list[BenchRow]:
    """Tokens/s with distinct and with shared prompts, and on a GPU the memory of both sides."""
    n, length = setup.learn
    load, sides = f"{n} x {length} ids", {"turnwise": lambda: ours(setup, False), "plain step": lambda: plain(setup)}
    sides["turnwise, prompts shared by 8"] = lambda: ours(setup, True)
    speed, memory, limit = [], [], limits.learning(setup.model())
    for who, make in sides.items():
        seconds, peak = timed(make(), setup.device, repeats)
        rate = n * length / seconds
        note = "" if "shared" not in who else "as if every id were computed; limit likewise"
        speed.append(BenchRow("learning", load, who, rate, "tok/s", of_limit=rate / limit, note=note))
        memory.append(BenchRow("memory", f"learning, {load}", who, peak / 2**30, "GiB"))
        if setup.device == "cuda":
            gc.collect()  # a learner has reference cycles; its graphs' memory would count towards the next side
            torch.cuda.empty_cache()
    speed.append(BenchRow("learning", load, "limit of the machine", limit, "tok/s", of_limit=1.0, note="peak / 6 N"))
    return with_ratio_to(speed, "plain step") + (with_ratio_to(memory, "plain step") if setup.device == "cuda" else [])
