"""Seconds per update of one process and of several ranks, on this machine: python benchmarks/ranks.py --ranks 2

A Llama of about 20 million parameters, random weights, the same batch for all. The fastest of ``--rounds`` updates counts: other
work on the machine only makes one slower.

``--checkpoints`` measures a checkpoint of the ranks instead: seconds, and the host memory that each process needs for it beyond
what it holds before and after (Linux only).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from turnwise import recipes
from turnwise.core.batch import Batch, pack
from turnwise.core.records import Group, Task, Trajectory, Turn
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.engines.sharded.rank_pool import RankPool
from turnwise.engines.sharded.sharded_learner import ShardedLearner
from turnwise.store.checkpoint import load_checkpoint, save_checkpoint

VOCABULARY = 4096
SETTINGS = LearnerSettings(lr=1e-5, positions=4096)


def make_model(hidden: int, layers: int) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=hidden * 8 // 3 // 16 * 16, num_hidden_layers=layers,
            num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64, max_position_embeddings=1024,
            tie_word_embeddings=True,
        )
    )  # fmt: skip


def make_batch(groups: int, size: int, length: int) -> Batch:
    rng = random.Random(0)
    ids = lambda n: [rng.randrange(VOCABULARY) for _ in range(n)]  # noqa: E731

    def trajectory(task: Task, n: int, prompt: list[int]) -> Trajectory:
        tokens = ids(rng.randint(length // 2, length))
        turn = Turn(context=prompt, tokens=tokens, logp=[-8.3] * len(tokens), reward=rng.random())
        return Trajectory(f"{task.key}/{n}", task, (turn,))

    tasks = [Task("random", seed=g) for g in range(groups)]
    prompts = [ids(64) for _ in tasks]
    return pack([Group(t.key, t, tuple(trajectory(t, n, p) for n in range(size))) for t, p in zip(tasks, prompts)])


def seconds(learner: Any, batch: Batch, rounds: int) -> float:
    objective = recipes.build("dr_grpo").objective
    credited, times = objective.credit(batch), []
    for _ in range(rounds + 1):  # the first one warms up
        begun = time.perf_counter()
        learner.update(credited, objective)
        learner.weights()
        times.append(time.perf_counter() - begun)
    return min(times[1:])


def memory(process: int, field: str) -> float:
    """``VmRSS`` (now) or ``VmHWM`` (the most since the last reset) of a process, in MB."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))


@contextlib.contextmanager
def measured(what: str, processes: list[int]) -> Iterator[None]:
    """Print the seconds of the block, and the extra memory that each process needed at its peak."""
    for process in processes:
        Path(f"/proc/{process}/clear_refs").write_text("5")
    before, begun = [memory(process, "VmRSS") for process in processes], time.perf_counter()
    yield
    took = time.perf_counter() - begun
    extra = [memory(process, "VmHWM") - held for process, held in zip(processes, before)]
    told = ", ".join(f"rank {n}: +{mb:.0f} MB on {held:.0f}" for n, (mb, held) in enumerate(zip(extra, before)))
    print(f"{what}: {took:.2f} s; {told}", flush=True)


def checkpoints(ranks: int, hidden: int, layers: int, batch: Batch, rounds: int) -> None:
    """Save and load the state of a learner that has taken one step, so that it has moments."""
    signals = recipes.build("dr_grpo").objective.signals
    pool = RankPool(ranks)
    learner = ShardedLearner(make_model(hidden, layers), SETTINGS, ranks=ranks, signals=signals, pool=pool)
    objective = recipes.build("dr_grpo").objective
    learner.update(objective.credit(batch), objective)
    learner.weights()
    print(f"{learner.parameter_count / 1e6:.0f} M parameters, {ranks} ranks", flush=True)
    processes = [os.getpid(), *(process.number for process in pool.processes)]
    with tempfile.TemporaryDirectory() as folder:
        for step in range(rounds):
            with measured("save", processes):
                state = learner.checkpoint_state()
                save_checkpoint(folder, step, state["tensors"], {"learner": state["scalars"]}, keep=1)
            del state
        with measured("load", processes):
            saved = load_checkpoint(folder)
            learner.load_state_dict({"tensors": saved.tensors, "scalars": saved.state["learner"]})
            del saved
    pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in (
        ("ranks", 2),
        ("hidden", 512),
        ("layers", 6),
        ("groups", 4),
        ("size", 4),
        ("length", 256),
        ("rounds", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--checkpoints", action="store_true")
    a = parser.parse_args()
    batch = make_batch(a.groups, a.size, a.length)
    if a.checkpoints:
        checkpoints(a.ranks, a.hidden, a.layers, batch, a.rounds)
        return
    ids = int(batch.sequences.ids.numel())
    signals = recipes.build("dr_grpo").objective.signals
    for threads in (1, a.ranks):
        torch.set_num_threads(threads)
        local = LocalLearner(make_model(a.hidden, a.layers), SETTINGS)
        took = seconds(local, batch, a.rounds)
        print(f"1 process, {threads} threads: {took:.2f} s, {ids / took:.0f} ids/s ({local.describe()})", flush=True)
    torch.set_num_threads(1)
    pool = RankPool(a.ranks)
    for gather in ("step", "block"):
        own: dict[str, Any] = {"ranks": a.ranks, "signals": signals, "gather": gather, "pool": pool}
        sharded = ShardedLearner(make_model(a.hidden, a.layers), SETTINGS, **own)
        took = seconds(sharded, batch, a.rounds)
        print(
            f"{a.ranks} ranks, 1 thread each: {took:.2f} s, {ids / took:.0f} ids/s ({sharded.describe()})", flush=True
        )
    pool.close()


if __name__ == "__main__":
    main()
