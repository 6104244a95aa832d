"""What asynchrony gains: the simulated loop for 8 to 512 GPUs, and beside it real runs on this machine.

    python benchmarks/pipeline.py [--write docs/scaling.md]        # the table of the page, from formulas and a stated load
    python benchmarks/pipeline.py --measure [--steps 20]           # train here at staleness 0, 1 and 4 with slow tools
    python benchmarks/pipeline.py --measure --device cuda --groups 32 --hidden 512 --layers 8 [--no-delay]
    python benchmarks/pipeline.py --run runs/X                     # what staleness would gain in a recorded run

The simulation is ``turnwise.bench.pipeline``; seconds of a decode step, of learning and of a weight update on many GPUs come
from ``benchmarks/scaling_model.py``. A measured run is simulated from its synchronous run: tokens and tool seconds of turns from
the ledger, seconds of learning and publishing from its metrics.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import re
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import scaling_model

from turnwise.bench.pipeline import EpisodeLoad, Pipeline, TurnLoad, simulate
from turnwise.core.seeds import stable_seed
from turnwise.environments.builtin.calculator import Calculator
from turnwise.inspector.queries import RunReader

STALENESS = (0, 1, 4)
GPUS = (8, 32, 128, 512)
TURNS, TOKENS, SPREAD, LONGEST = 4, 256, 1.0, 4096  # of an episode: turns, and tokens of one (log-normal, cut)
TOOL_SECONDS, TOOL_SPREAD = 1.0, 1.0  # median and spread of a tool's answer (log-normal)
PROMPT, SIZE, GROUPS = 512, 8, 64


class SlowCalculator(Calculator):
    """The calculator with a tool whose answers take log-normal times: most 30 ms, some a second."""

    def reset(self, seed: int) -> Any:
        self.delays = random.Random(stable_seed("delay", seed, self.split))
        return super().reset(seed)

    async def step(self, action: Any) -> Any:
        await asyncio.sleep(min(2.0, self.delays.lognormvariate(math.log(0.03), 1.5)))
        return await super().step(action)


# ------------------------------------------------------------------ loads


def log_normal(seed: int) -> Callable[[], EpisodeLoad]:
    """Episodes of the stated load."""
    rng = random.Random(seed)
    draw = lambda median, spread: rng.lognormvariate(math.log(median), spread)  # noqa: E731
    return lambda: [
        TurnLoad(min(LONGEST, draw(TOKENS, SPREAD)), draw(TOOL_SECONDS, TOOL_SPREAD)) for _ in range(TURNS)
    ]


def recorded(run: RunReader, seed: int) -> Callable[[], EpisodeLoad]:
    """Episodes drawn from those of a run."""
    groups = [run.group(row.id) for row in run.groups(limit=1000)]
    episodes = [
        [TurnLoad(len(turn.tokens), turn.seconds_acting) for turn in trajectory.turns]
        for group in groups
        for trajectory in group.trajectories
    ]
    rng = random.Random(seed)
    return lambda: rng.choice(episodes)


def pipeline_of(run: RunReader) -> Pipeline:
    """The stages of a synchronous run: a decode step costs what its turns show, whatever the number of sequences."""
    turns = [turn for row in run.groups(limit=1000) for t in run.group(row.id).trajectories for turn in t.turns]
    decode = statistics.median(turn.seconds_generating / len(turn.tokens) for turn in turns if len(turn.tokens))
    mean = lambda name: statistics.median([value for _, value in run.series(name)][1:])  # noqa: E731
    groups, size = int(run.settings["groups"]), int(run.settings["group_size"])
    return Pipeline(groups, size, lambda n: decode, mean("seconds/learn"), mean("seconds/publish"))


# ------------------------------------------------------------------ tables


def projection() -> list[str]:
    """Rows for many GPUs: half generate and half learn where they overlap; all do both in turn where they do not."""
    lines = [
        "| GPUs | synchronous, all GPUs in turn | staleness 1 | 4 |",
        "|---|---|---|---|",
    ]
    for gpus in GPUS:
        results = {k: simulate(_projected(gpus, k), log_normal(1), 16, 4) for k in STALENESS}
        base = results[0].tokens
        cells = [f"{base / 1e3:,.0f} k tok/s", *(f"{results[k].tokens / base:.2f} ×" for k in STALENESS[1:])]
        lines.append(f"| {gpus} | " + " | ".join(cells) + " |")
    return lines


def _projected(gpus: int, staleness: int) -> Pipeline:
    card, weights, groups = scaling_model.H200, scaling_model.B7, GROUPS
    generators = gpus if staleness == 0 else gpus // 2
    learners = gpus if staleness == 0 else gpus // 2
    length = PROMPT + TURNS * TOKENS * math.exp(SPREAD**2 / 2)
    decode = lambda n: scaling_model.decode_step(weights, card, 1, max(1.0, n / generators), length / 2)  # noqa: E731
    ids = groups * SIZE * length
    learn = ids / (scaling_model.learning(weights, card, length, 8.0) * learners)
    return Pipeline(groups, SIZE, decode, learn, scaling_model.sync(weights), staleness, slots=scaling_model.LANES * generators)


def from_run(run: RunReader) -> list[str]:
    pipeline, lines = pipeline_of(run), ["staleness   s a step   against 0   oldest"]
    first = simulate(pipeline, recorded(run, 0)).seconds
    for k in STALENESS:
        result = simulate(replace(pipeline, staleness=k), recorded(run, 0))
        lines.append(f"{k:9}   {result.seconds:8.3f}   {first / result.seconds:7.2f} x   {result.oldest:6}")
    return lines


def measure(options: argparse.Namespace) -> list[str]:
    """Real runs here, and the simulation from the synchronous one. A step is at best the longer of generation and learning."""
    from turnwise.training.api import train

    lines = ["| staleness | s a step | of synchronous | learning | success at the end | simulated |", "|---|---|---|---|---|---|"]
    pipeline, load, first, steps = None, None, 0.0, options.steps
    env = Calculator if options.no_delay else SlowCalculator
    with tempfile.TemporaryDirectory() as folder:
        for k in options.staleness:
            train(
                method="grpo", env=env, difficulty=(1,), steps=steps, staleness=k, groups=options.groups, group_size=8,
                eval_tasks=0, out=folder, name=f"staleness{k}", trackers=(), quiet=True, device=options.device,
                hidden=options.hidden, layers=options.layers,
            )  # fmt: skip
            run = RunReader(Path(folder) / f"staleness{k}")
            times = [value for _, value in run.series("seconds")][steps // 4 :]
            if pipeline is None:
                pipeline, load = pipeline_of(run), run
            simulated = simulate(replace(pipeline, staleness=k), recorded(load, 0)).seconds
            measured = statistics.mean(times)
            first = first or measured
            learn = statistics.mean([value for _, value in run.series("seconds/learn")][steps // 4 :])
            success = statistics.mean([value for _, value in run.series("success")][-5:])
            cells = f"{measured:.2f} | {first / measured:.2f} × | {learn:.2f} s | {success:.0%} | {simulated:.2f} s"
            lines.append(f"| {k} | {cells} |")
            print(lines[-1], flush=True)
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", default="", metavar="PAGE")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--run", default="")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--no-delay", action="store_true", help="the calculator as it is, without slow tools")
    options = parser.parse_args(argv)
    lines = measure(options) if options.measure else from_run(RunReader(options.run)) if options.run else projection()
    print("\n".join(lines))
    if options.write:
        page = Path(options.write)
        text = re.sub(
            r"(<!-- pipeline -->\n).*?(<!-- end -->)",
            lambda m: m[1] + "\n".join(lines) + "\n" + m[2],
            page.read_text(encoding="utf-8"),
            flags=re.S,
        )
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
