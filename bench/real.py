"""A real language model learns: SmolLM2-135M by RL from verifiable rewards. Writes docs/results.md and its picture.

    python bench/real.py --tasks calculator lookup --methods grpo gspo --seeds 0 1 2 --rows bench/results/smollm2.jsonl
    python bench/real.py --table bench/results/smollm2.jsonl --write docs/results.md

Each run is one ``turnwise train`` command, printed before it starts; a row is written as soon as it ends. On one large GPU
several runs go side by side (``--jobs``).
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BUDGET = {
    "model": "smollm2", "cold-steps": 30, "cold-batch": 32, "cold-lr": 1e-4, "steps": 60, "groups": 16, "group-size": 8,
    "lr": 1e-5, "schedule": "constant", "context": 512, "max-tokens": 64, "slots": 192, "eval-every": 10, "eval-tasks": 100,
}  # fmt: skip
Row = dict[str, Any]


def command(task: str, method: str, seed: int) -> list[str]:
    flags = {**BUDGET, "env": task, "seed": seed}
    return ["turnwise", "train", method, *(f"--{name}={value}" for name, value in flags.items())]


def row(run: Path, task: str, method: str, seed: int) -> Row:
    """What is kept of a run."""
    found = json.loads((run / "summary.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "seconds/learn" in line]
    before, after = found["success_before"], found["success_after"]
    curve = [(line["step"], line["eval/success"]) for line in lines if "eval/success" in line]
    middle = lambda name: sorted(s[name] for s in steps)[len(steps) // 2]  # noqa: E731
    return {
        "task": task,
        "method": method,
        "seed": seed,
        "before": [before["success"], *before["interval"]],
        "after": [after["success"], *after["interval"]],
        "curve": [(0, before["success"]), *curve, (found["steps"], after["success"])],
        "tokens": found["tokens"],
        "seconds": {name: round(value, 1) for name, value in found["seconds"].items()},
        "step": {name: round(middle(f"seconds{name and '/' + name}"), 3) for name in ("", "gather", "learn", "publish")},
        "mismatch": sum(s["mismatch/size"] for s in steps) / len(steps),
        "engines": found.get("engines", {}),
    }


def play(options: argparse.Namespace) -> None:
    def one(task: str, method: str, seed: int) -> None:
        name = f"{task}-{method}-{seed}"
        line = command(task, method, seed)
        print("$", shlex.join(line), flush=True)
        own = [f"--out={options.runs}", f"--name={name}", "--json"]
        done = subprocess.run([sys.executable, "-m", "turnwise.cli", *line[1:], *own], capture_output=True, text=True)
        if done.returncode:
            print(name, done.stderr.strip().splitlines()[-1:], flush=True)
            return
        with options.rows.open("a") as file:
            file.write(json.dumps(row(options.runs / name, task, method, seed)) + "\n")

    with ThreadPoolExecutor(options.jobs) as pool:
        asked = [(t, m, s) for s in options.seeds for t in options.tasks for m in options.methods]
        list(pool.map(lambda each: one(*each), asked))


def table(rows: list[Row]) -> str:
    lines = ["| task | method | seed | before | after 60 steps | sampled tokens | RL, seconds | a step: gather + learn |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for r in rows:
        said = [f"{x[0]:.0%} [{x[1]:.0%}, {x[2]:.0%}]" for x in (r["before"], r["after"])]
        step = f"{r['step']['gather']:.2f} s + {r['step']['learn']:.2f} s"
        cells = (r["task"], r["method"], r["seed"], *said, f"{r['tokens']:,}", f"{r['seconds']['learn']:.0f}", step)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def picture(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6))
    for r in rows:
        axes.plot(*zip(*r["curve"]), marker="o", markersize=3, label=f"{r['task']}, {r['method']}")
    axes.set(xlabel="RL steps of 128 episodes", ylabel="held-out success", ylim=(0, 1.02))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["calculator", "lookup", "countdown"])
    parser.add_argument("--methods", nargs="+", default=["grpo"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=Path("runs") / "smollm2")
    parser.add_argument("--rows", type=Path, default=Path("runs") / "smollm2.jsonl")
    parser.add_argument("--table", type=Path, help="only show finished rows")
    parser.add_argument("--write", type=Path, help="put the table into this page, between its marks, and the picture beside it")
    options = parser.parse_args()
    if not options.table:
        options.rows.parent.mkdir(parents=True, exist_ok=True)
        play(options)
    rows = [json.loads(line) for line in (options.table or options.rows).read_text().splitlines()]
    print(table(rows))
    if options.write:
        head, rest = options.write.read_text().split("<!-- rows -->\n")
        tail = rest.split("<!-- end -->\n")[1]
        options.write.write_text(f"{head}<!-- rows -->\n{table(rows)}\n<!-- end -->\n{tail}")
        picture(rows, options.write.with_suffix(".png"))


if __name__ == "__main__":
    main()
