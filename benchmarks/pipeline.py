"""What asynchrony gains: the simulated loop for 8 to 512 GPUs, and beside it real runs on this machine.

    python benchmarks/pipeline.py [--write docs/scaling.md]        # the table of the page, from formulas and a stated load
    python benchmarks/pipeline.py --measure [--steps 20]           # train here at several staleness with slow tools
    python benchmarks/pipeline.py --measure --device cuda --groups 32 --hidden 512 --layers 8 [--no-delay] [--generator local]
    python benchmarks/pipeline.py --equal-time --seeds 0 1 2 3 4   # held-out success at equal steps and at equal time
    python benchmarks/pipeline.py --run runs/X                     # what staleness would gain in a recorded run

The simulation is ``turnwise.bench.pipeline``; seconds of a decode step, of learning and of a weight update on many GPUs come
from ``benchmarks/scaling_model.py``. A measured run is simulated from its synchronous run: tokens and tool seconds of turns from
the ledger, seconds of learning and publishing from its metrics.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import itertools
import json
import math
import random
import re
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import scaling_model

from turnwise.bench.pipeline import EpisodeLoad, Pipeline, TurnLoad, simulate
from turnwise.config.values import Staleness
from turnwise.core.seeds import stable_seed
from turnwise.environments.builtin.calculator import Calculator
from turnwise.environments.builtin.lookup import Lookup
from turnwise.inspector.queries import RunReader

CONTINUOUS = "0,continuous"  # as every system that is not reproducible samples
STALENESS = (CONTINUOUS, 1, 4)
LATE = ("4,drop", "4,keep")
GPUS = (8, 32, 128, 512)
TURNS, TOKENS, SPREAD, LONGEST = 4, 256, 1.0, 4096  # of an episode: turns, and tokens of one (log-normal, cut)
TOOL_SECONDS, TOOL_SPREAD = 1.0, 1.0  # median and spread of a tool's answer (log-normal)
PROMPT, SIZE, GROUPS = 512, 8, 64


class SlowTools:
    """Before an environment class: its answers take log-normal times, most 30 ms, some a second."""

    def reset(self, seed: int) -> Any:
        self.delays = random.Random(stable_seed("delay", seed, self.split))  # type: ignore[attr-defined]
        return super().reset(seed)  # type: ignore[misc]

    async def step(self, action: Any) -> Any:
        await asyncio.sleep(min(2.0, self.delays.lognormvariate(math.log(0.03), 1.5)))
        answer = super().step(action)  # type: ignore[misc]
        return await answer if inspect.isawaitable(answer) else answer


class SlowCalculator(SlowTools, Calculator):
    """Two turns: one tool call, one answer."""


class SlowLookup(SlowTools, Lookup):
    """A tool call for each hop (its difficulty), and an answer."""


ENVIRONMENTS = {"calculator": (SlowCalculator, Calculator), "lookup": (SlowLookup, Lookup)}


# ------------------------------------------------------------------ loads


def log_normal(seed: int) -> Callable[[], EpisodeLoad]:
    """Episodes of the stated load."""
    rng = random.Random(seed)
    draw = lambda median, spread: rng.lognormvariate(math.log(median), spread)  # noqa: E731
    return lambda: [TurnLoad(min(LONGEST, draw(TOKENS, SPREAD)), draw(TOOL_SECONDS, TOOL_SPREAD)) for _ in range(TURNS)]


def recorded(run: RunReader) -> Callable[[], EpisodeLoad]:
    """The episodes of a run, group by group in the order of their issue, again and again. They stay together: a slow task is
    slow for its whole group, so that a step waits for the slowest of its few tasks, not of its many episodes."""
    groups = [
        [
            [TurnLoad(len(turn.tokens), turn.seconds_acting) for turn in trajectory.turns]
            for trajectory in run.group(row.id).trajectories
        ]
        for row in run.groups(limit=1000)
    ]
    return episodes_of(groups, int(run.settings["group_size"]))


def episodes_of(groups: Sequence[Sequence[EpisodeLoad]], size: int) -> Callable[[], EpisodeLoad]:
    """``size`` episodes of one group after the other; a group that has lost some repeats its own."""
    whole = [list(itertools.islice(itertools.cycle(group), size)) for group in groups if group]
    return partial(next, itertools.cycle(itertools.chain.from_iterable(whole)))


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
        base = results[CONTINUOUS].tokens
        cells = [f"{base / 1e3:,.0f} k tok/s", *(f"{results[k].tokens / base:.2f} ×" for k in STALENESS[1:])]
        lines.append(f"| {gpus} | " + " | ".join(cells) + " |")
    return lines


def _projected(gpus: int, staleness: int | str) -> Pipeline:
    card, weights, groups = scaling_model.H200, scaling_model.B7, GROUPS
    generators = learners = gpus // 2 if Staleness.parse(staleness).limit else gpus
    length = PROMPT + TURNS * TOKENS * math.exp(SPREAD**2 / 2)
    decode = lambda n: scaling_model.decode_step(weights, card, 1, max(1.0, n / generators), length / 2)  # noqa: E731
    ids = groups * SIZE * length
    learn = ids / (scaling_model.learning(weights, card, length, 8.0) * learners)
    return Pipeline(
        groups, SIZE, decode, learn, scaling_model.sync(weights), staleness, slots=scaling_model.LANES * generators
    )


def from_run(run: RunReader) -> list[str]:
    pipeline, lines = pipeline_of(run), ["staleness      s a step   against 0   oldest   dropped a step"]
    first = simulate(pipeline, recorded(run)).seconds
    for k in (0, *STALENESS, *LATE):
        result = simulate(replace(pipeline, staleness=k), recorded(run))
        cells = f"{k!s:12}   {result.seconds:8.3f}   {first / result.seconds:7.2f} x   {result.oldest:6}   {result.dropped:7.2f}"
        lines.append(cells)
    return lines


def trained(options: argparse.Namespace, folder: Path, name: str, **changes: Any) -> RunReader:
    """A run with the settings of the command line, and what it left."""
    from turnwise.training.api import train

    train(
        **{
            "method": "grpo", "env": ENVIRONMENTS[options.env][options.no_delay], "difficulty": (options.difficulty,),
            "steps": options.steps, "groups": options.groups, "group_size": 8, "eval_tasks": 0, "out": str(folder),
            "name": name, "trackers": (), "quiet": True, "device": options.device, "hidden": options.hidden,
            "layers": options.layers, "generator": options.generator, "threads": options.threads, **changes,
        }
    )  # fmt: skip
    return RunReader(folder / name)


def run_name(kind: str, staleness: int | str) -> str:
    return f"{kind}{staleness}".replace(",", "-")


def late_mean(run: RunReader, name: str, staleness: int | str = 0) -> float:
    """The mean of a metric over the steady part of a run: without its first quarter, the steps whose episodes were all issued at
    its start, and the last steps, during which fewer and fewer episodes remain."""
    values, k = [value for _, value in run.series(name)], Staleness.parse(staleness).limit
    return statistics.mean(values[max(len(values) // 4, k + 1) : len(values) - k])


def measure(options: argparse.Namespace) -> list[str]:
    """Real runs here, and the simulation from the synchronous one; all start from one trained policy, so that their load is the
    same. A step is at best as long as generation without a learner, at the same staleness, or as learning without a generator
    (in the synchronous run); ``of the longer`` is the share of that limit which a step reaches."""
    heads = (
        "staleness", "s a step", "of synchronous", "rollout", "learning", "publishing", "generation alone", "of the longer",
        "simulated",
    )  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    pipeline, load, first, learning = None, None, 0.0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        start = options.model or str(trained(options, Path(folder), "start", staleness=0).path / "model")
        begin = {"model": start, "cold_steps": 0}
        for k in options.staleness:
            run = trained(options, Path(folder), run_name("staleness", k), staleness=k, **begin)
            steady = partial(late_mean, run, staleness=k)
            if pipeline is None:
                pipeline, load = pipeline_of(run), run
                first, learning = late_mean(run, "seconds"), late_mean(run, "seconds/learn")
            simulated = simulate(replace(pipeline, staleness=k), recorded(load)).seconds
            seconds, alone = steady("seconds"), generation_alone(options, Path(folder), k, begin)
            parts = [steady(f"seconds/{part}") for part in ("rollout", "learn", "publish")]
            cells = [f"{seconds:.3f}", f"{first / seconds:.2f} ×", *(f"{part:.3f}" for part in parts), f"{alone:.3f}"]
            cells += [f"{max(alone, learning) / seconds:.0%}", f"{simulated:.2f}"]
            lines.append(f"| {k} | " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    return lines


def generation_alone(options: argparse.Namespace, folder: Path, staleness: int | str, begin: dict[str, Any]) -> float:
    """Seconds of a step whose learner computes nothing after its first update."""
    from turnwise.training import engines

    def make(*given: Any, **named: Any) -> Any:
        learner: Any = before(*given, **named)
        compute, known = learner.update, dict[str, float]()

        def update(batch: Any, objective: Any, while_waiting: Callable[[], object] | None = None) -> dict[str, float]:
            if not known:
                known.update(compute(batch, objective, while_waiting))
            elif while_waiting is not None:
                while_waiting()
            return dict(known)

        learner.update = update
        return learner

    before, engines.make_learner = engines.make_learner, make
    try:
        run = trained(options, folder, run_name("alone", staleness), staleness=staleness, **begin)
        return late_mean(run, "seconds", staleness)
    finally:
        engines.make_learner = before


def equal_time(options: argparse.Namespace) -> list[str]:
    """Every staleness with as many steps as the synchronous run, and with as many as fit into its time; each seed. All runs of a
    seed start from one cold start."""
    rows = Path(options.rows) if options.rows else None
    known = [json.loads(line) for line in rows.read_text().splitlines()] if rows and rows.is_file() else []
    done = {(row["seed"], row["staleness"], row["equal"]): row for row in known}
    with tempfile.TemporaryDirectory() as folder:

        def row(seed: int, k: int | str, equal: str, steps: int) -> dict[str, Any]:
            if (seed, k, equal) not in done:
                initial = Path(folder) / run_name(f"{seed}-steps-", 0) / "initial"
                start = {"model": str(initial), "cold_steps": 0} if initial.is_dir() else {}
                changes = {"seed": seed, "staleness": k, "steps": steps, "eval_tasks": 200, **start}
                run = trained(options, Path(folder), run_name(f"{seed}-{equal}-", k), **changes)
                after = json.loads((run.path / "evaluation_after.json").read_text())["summary"]["success"]
                seconds = round(sum(value for _, value in run.series("seconds")), 2)
                about = {"seed": seed, "staleness": k, "equal": equal, "steps": steps}
                about["age"] = round(late_mean(run, "staleness", k), 2)
                done[seed, k, equal] = {**about, "seconds": seconds, "success": after}
                line = json.dumps(done[seed, k, equal])
                print(line, flush=True)
                if rows:
                    with rows.open("a", encoding="utf-8") as file:
                        file.write(line + "\n")
            return done[seed, k, equal]

        for seed in options.seeds:
            base = row(seed, 0, "steps", options.steps)
            for k in [k for k in options.staleness if k]:
                same = row(seed, k, "steps", options.steps)
                row(seed, k, "time", round(options.steps * base["seconds"] / same["seconds"]))
    return equal_time_table(list(done.values()))


def equal_time_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Means over seeds, with 95 % intervals (Student)."""
    lines = [
        "| staleness | equal | steps | seconds | steps/s, of synchronous | age of a token | held-out success |",
        "|---|---|---|---|---|---|---|",
    ]
    rate = lambda row: row["steps"] / row["seconds"]  # noqa: E731
    base = {row["seed"]: rate(row) for row in rows if row["staleness"] == 0}
    for k, equal in sorted({(row["staleness"], row["equal"]) for row in rows}, key=str):
        found = [row for row in rows if (row["staleness"], row["equal"]) == (k, equal)]
        mean = lambda values: statistics.mean(values)  # noqa: E731
        success = [row["success"] for row in found]
        t = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}.get(len(found), 2.0)
        half = t * statistics.stdev(success) / len(found) ** 0.5 if len(found) > 1 else 0.0
        ratio = mean([rate(row) / base[row["seed"]] for row in found if row["seed"] in base])
        cells = f"{mean([r['steps'] for r in found]):.0f} | {mean([r['seconds'] for r in found]):.0f} | {ratio:.2f} ×"
        cells += f" | {mean([r['age'] for r in found]):.1f}"
        lines.append(f"| {k} | {equal} | {cells} | {mean(success):.1%} ± {100 * half:.1f} ({len(found)} seeds) |")
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
    parser.add_argument(
        "--staleness",
        type=lambda text: Staleness.parse(text).plain(),
        nargs="+",
        default=[0, CONTINUOUS, 1, 4],
        help="0 0,continuous 4 4,drop 4,keep",
    )
    parser.add_argument(
        "--difficulty", type=int, default=1, help="of the environment; in lookup the tool calls of an episode"
    )
    parser.add_argument("--env", choices=ENVIRONMENTS, default="calculator")
    parser.add_argument("--no-delay", action="store_true", help="the environment as it is, without slow tools")
    parser.add_argument("--generator", nargs="*", default=[], help="where to sample, as in a run")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--model", default="", help="a trained policy from which --measure starts; else it trains one")
    parser.add_argument("--equal-time", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rows", default="", help="a file of rows of --equal-time, to which new ones are added")
    options = parser.parse_args(argv)
    options.generator = tuple(options.generator)
    if options.measure and (
        short := [k for k in options.staleness if options.steps < 3 * Staleness.parse(k).limit + 4]
    ):
        least = 3 * Staleness.parse(short[0]).limit + 4
        parser.error(
            f"--steps {options.steps} leaves no steady part at staleness {short[0]}: write --steps {least} or more"
        )
    work: Callable[[argparse.Namespace], list[str]] = lambda _: projection()  # noqa: E731
    if options.run:
        work = lambda chosen: from_run(RunReader(chosen.run))  # noqa: E731
    lines = (equal_time if options.equal_time else measure if options.measure else work)(options)
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
