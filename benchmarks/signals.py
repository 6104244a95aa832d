"""The cost of each signal, as a multiple of one plain forward pass over the same batch.

    python benchmarks/signals.py [--hidden 192] [--layers 2] [--vocabulary 512] [--groups 8] [--size 8] [--device cuda]

Random episodes of two turns through the local learner. Live signals come with a forward pass that runs anyway; the others are
measured once per batch or once per optimizer step. Auxiliary models (reward probe, flow) train once per batch; a separate critic
needs its own forward pass.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

from turnwise.core.batch import Batch, pack
from turnwise.core.records import Group, Task, Trajectory, Turn
from turnwise.core.signals import BEFORE_BATCH, BEFORE_STEP, Signal
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.models.tiny import tiny_model


def episodes(groups: int, size: int, vocabulary: int) -> Batch:
    rng = random.Random(0)
    ids = lambda n: tuple(rng.randrange(vocabulary) for _ in range(n))  # noqa: E731
    built = []
    for g in range(groups):
        task, prompt = Task("bench", g), ids(24)
        turns = lambda: (  # noqa: E731
            Turn(prompt, ids(16), (-1.0,) * 16),  # noqa: B023
            Turn(ids(6), ids(8), (-1.0,) * 8, masked_context=ids(6), reward=rng.random()),
        )
        rows = (Trajectory(f"{g}.{i}", task, turns(), answer=ids(3), success=i % 2 == 0) for i in range(size))
        built.append(Group(str(g), task, tuple(rows)))
    return pack(built)


def seconds(work: Callable[[], object], repeats: int, before: Callable[[], object] = lambda: None) -> float:
    times = []
    for _ in range(repeats + 1):  # the first one warms up
        before()
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("hidden", 192),
        ("layers", 2),
        ("vocabulary", 512),
        ("groups", 8),
        ("size", 8),
        ("repeats", 5),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    o = parser.parse_args()
    model = lambda seed=0: tiny_model(o.vocabulary, seed, hidden=o.hidden, layers=o.layers, context=128)  # noqa: E731
    learner = LocalLearner(model(), LearnerSettings(), critic=2, turn_critic=True, teacher=model(1), device=o.device)
    learner.reference()
    batch = episodes(o.groups, o.size, o.vocabulary)
    measured = lambda one, *signals: lambda: one.measure(batch, frozenset({Signal.LOGP, *signals}))  # noqa: E731
    plain = seconds(measured(learner), o.repeats)
    print(f"one forward pass for log-probabilities, {len(batch)} episodes: {1000 * plain:.1f} ms")
    print("| signal | when | times a plain pass |\n|---|---|---|")
    row = lambda name, when, cost: print(f"| {name} | {when} | {max(0.0, cost) / plain:.2f} |")  # noqa: E731
    for signal in (Signal.REWARD_PROBE, Signal.FLOW_DEVIATION):  # train them once: untrained ones skip their work
        learner.measure(batch, frozenset({signal}))
        learner.measurer.train_auxiliary(batch)
    for signal in Signal:
        when = (
            "once per batch"
            if signal in BEFORE_BATCH
            else "once per step"
            if signal in BEFORE_STEP
            else "with every pass"
        )
        row(signal, when, seconds(measured(learner, signal), o.repeats) - (0 if signal == Signal.LOGP else plain))
    for signal in (Signal.REWARD_PROBE, Signal.FLOW_DEVIATION):
        learning = seconds(lambda: learner.measurer.train_auxiliary(batch), o.repeats, measured(learner, signal))
        row(f"{signal}, learning", "once per batch", learning)
    shared = (
        Signal.EFFECTIVE_RANK,
        Signal.REWARD_PROBE,
        Signal.FLOW_DEVIATION,
        Signal.CANDIDATE_MATCHES,
        Signal.OLD_VALUE,
        Signal.TARGET_Q,
    )
    row(
        "six signals of the policy's states together",
        "once per batch",
        seconds(measured(learner, *shared), o.repeats) - plain,
    )
    separate = LocalLearner(
        model(), LearnerSettings(), critic=2, turn_critic=True, separate_critic=True, device=o.device
    )
    for signal in (Signal.VALUE, Signal.Q, Signal.TARGET_Q):
        row(f"{signal}, separate critic", "with every pass", seconds(measured(separate, signal), o.repeats) - plain)


if __name__ == "__main__":
    main()
