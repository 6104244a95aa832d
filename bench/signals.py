"""What each signal costs, as a multiple of one plain forward pass over the same batch.

    python bench/signals.py [--hidden 192] [--layers 2] [--vocabulary 512] [--groups 8] [--size 8]

Random episodes of two turns through the local learner. Live signals ride along with the pass that is taken anyway; the others
are measured once per batch (frozen) or once per optimiser step (foreseen).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from turnwise.batch import Batch, pack
from turnwise.data import Group, Task, Trajectory, Turn
from turnwise.engines.learner import LearnerSettings, LocalLearner
from turnwise.models.tiny import tiny_model
from turnwise.signals import FORESEEN, FROZEN, Signal


def episodes(groups: int, size: int, vocabulary: int) -> Batch:
    rng = random.Random(0)
    ids = lambda n: tuple(rng.randrange(vocabulary) for _ in range(n))  # noqa: E731
    made = []
    for g in range(groups):
        task, prompt = Task("bench", g), ids(24)
        turns = lambda: (Turn(prompt, ids(16), (-1.0,) * 16), Turn(ids(6), ids(8), (-1.0,) * 8))  # noqa: E731, B023
        made.append(
            Group(str(g), task, tuple(Trajectory(f"{g}.{i}", task, turns(), answer=ids(3)) for i in range(size)))
        )
    return pack(made)


def seconds(learner: LocalLearner, batch: Batch, signals: frozenset[Signal], repeats: int) -> float:
    learner.measure(batch, signals)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        learner.measure(batch, signals)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


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
    o = parser.parse_args()
    model = tiny_model(o.vocabulary, 0, hidden=o.hidden, layers=o.layers, context=128)
    learner = LocalLearner(model, LearnerSettings(), critic=2)
    learner.reference()
    batch = episodes(o.groups, o.size, o.vocabulary)
    plain = seconds(learner, batch, frozenset({Signal.LOGP}), o.repeats)
    print(f"one forward pass for log-probabilities, {len(batch)} episodes: {1000 * plain:.1f} ms")
    print("| signal | when | times a plain pass |\n|---|---|---|")
    for signal in Signal:
        when = "once per batch" if signal in FROZEN else "once per step" if signal in FORESEEN else "rides along"
        cost = seconds(learner, batch, frozenset({Signal.LOGP, signal}), o.repeats) - (
            0 if signal == Signal.LOGP else plain
        )
        print(f"| {signal} | {when} | {max(0.0, cost) / plain:.2f} |")


if __name__ == "__main__":
    main()
