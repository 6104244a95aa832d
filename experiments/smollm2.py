"""RL from verifiable rewards on a pretrained model, SmolLM2-135M. Writes docs/results.md and its figure.

    python experiments/smollm2.py --tasks calculator lookup --methods grpo gspo --seeds 0 1 2 --jobs 4
        --rows experiments/results/smollm2.jsonl
    python experiments/smollm2.py --cold-only --tasks countdown --set cold-steps=300
        only the cold starts, with other settings
    python experiments/smollm2.py --table experiments/results/smollm2.jsonl --write docs/results.md

All methods of a task and a seed start from one cold start and have the same budget: settings belong to a task (``TASKS``), never
to a method. A method whose requirements a task does not meet is skipped with a message. On one large GPU several runs share the
device (``--jobs``). A row is written as soon as its run ends, and runs that the rows already contain are skipped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shlex
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Hashable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

import processes  # noqa: E402

from turnwise.errors import SettingError  # noqa: E402
from turnwise.maths.statistics import wilson  # noqa: E402
from turnwise.training import refusals  # noqa: E402
from turnwise.training.plan import RunPlan, resolve_settings  # noqa: E402

STEP_METRICS = {"": "seconds", "gather": "seconds/rollout", "learn": "seconds/learn", "publish": "seconds/publish"}
BUDGET = {
    "cold-steps": 30, "cold-batch": 32, "cold-lr": 1e-4, "steps": 60, "groups": 16, "group-size": 8, "lr": 1e-5,
    "schedule": "constant", "context": 512, "max-tokens": 64, "slots": 192, "eval-every": 10, "eval-tasks": 100,
}  # fmt: skip
TASKS: dict[str, dict[str, Any]] = {
    "calculator": {"env": "calculator"},
    "lookup": {"env": "lookup"},
    # After thirty supervised steps on all difficulties the policy is no better than a random one, and RL from there first finds
    # that "+" is right most often. So: two numbers, and a cold start long enough to condition on the target. Steps are cheap.
    "countdown": {
        "env": "countdown", "difficulty": 1, "cold-steps": 400, "cold-demos": 12800, "steps": 150, "lr": 2e-5,
        "max-tokens": 16, "context": 128, "eval-every": 25,
    },
    # The model can hardly add, so it must learn to from the demonstrations, half of which are near misses.
    "chain_sum": {
        "env": "reasoning_gym:chain_sum,max_terms=2,max_digits=2", "cold-steps": 400, "cold-demos": 12800, "steps": 150,
        "lr": 2e-5, "max-tokens": 16, "context": 128, "eval-every": 25,
    },
}  # fmt: skip
METHODS = ("grpo", "gspo", "st_ppo", "gigpo", "igpo")
COLD_START_SETTINGS = ("env", "model", "difficulty", "context", "hidden", "layers", "vocabulary")  # and "cold-..."
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}  # 97.5 % quantiles of Student's t, by degrees of freedom
Row = dict[str, Any]


# ---------------------------------------------------------------------------- runs


def budget(task: str, model: str, given: dict[str, str]) -> dict[str, str]:
    """All settings of a task's runs as a row stores them: the model by name, without its folder."""
    if task not in TASKS:
        raise SystemExit(f"there is no task {task!r}; write one of {', '.join(TASKS)}")
    settings = {**BUDGET, **TASKS[task], **given, "model": Path(model).name}
    return {name: str(value) for name, value in settings.items()}


def refusal(method: str, settings: dict[str, str]) -> str:
    """Why this method cannot be run on the task; empty if it can."""
    own = {name.replace("-", "_"): value for name, value in settings.items() if name != "model"}
    try:
        chosen = resolve_settings({**own, "method": method})
        refusals.refuse(RunPlan(chosen), refusals.REQUIREMENTS)
    except SettingError as why:
        return str(why)
    return ""


def key(row: Row) -> tuple[Hashable, ...]:
    """The identity of a run: equal keys are the same run."""
    return (row["task"], row["method"], row["seed"], *sorted(row["settings"].items()))


def start_name(task: str, seed: int, settings: dict[str, str]) -> str:
    """The folder of a cold start; different settings give different names."""
    own = sorted((n, v) for n, v in settings.items() if n in COLD_START_SETTINGS or n.startswith("cold"))
    return f"cold-{task}-{seed}-{hashlib.sha256(repr(own).encode()).hexdigest()[:8]}"


def command(method: str, settings: dict[str, str], seed: int) -> list[str]:
    return ["turnwise", "train", method, *(f"--{name}={value}" for name, value in settings.items()), f"--seed={seed}"]


class Runs:
    """Cold starts and the runs from them, as jobs of a schedule."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.lock = options, threading.Lock()
        self.given = dict(pair.split("=", 1) for pair in options.set)

    def jobs(self) -> list[processes.Job]:
        finished = {key(row) for row in processes.read([self.options.rows])}
        made: dict[Hashable, processes.Job] = {}
        for task in self.options.tasks:
            settings = budget(task, self.options.model, self.given)
            for method in self.options.methods:
                if why := refusal(method, settings):
                    print(f"{task}, {method}: skipped: {why}", flush=True)
                    continue
                for seed in self.options.seeds:
                    row = {"task": task, "method": method, "seed": seed, "settings": settings}
                    if key(row) in finished:
                        continue
                    start = self.start(task, seed, settings)
                    made[start.key] = start
                    if not self.options.cold_only:
                        made[key(row)] = self.run(row, start.key)
        return list(made.values())

    def call(self, method: str, settings: dict[str, str], seed: int, name: str, **more: Any) -> Row:
        line = command(method, {**settings, "model": self.options.model, **more}, seed)
        print("$", shlex.join(line), flush=True)
        last = more.get("steps", settings["steps"])
        own = [f"--out={self.options.runs}", f"--name={name}", f"--checkpoint-every={last}", "--trackers=", "--json"]
        shutil.rmtree(self.options.runs / name, ignore_errors=True)  # remains of a stopped run
        return processes.call([sys.executable, "-m", "turnwise.cli.main", *line[1:], *own])

    def start(self, task: str, seed: int, settings: dict[str, str]) -> processes.Job:
        """The cold start that all methods of a task and a seed share."""
        name = start_name(task, seed, settings)
        folder = self.options.runs / name

        def work(_: Any) -> Path | None:
            if not (folder / "summary.json").is_file():
                tasks = settings["eval-tasks"] if self.options.cold_only else 1
                found = self.call(
                    "reinforce", settings, seed, name, **{"steps": 1, "eval-every": 0, "eval-tasks": tasks}
                )
                if "error" in found:
                    print(f"{name}: {found['error']}", file=sys.stderr, flush=True)
                    return None
                tidy(folder, keep="initial")
                if self.options.cold_only:
                    print(f"{task}, seed {seed}: starts at {format_success(found['success_before'])}", flush=True)
            return folder / "initial"

        return processes.Job(name, work)

    def run(self, row: Row, start: Hashable) -> processes.Job:
        name = f"{start}-{row['method']}-{hashlib.sha256(repr(key(row)).encode()).hexdigest()[:8]}"

        def work(done: dict[Hashable, Any]) -> None:
            if done[start] is None:
                return
            more = {"model": done[start], "cold-steps": 0}
            found = self.call(row["method"], row["settings"], row["seed"], name, **more)
            if "error" in found:
                print(f"{name}: {found['error']}", file=sys.stderr, flush=True)
                return
            whole = {**row, **result(self.options.runs / name)}
            tidy(self.options.runs / name)
            with self.lock, self.options.rows.open("a") as file:
                file.write(json.dumps(whole) + "\n")
            print(row["task"], row["method"], row["seed"], whole["before"][0], "->", whole["after"][0], flush=True)

        return processes.Job(key(row), work, (start,), float(row["settings"]["steps"]))


def tidy(run: Path, keep: str = "") -> None:
    """Delete models and checkpoints of a run, which take gigabytes; only the row is kept."""
    for part in {"initial", "model", "checkpoints"} - {keep}:
        shutil.rmtree(run / part, ignore_errors=True)


def result(run: Path) -> Row:
    """The results of a run, as its row stores them."""
    found = json.loads((run / "summary.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "seconds/learn" in line]
    before, after = found["success_before"], found["success_after"]
    curve = [(line["step"], line["eval/success"]) for line in lines if "eval/success" in line]
    middle = lambda name: sorted(s[name] for s in steps)[len(steps) // 2]  # noqa: E731
    return {
        "before": [before["success"], *before["interval"]],
        "after": [after["success"], *after["interval"]],
        "curve": [(0, before["success"]), *curve, (found["steps"], after["success"])],
        "tokens": found["tokens"],
        "seconds": {name: round(value, 1) for name, value in found["seconds"].items()},
        "step": {name: round(middle(metric), 3) for name, metric in STEP_METRICS.items()},
        "mismatch": statistics.fmean(s["mismatch/mean_abs"] for s in steps),
        "engines": found.get("engines", {}),
    }


# -------------------------------------------------------------------------- tables


def format_success(found: Row) -> str:
    low, high = found["interval"]
    return f"{found['success']:.0%} [{low:.0%}, {high:.0%}]"


def kinds(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows by task and settings, in the order of ``TASKS``; settings other than the current ones are numbered."""
    found: dict[tuple[Hashable, ...], list[Row]] = {}
    order_of_tasks = list(TASKS)
    for r in sorted(rows, key=lambda r: order_of_tasks.index(r["task"])):
        found.setdefault((r["task"], *sorted(r["settings"].items())), []).append(r)
    named: dict[str, list[Row]] = {}
    for mine in found.values():
        task, model = mine[0]["task"], mine[0]["settings"]["model"]
        now = mine[0]["settings"] == budget(task, model, {})
        tries = sum(name.startswith(f"{task}, tried") for name in named)
        named[task if now and task not in named else f"{task}, tried {tries + 1}"] = mine
    return named


def differences(settings: dict[str, str]) -> str:
    """The settings that differ from the common budget."""
    common = {name: str(value) for name, value in BUDGET.items()} | {"model": settings["model"]}
    return ", ".join(f"`--{n} {v}`" for n, v in settings.items() if common.get(n) != v)


def over_seeds(rows: list[Row], when: str) -> tuple[float, float, float]:
    """The mean over seeds and a 95 % interval, the wider of two: over seeds (Student), and over all their tasks (Wilson)."""
    values = [r[when][0] for r in rows]
    trials = sum(int(r["settings"]["eval-tasks"]) for r in rows)
    found = wilson(round(math.fsum(v * trials / len(rows) for v in values)), trials)
    mean, low, high = statistics.fmean(values), found.low, found.high
    if len(values) > 1:
        half = STUDENT.get(len(values) - 1, 2.571) * statistics.stdev(values) / len(values) ** 0.5
        low, high = min(low, max(0.0, mean - half)), max(high, min(1.0, mean + half))
    return mean, low, high


def comparison(rows: list[Row]) -> str:
    """One line per task and method."""
    lines = ["| task | method | seeds | RL steps | before | after | sampled tokens | RL, seconds |", "|" + "---|" * 8]
    for name, mine in kinds(rows).items():
        for method in order(mine):
            own = [r for r in mine if r["method"] == method]
            cells = [f"{x[0]:.0%} [{x[1]:.0%}, {x[2]:.0%}]" for x in (over_seeds(own, w) for w in ("before", "after"))]
            tokens = statistics.fmean(r["tokens"] for r in own)
            seconds = statistics.median(r["seconds"]["learn"] for r in own)
            lines.append(
                f"| {name} | {method} | {len(own)} | {own[0]['settings']['steps']} | {' | '.join(cells)} | {tokens:,.0f} "
                f"| {seconds:.0f} |"
            )
    return "\n".join(lines)


def order(rows: list[Row]) -> list[str]:
    ran = {r["method"] for r in rows}
    return [m for m in METHODS if m in ran] + sorted(ran - set(METHODS))


def report(rows: list[Row]) -> str:
    own = [f"- {name}: {differences(mine[0]['settings'])}" for name, mine in kinds(rows).items()]
    return "\n".join(
        [
            f"Common settings: `{' '.join(f'--{name} {value}' for name, value in BUDGET.items())}`. A task's own:\n",
            *own,
            "",
            comparison(rows),
            "\nEach run is a line of `experiments/results/smollm2.jsonl`.",
        ]
    )


def picture(rows: list[Row], path: Path) -> None:
    """One panel per task: the mean over a method's seeds, and each seed as a thin line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = kinds(rows)
    figure, grid = pyplot.subplots(1, len(panels), figsize=(3.2 * len(panels), 3.2), sharey=True, squeeze=False)
    for axes, (name, mine) in zip(grid[0], panels.items()):
        for method in order(mine):
            curves = [r["curve"] for r in mine if r["method"] == method]
            colour = f"C{(*METHODS, method).index(method)}"
            for each in curves if len(curves) > 1 else ():
                axes.plot(*zip(*each), color=colour, alpha=0.3, linewidth=0.7)
            mean = [(points[0][0], statistics.fmean(y for _, y in points)) for points in zip(*curves)]
            axes.plot(*zip(*mean), color=colour, marker="o", markersize=3, label=method)
        episodes = int(mine[0]["settings"]["groups"]) * int(mine[0]["settings"]["group-size"])
        axes.set(title=name, xlabel=f"RL steps of {episodes} episodes", ylim=(0, 1.02))
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    grid[0][0].set(ylabel="held-out success")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def write(rows: list[Row], page: Path) -> None:
    """Write the report between the markers of the page, and the figure beside it."""
    head, after = page.read_text().split("<!-- rows -->\n")
    tail = after.split("<!-- end -->\n")[1]
    page.write_text(f"{head}<!-- rows -->\n{report(rows)}\n<!-- end -->\n{tail}")
    picture(rows, page.with_suffix(".png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--model", default="smollm2", help="a name or a folder; rows keep only the name")
    parser.add_argument("--set", nargs="*", default=[], help="other settings of all runs: cold-steps=300 lr=5e-5")
    parser.add_argument("--cold-only", action="store_true", help="only make cold starts, and print the success of each")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9, help="start nothing new after that time")
    parser.add_argument("--runs", type=Path, default=Path("runs") / "smollm2")
    parser.add_argument("--rows", type=Path, default=Path("runs") / "smollm2.jsonl")
    parser.add_argument("--table", type=Path, nargs="+", help="only show finished rows")
    parser.add_argument(
        "--write", type=Path, help="write the report between the markers of this page, and the figure beside it"
    )
    options = parser.parse_args()
    if not options.table:
        options.rows.parent.mkdir(parents=True, exist_ok=True)
        processes.schedule(Runs(options).jobs(), options.jobs, time.monotonic() + 60 * options.minutes)
    if rows := processes.read(options.table or [options.rows]):
        print(report(rows))
        if options.write:
            write(rows, options.write)


if __name__ == "__main__":
    main()
