"""The cost of credit assignment: a million tokens in a hundred thousand turns, relative to one optimizer step on them.

    python benchmarks/credit.py [--tokens 1000000] [--turns 100000] [--methods gigpo,hgpo,...] [--json FILE]

Credit assignment is everything between the measured signals and the update: reward, advantage, memory. benchmarks/signals.py
counts extra forward passes. The step is a forward and backward pass of a model with a million parameters over the same tokens,
measured on a fraction of them (--share) and scaled up.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from turnwise import recipes
from turnwise.core.batch import Batch, Sequences
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, TURN, Field, Tree
from turnwise.core.signals import WITH_GRADIENT, Signal, level_of
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.models.tiny import tiny_model

GROUP_SIZE, TURNS = 8, 20  # trajectories per group, turns per trajectory


def synthetic(tokens: int, turns: int, requirements: frozenset[str], vocabulary: int = 512) -> Batch:
    """A batch of random numbers as packing would build it, with every fact and signal a method needs."""
    g = torch.Generator().manual_seed(0)
    per_turn = tokens // turns
    groups = turns // (TURNS * GROUP_SIZE)
    trajectories = groups * GROUP_SIZE
    turns = trajectories * TURNS
    tree = Tree(
        torch.arange(turns).repeat_interleave(per_turn),
        torch.arange(trajectories).repeat_interleave(TURNS),
        torch.arange(groups).repeat_interleave(GROUP_SIZE),
        groups,
    )
    n = tree.count(TOKEN)
    at = torch.arange(n) + 1 + tree.ancestor(TOKEN, TRAJECTORY)  # one id of context before each trajectory
    starts = torch.arange(trajectories + 1) * (TURNS * per_turn + 1)
    draw = lambda level, high: Field(tree, level, torch.randint(0, high, (tree.count(level),), generator=g))  # noqa: E731
    real = lambda level: Field(tree, level, torch.rand(tree.count(level), generator=g))  # noqa: E731
    names = lambda kind: [a.removeprefix(f"{kind} ") for a in requirements if a.startswith(f"{kind} ")]  # noqa: E731
    facts = {name: draw(TRAJECTORY, 3).to(torch.float64) for name in names("fact")}
    facts |= {name: draw(TURN, 3).to(torch.float64) for name in names("turn fact")}
    last = tree.index(TURN, TRAJECTORY).x == TURNS - 1
    reward = torch.where(last, (torch.rand(turns, generator=g) < 0.4).float(), 0.0)
    flags = lambda share: Field(tree, TRAJECTORY, torch.rand(trajectories, generator=g) < share)  # noqa: E731
    measured = {s: -real(level_of(s)) for s in Signal if s not in WITH_GRADIENT}
    return Batch(
        tree=tree,
        sequences=Sequences(
            torch.randint(0, vocabulary, (int(starts[-1]),), generator=g), starts, torch.arange(trajectories), at
        ),
        token=draw(TOKEN, vocabulary),
        behaviour=-real(TOKEN),
        mass=Field(tree, TOKEN, torch.zeros(n)),
        version=draw(TOKEN, 1),
        temperature=tree.full(TURN, 1.0),
        reward=Field(tree, TURN, reward),
        state=draw(TURN, 50),
        action=draw(TURN, 6),
        agent=draw(TURN, 2),
        tool_calls=draw(TURN, 2),
        truncated=flags(0.2),
        expert=flags(0.0),
        replayed=flags(0.0),
        guided=flags(0.1),
        success=flags(0.4).to(torch.float32),
        seed=draw(TRAJECTORY, 2**31),
        parent=tree.full(TRAJECTORY, -1, torch.int64),
        fork=draw(TRAJECTORY, 1),
        end=draw(TRAJECTORY, 50),
        group=Field(tree, GROUP, torch.arange(groups)),
        domain=draw(GROUP, 2),
        reward_components={name: real(TRAJECTORY) for name in names("reward")},
        facts=facts,
        columns=measured,
        task_keys=tuple(f"task {i}" for i in range(groups)),
        trajectory_ids=tuple(map(str, range(trajectories))),
    )


def step_seconds(tokens: int, turns: int, share: float) -> tuple[float, int]:
    """Seconds of one grpo step over a fraction of the tokens, scaled to all; and the model's parameter count."""
    model = tiny_model(512, 0, hidden=192, layers=2, context=512)
    batch = synthetic(int(tokens * share), int(turns * share), frozenset())
    learner = LocalLearner(model, LearnerSettings(positions=16384))
    objective = recipes.build("grpo").objective
    credited = objective.credit(batch)
    began = time.perf_counter()
    learner.update(credited, objective)
    return (time.perf_counter() - began) / share, sum(p.numel() for p in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--turns", type=int, default=100_000)
    parser.add_argument("--share", type=float, default=0.02)
    parser.add_argument("--methods", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = options.methods.split(",") if options.methods else list(recipes.METHODS)
    whole, parameters = step_seconds(options.tokens, options.turns, options.share)
    print(f"a step of a model with {parameters:,} parameters: {whole:.1f} s for {options.tokens:,} tokens")
    print(f"{'method':<26}{'credit s':>10}{'of a step':>11}")
    rows = []
    for name in names:
        recipe = recipes.build(name)
        batch = synthetic(options.tokens, options.turns, recipe.requirements)
        try:
            recipe.objective.credit(batch)  # warm-up; a tree caches its labels, so each timed call gets a new batch
            times = []
            for _ in range(3):
                new_batch = synthetic(options.tokens, options.turns, recipe.requirements)
                began = time.perf_counter()
                recipe.objective.credit(new_batch)
                times.append(time.perf_counter() - began)
            seconds = sorted(times)[1]
        except Exception as fault:
            print(f"{name:<26}{type(fault).__name__}: {str(fault)[:80]}")
            rows.append({"method": name, "fault": str(fault)})
            continue
        rows.append({"method": name, "seconds": seconds, "of_a_step": seconds / whole})
        print(f"{name:<26}{seconds:>10.3f}{seconds / whole:>11.2%}", flush=True)
    worst = max((r for r in rows if "seconds" in r), key=lambda r: r["seconds"])
    print(f"the most expensive is {worst['method']}: {worst['of_a_step']:.2%} of a step")
    if options.json:
        options.json.write_text(json.dumps({"step_seconds": whole, "parameters": parameters, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
