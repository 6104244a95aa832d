"""How long the inspector takes on a large run: 100,000 trajectories and 10 million sampled tokens, made here.

    python benchmarks/inspector.py [--trajectories 100000] [--tokens 100] [--folder FOLDER]

Prints seconds of opening each view (in a process that has imported it) and of one token's factors, and bytes per token of the
kept columns. The run is synthetic: real record sizes, random numbers, rewards 0 or 1, the last steps with token columns.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from turnwise.core.records import Group, Task, Trajectory, Turn
from turnwise.inspector.page.blocks import ViewQuery
from turnwise.inspector.page.render import render_page
from turnwise.inspector.page.views.table import VIEWS, show_view
from turnwise.inspector.queries import RunReader
from turnwise.store.ledger import SqliteLedger
from turnwise.store.rundir import RunDir
from turnwise.store.token_columns import TokenColumns, encode_columns

GROUP_SIZE, GROUPS_PER_STEP, KEPT = 8, 32, 3


def trajectory(name: str, task: Task, tokens: int, rng: np.random.Generator, step: int) -> Trajectory:
    ids, logp = rng.integers(0, 32000, tokens).tolist(), (-rng.random(tokens)).astype(np.float32).tolist()
    good = bool(rng.random() < 0.4)
    half = tokens // 2
    parts = ((0, half, 0.0), (half, tokens, float(good)))
    turns = tuple(
        Turn((1, 2, 3), tuple(ids[a:b]), tuple(logp[a:b]), version=(step,) * (b - a), reward=r) for a, b, r in parts
    )
    messages = ({"role": "user", "content": "what is 17 plus 4?"}, {"role": "assistant", "content": "x" * 200})
    return Trajectory(name, task, turns, success=good, messages=messages)


def make_run(folder: Path, trajectories: int, tokens: int) -> None:
    rng = np.random.default_rng(0)
    run = RunDir.create(folder, "large", {"method": "dr_grpo", "env": "calculator", "steps": 1})
    steps = trajectories // (GROUP_SIZE * GROUPS_PER_STEP)
    with SqliteLedger(run.ledger) as ledger, run.metrics.open("w", encoding="utf-8") as metrics:
        for step in range(steps):
            groups = []
            for g in range(GROUPS_PER_STEP):
                key, task = str(step * GROUPS_PER_STEP + g), Task("calculator", int(rng.integers(0, 500)))
                members = tuple(trajectory(f"{key}.{i}", task, tokens, rng, step) for i in range(GROUP_SIZE))
                groups.append(Group(key, task, members))
                ledger.issue(key, task, step, step)
                ledger.finish(groups[-1], step)
            ledger.train([g.id for g in groups], step)
            if step >= steps - KEPT:
                ledger.keep_tokens(lambda groups=groups, step=step: [columns(groups, step, rng)], step, KEPT)
            metrics.write(
                json.dumps({"step": step + 1, "time": step, "seconds": 1.0, "reward": 0.4, "entropy": 1.0}) + "\n"
            )


def columns(groups: list[Group], step: int, rng: np.random.Generator) -> TokenColumns:
    members = [t for g in groups for t in g.trajectories]
    sizes = tuple(t.sampled for t in members)
    n = sum(sizes)
    advantage = np.repeat(rng.normal(size=len(members)).astype(np.float32), sizes)
    weight = np.full(n, 1 / n, np.float32)
    logp = np.concatenate([np.array(turn.logp, np.float32) for t in members for turn in t.turns])
    values = {"advantage": advantage, "weight": weight, "slope": -advantage * weight, "gate": np.ones(n, np.float32)}
    values |= {"logp": logp + rng.normal(0, 1e-3, n).astype(np.float32), "entropy": rng.random(n).astype(np.float32)}
    held = tuple((g.id, tuple(t.id for t in g.trajectories)) for g in groups)
    return TokenColumns(step, 0, tuple(t.id for t in members), sizes, values, held)


def seconds(work, repeats: int = 3) -> tuple[float, float]:
    """First and best time."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times[0], min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--folder", default="")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.folder or temporary)
        if not (folder / "large").exists():
            make_run(folder, options.trajectories, options.tokens)
        measure(folder / "large")


def measure(path: Path) -> None:
    import turnwise.inspector.page.step_cache  # noqa: F401 - imports torch, which is not what is measured

    with RunReader(path) as run:
        count, tokens = run.count_trajectories()
        print(f"{count:,} trajectories, {tokens:,} tokens, {run.run.ledger.stat().st_size / 2**20:.0f} MiB")
        step = run.kept_steps()[-1]
        update = run.token_columns(step)[0]
        print(f"columns: {len(encode_columns(update)[1]) / sum(update.sizes):.1f} bytes per token")
        name = update.trajectories[0]
    for view in VIEWS:
        with RunReader(path) as run:
            query = ViewQuery(trajectory=name) if view == "why" else ViewQuery()
            first, best = seconds(
                lambda run=run, view=view, q=query: render_page(show_view(view, run, q), run.name, [])
            )
            print(f"{view:<10} first {first:6.2f} s, again {best:6.2f} s")
    with RunReader(path) as run:
        for token in (0, 1, 2):
            query = ViewQuery(trajectory=name, step=step, token=token)
            first, best = seconds(lambda run=run, q=query: render_page(show_view("why", run, q), run.name, []), 1)
            print(f"factors of token {token}: {first:6.3f} s")


if __name__ == "__main__":
    main()
