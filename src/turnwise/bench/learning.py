"""One optimiser step: ours through the learner's own door, beside the step everybody writes first."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from turnwise import recipes
from turnwise.bench.hardware_limits import Limits, settle
from turnwise.bench.models import Scene
from turnwise.bench.report import Row, against
from turnwise.core.batch import Batch, pack
from turnwise.core.records import Group, Task, Trajectory, Turn
from turnwise.engines.kernels.dispatch import ids_at_once
from turnwise.engines.learner.cuda_graphs import OFTEN
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner

SIBLINGS = 8


def batch_of(sequences: int, length: int, vocabulary: int, shared: bool, siblings: int = SIBLINGS) -> Batch:
    """Groups of siblings, half prompt and half answer; the prompt is one for the group, or another for each."""
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


def ours(scene: Scene, shared: bool) -> Callable[[], Any]:
    """A whole update: plan, forward, backward, clip, AdamW."""
    name = str(scene.dtype).removeprefix("torch.")
    settings = LearnerSettings(dtype=name, positions=ids_at_once(torch.device(scene.device)))
    learner = LocalLearner(scene.model(), settings, device=scene.device)
    objective = recipes.build("grpo", beta=0.0).objective
    batch = batch_of(*scene.learn, scene.vocabulary, shared)
    if objective.frozen:
        batch = batch.put(learner.measure(batch, objective.frozen))
    credited = objective.credit(batch)
    return lambda: learner.update(credited, objective)


def plain(scene: Scene) -> Callable[[], Any]:
    """The stock model, all logits in float32, log-softmax, clipped ratio, AdamW; weights in the scene's precision."""
    model = scene.there()
    mover = torch.optim.AdamW(model.parameters(), lr=1e-6)
    rows, length = scene.learn
    ids = torch.randint(0, scene.vocabulary, (rows, length), device=scene.device)
    gain = torch.randn(rows, 1, device=scene.device)
    old = torch.full((rows, length - 1), -5.0, device=scene.device)

    def step() -> None:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        logp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        ratio = (logp - old).exp()
        loss = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)[:, length // 2 :].mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        mover.step()
        mover.zero_grad(set_to_none=True)

    return step


def timed(call: Callable[[], Any], device: str, repeats: int) -> tuple[float, float]:
    """(median seconds, bytes the device had to set aside, those of captured graphs too); the first calls warm up, compile and
    capture, on a GPU until a size has come so often that it has a graph of its own."""
    times, warm = [], 2 + (OFTEN if device == "cuda" else 0)
    for repeat in range(repeats + warm):
        if device == "cuda" and repeat == warm:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        settle(device)
        began = time.perf_counter()
        call()
        settle(device)
        times.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_reserved() if device == "cuda" else 0
    return statistics.median(times[warm:]), peak


def rows(scene: Scene, limits: Limits, repeats: int) -> list[Row]:
    """Tokens/s with distinct prompts and with shared ones, and on a GPU the memory of both sides."""
    n, length = scene.learn
    load, sides = f"{n} x {length} ids", {"turnwise": lambda: ours(scene, False), "plain step": lambda: plain(scene)}
    sides["turnwise, prompts shared by 8"] = lambda: ours(scene, True)
    speed, memory, most = [], [], limits.learning(scene.model())
    for who, make in sides.items():
        seconds, peak = timed(make(), scene.device, repeats)
        rate = n * length / seconds
        same = "" if "shared" not in who else "as if every id were computed; limit likewise"
        speed.append(Row("learning", load, who, rate, "tok/s", of_limit=rate / most, note=same))
        memory.append(Row("memory", f"learning, {load}", who, peak / 2**30, "GiB"))
        if scene.device == "cuda":
            gc.collect()  # a learner is full of cycles, and its graphs' memory would be counted with the next one's
            torch.cuda.empty_cache()
    speed.append(Row("learning", load, "limit of the machine", most, "tok/s", of_limit=1.0, note="peak / 6 N"))
    return against(speed, "plain step") + (against(memory, "plain step") if scene.device == "cuda" else [])
