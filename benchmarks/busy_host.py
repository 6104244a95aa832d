"""What the host costs where a small model makes the GPU wait: 256 episodes a step whose tools answer at once.

    python benchmarks/busy_host.py --device cuda --hidden 512 --layers 8     # about two minutes with a GPU and 16 cores
    python benchmarks/busy_host.py --parts host --env lookup                 # without any model
    python benchmarks/busy_host.py --parts run --groups 8 --steps 8 --hidden 64 --layers 2      # small, on a CPU

``host`` puts a policy that repeats recorded turns in the place of the model: what is left are episodes, rendering, tools and
what passes between processes. Wall time and processor time of this process, a turn. ``run`` trains the tiny model: steps and
sampled tokens a second in the later steps, then a shorter run with a profile: the spans of ``--profile``, and where the main
thread was, by samples of its stack. All variants begin with the same trained policy.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from turnwise.core.records import Completion, Sampling, Stop, Trajectory, Turn
from turnwise.environments.builtin.calculator import Calculator
from turnwise.inspector.queries import RunReader
from turnwise.tools import python

GROUP_SIZE = 8
CORES = len(os.sched_getaffinity(0))
VARIANTS: dict[str, dict[str, Any]] = {
    "1 process": {"env_processes": 1},
    f"{CORES} processes": {"env_processes": CORES},
}
READY_OR_NOT: dict[str, dict[str, Any]] = {  # those without come last: the interpreters of this process then stay so
    **{f"{name}, interpreters ready": changes for name, changes in VARIANTS.items()},
    f"{CORES} processes, ready, staleness 2": {"env_processes": CORES, "staleness": "2"},
    **{f"{name}, not ready": {**changes, "env": f"{Path(__file__).resolve()}:Unprepared"} for name, changes in VARIANTS.items()},
}
SAMPLE_SECONDS = 0.002
TOP = 16


class Unprepared(Calculator):
    """``calculator`` whose interpreters start when an episode asks for one. A class, because it is imported where it plays."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        python.READY = 0


class StackSamples:
    """Where the main thread is, a few hundred times a second: by innermost function, and by every function of ours around it.
    ``within``: only while this function is on the stack."""

    def __init__(self, within: str = "") -> None:
        self.within = within
        self.inner, self.around, self.count = Counter[str](), Counter[str](), 0
        self._end = threading.Event()

    def __enter__(self) -> StackSamples:
        threading.Thread(target=self._sample, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()

    def _sample(self) -> None:
        main = threading.main_thread().ident
        while not self._end.wait(SAMPLE_SECONDS):
            frame: Any = sys._current_frames().get(main or 0)
            names = list[str]()
            while frame is not None:
                names.append(_place(frame.f_code))
                frame = frame.f_back
            if self.within and not any(name.endswith(f":{self.within}") for name in names):
                continue
            self.count += 1
            self.inner[names[0]] += 1
            self.around.update({name for name in names if name.startswith("turnwise/")})

    def lines(self) -> list[str]:
        share = lambda n: f"{100 * n / max(1, self.count):5.1f} %"  # noqa: E731
        rows = [f"{share(n)}  {name}" for name, n in self.inner.most_common(TOP)]
        within = [f"{share(n)}  {name}" for name, n in self.around.most_common(2 * TOP)]
        return [f"innermost, of {self.count} samples:", *rows, "anywhere on the stack:", *within]


def _place(code: Any) -> str:
    path = code.co_filename
    for root in ("/turnwise/", "/site-packages/", f"/python{sys.version_info.major}.{sys.version_info.minor}/"):
        _, hit, tail = path.rpartition(root)
        if hit:
            path = ("turnwise/" if root == "/turnwise/" else "") + tail
            break
    return f"{path}:{code.co_name}"


# --------------------------------------------------------------- the host alone


class Replay:
    """A policy that repeats the turns of a recorded episode."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = iter(turns)

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        await asyncio.sleep(0)  # as a generator, it answers in another round of the event loop
        tokens = list(next(self._turns).tokens)
        n = len(tokens)
        return Completion(tokens, [-0.5] * n, [0.0] * n, [0] * n, Stop.TOKEN)

    def close(self) -> None: ...


def host(options: argparse.Namespace) -> None:
    from turnwise.config.settings import Settings
    from turnwise.rollout.scripted import play_scripted
    from turnwise.training import build
    from turnwise.training.plan import EnvSpec

    settings = Settings(env=options.env, context=2048)
    spec = EnvSpec.from_settings(settings)
    renderer = build.make_renderer(settings, build.load_tokenizer(settings, spec))
    tasks = [spec.tasks("train").draw(n // GROUP_SIZE) for n in range(options.groups * GROUP_SIZE)]
    keys = [f"{n // GROUP_SIZE}.{n % GROUP_SIZE}" for n in range(len(tasks))]

    async def record() -> list[Trajectory]:
        plays = (play_scripted("demonstrator", spec.make(t), k, t, renderer, spec.limits) for k, t in zip(keys, tasks))
        return list(await asyncio.gather(*plays))

    recorded = asyncio.run(record())
    print(f"host alone: {options.env}, {len(tasks)} episodes at once, medians of {options.repeats}")
    for name, changes in VARIANTS.items():
        spec = EnvSpec.from_settings(Settings(env=options.env, context=2048, **changes))
        play = build.make_play(spec, renderer, build.sampling_settings(settings))

        async def rounds(play: Any = play) -> tuple[list[float], list[float], list[Trajectory]]:
            wall, cpu, played = list[float](), list[float](), list[Trajectory]()
            for _ in range(options.repeats + 1):  # the first one starts processes and fills caches
                gc.collect()
                began, used = time.perf_counter(), time.process_time()
                plays = (play(k, t, Replay(r.turns)) for k, t, r in zip(keys, tasks, recorded))
                played = list(await asyncio.gather(*plays))
                wall.append(time.perf_counter() - began)
                cpu.append(time.process_time() - used)
            return wall[1:], cpu[1:], played

        with StackSamples() as samples:
            wall, cpu, played = asyncio.run(rounds())
        turns = sum(len(t.turns) for t in played)
        same = all([x.tokens for x in a.turns] == [x.tokens for x in b.turns] for a, b in zip(played, recorded))
        print(
            f"{name:<16} {median(wall) / turns * 1e3:.3f} ms a turn, {median(cpu) / turns * 1e3:.3f} ms of this process's "
            f"processors, {turns} turns in {median(wall):.3f} s{'' if same else '; NOT THE RECORDED TURNS'}"
        )
        if options.samples:
            print("\n".join(samples.lines()))


# ---------------------------------------------------------------- whole runs


def trained(options: argparse.Namespace, folder: Path, name: str, **changes: Any) -> RunReader:
    from turnwise.training.api import train

    train(
        **{
            "method": "grpo", "env": options.env, "steps": options.steps, "groups": options.groups,
            "group_size": GROUP_SIZE, "eval_tasks": 0, "out": str(folder), "name": name, "trackers": (), "quiet": True,
            "device": options.device, "hidden": options.hidden, "layers": options.layers, **changes,
        }
    )  # fmt: skip
    return RunReader(folder / name)


def late(run: RunReader, name: str) -> float:
    """The median of a metric over the later two thirds of a run."""
    values = [value for row in run.metrics() if (value := row[name]) is not None]
    return median(values[len(values) // 3 :])


def runs(options: argparse.Namespace) -> None:
    print(f"whole runs: {options.env}, {options.groups} x {GROUP_SIZE} episodes a step, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        first = trained(options, Path(folder), "start", steps=2)
        print(f"a policy to begin with: {time.perf_counter() - began:.0f} s", flush=True)
        begin = {"model": str(first.path / "model"), "cold_steps": 0}
        base, pages = 0.0, list[str]()
        for number, (name, changes) in enumerate((READY_OR_NOT if options.interpreters else VARIANTS).items()):
            run = trained(options, Path(folder), f"run{number}", **begin, **changes)
            seconds, tokens = late(run, "seconds"), late(run, "tokens")
            turns = sum(row.turns for row in run.trajectories()) / options.steps
            parts = ", ".join(f"{part} {late(run, f'seconds/{part}'):.3f}" for part in ("rollout", "learn", "publish"))
            base = base or seconds
            print(
                f"{name:<32} {1 / seconds:.2f} steps a second ({base / seconds:.2f} x), {tokens / seconds:,.0f} sampled tokens "
                f"a second; {seconds:.3f} s a step ({parts}), {turns:.0f} turns, "
                f"{late(run, 'seconds/rollout') / turns * 1e3:.2f} ms of rollout a turn",
                flush=True,
            )
            if options.interpreters:
                continue
            with StackSamples("run_loop") as samples:
                brief = {"steps": max(6, options.steps // 2), "profile": True}
                run = trained(options, Path(folder), f"profile{number}", **begin, **changes, **brief)
            pages += [f"\n== {name}", (run.path / "profile.md").read_text(), *samples.lines()]
        print("\n".join(pages))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["host", "run"], choices=("host", "run"))
    parser.add_argument("--env", default="calculator")
    parser.add_argument("--groups", type=int, default=32, help=f"a step, of {GROUP_SIZE} episodes each")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--interpreters", action="store_true", help="with and without interpreters that wait; no profiles")
    parser.add_argument("--samples", action="store_true", help="where the main thread was, of the part host too")
    options = parser.parse_args()
    for part in options.parts:
        {"host": host, "run": runs}[part](options)


if __name__ == "__main__":
    main()
