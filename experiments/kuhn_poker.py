"""Kuhn poker by self-play: the exact exploitability of the policy, for variants of one recipe, several runs side by side.

    python experiments/kuhn_poker.py --seeds 0 1 2 3 4 --jobs 2
    python experiments/kuhn_poker.py --table

Plain self-play by policy gradient circles the equilibrium. Here a KL penalty holds the policy near its first one, and its weight
and the learning rate fall during the run: the regularised game has one equilibrium, which attracts, and which moves to one of the
game. Near a first policy that bets by its card, a weight of 0.1 leaves an exploitability of 0.015 (exact gradients of a table),
0.05 one of 0.005 and 0.3 one of 0.044; a lower weight damps the noise of sampling less. Gains are summed over the tokens of an
episode: an average would change the stakes of long games. The demonstrations of the cold start bet more often with a higher card:
a model that has imitated random moves no longer reads its card. A row for each run goes to
``experiments/results/kuhn_poker.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import product
from pathlib import Path
from typing import Any

from parallel_runs import RESULTS, side_by_side
from processes import Row, read

from turnwise.algebra.advantage import Standardise
from turnwise.algebra.aggregate import Sum
from turnwise.algebra.gate import Clip
from turnwise.algebra.penalty import KL, WeightedPenalty
from turnwise.core.levels import TRAJECTORY
from turnwise.recipes.families.trust_region import StepSchedule
from turnwise.recipes.families.turn_credit import AgentReturnToGo, SameAgent
from turnwise.recipes.recipe import Recipe

SETTINGS: dict[str, Any] = {
    "env": "open_spiel:kuhn_poker,demonstrator=cards", "groups": 24, "group_size": 16, "schedule": "cosine", "eval_tasks": 1,
    "eval_every": 40, "hidden": 128, "layers": 2, "lr": 1e-3, "warmup": 20, "clip_norm": 10.0, "cold_steps": 100,
    "cold_batch": 96, "checkpoint_every": 200,
}  # fmt: skip
VARIANTS = {  # weight of the penalty at first and at last
    "held": (0.3, 0.08),
    "annealed": (0.3, 0.05),
    "lower": (0.3, 0.02),
    "damped": (0.3, 0.1),
    "constant": (0.2, 0.2),
    "free": (0.0, 0.0),
}
HOLD = 0.0  # further weight of the penalty at first
DROPS = 20  # in which the penalty falls


def self_play(hold: float = HOLD, start: float = 0.3, end: float = 0.05, steps: int = 700, clip: float = 0.2) -> Recipe:
    """Return-to-go of each seat minus its mean over the episodes of one deal; KL to the first policy with a falling weight.

    Aₖ = Gₖ − mean of G over (deal, seat);  J = Σₜ min(ρₜAₖ, clip(ρₜ)Aₖ) − λ(step) KL(π‖first)

    λ falls from ``hold + start`` to ``start`` in the first quarter of the run, and to ``end`` in the rest.
    """
    quarter = max(DROPS, steps // 4)
    held = StepSchedule(hold, 0, quarter // DROPS, 1 / DROPS, 0.0)
    floor = end / start if start else 1.0
    falling = StepSchedule(start, quarter, max(1, (steps - quarter) // DROPS), (1 - floor) / DROPS, floor)
    return Recipe(
        advantage=Standardise(AgentReturnToGo(), SameAgent("group"), scale=False),
        gate=Clip(clip, clip),
        penalties=(WeightedPenalty(held, KL("k2")), WeightedPenalty(falling, KL("k2"))) if start else (),
        aggregate=Sum(TRAJECTORY),
    )


def table(rows: list[Row]) -> str:
    """Exploitability at the end by variant and settings; of a run that was stopped, at its last evaluation, with the step."""
    heads = (
        "width, cold start",
        "penalty",
        "lr",
        "games a step",
        "steps",
        "before",
        "after, by seed",
        "unlisted",
        "seconds",
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    kinds: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["after"] or row["curve"]:
            own, options = row["settings"], row["settings"]["method_options"]
            levels = [options["hold"] + options["start"]] if options["hold"] else []
            penalty = " to ".join(f"{level:g}" for level in (*levels, options["start"], options["end"]))
            demos = "by card" if "demonstrator=cards" in own["env"] else "random"
            model = f"{own['hidden']}, {own['cold_steps']} of {own.get('cold_batch', 24)} {demos}"
            games = own["groups"] * own["group_size"]
            kinds.setdefault((model, penalty, f"{own['lr']:g}, {own['schedule']}", games, own["steps"]), []).append(row)
    last = lambda row: row["after"]["exact"]["exploitability"] if row["after"] else row["curve"][-1][2]  # noqa: E731
    step = lambda row: "" if row["after"] else f", step {row['curve'][-1][0]}"  # noqa: E731
    for key, found in sorted(kinds.items(), key=lambda item: statistics.mean(map(last, item[1]))):
        found.sort(key=lambda row: row["settings"]["seed"])
        first = statistics.mean(row["before"]["exact"]["exploitability"] for row in found)
        illegal = max((row["after"] or row["before"])["exact"]["unlisted"] for row in found)
        each = ", ".join(f"{last(row):.3f} ({row['settings']['seed']}{step(row)})" for row in found)
        seconds = max(row["seconds"] for row in found)
        cells = (*key, f"{first:.3f}", each, f"{illegal:.1e}", seconds)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variants", nargs="+", default=["damped"], choices=list(VARIANTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[750])
    parser.add_argument("--lr", type=float, nargs="+", default=[SETTINGS["lr"]])
    parser.add_argument("--hold", type=float, default=HOLD, help="further weight of the penalty at first")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="other settings")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3600.0, help="runs are stopped after this time")
    parser.add_argument("--out", default="runs")
    parser.add_argument("--results", type=Path, default=RESULTS / "kuhn_poker.jsonl")
    parser.add_argument("--table", action="store_true", help="print the rows and run nothing")
    chosen = parser.parse_args()
    runs = []
    more = {key: json.loads(value) for key, _, value in (pair.partition("=") for pair in chosen.set)}
    for seed, variant, steps, lr in product(chosen.seeds, chosen.variants, chosen.steps, chosen.lr):
        start, end = VARIANTS[variant]
        options = {"hold": chosen.hold, "start": start, "end": end, "steps": steps}
        method = f"{Path(__file__).resolve()}:self_play"
        own = {**SETTINGS, **more, "seed": seed, "steps": steps, "lr": lr, "method": method, "method_options": options}
        name = "-".join(
            [
                "kuhn",
                variant,
                str(chosen.hold),
                f"{lr:g}",
                str(steps),
                *(f"{key}{value}" for key, value in more.items() if key != "env"),
                str(seed),
            ]
        )
        runs.append(({"variant": variant}, own, name))
    if not chosen.table:
        side_by_side(runs, chosen.results, chosen.out, chosen.jobs, chosen.seconds, "eval/exploitability")
    print(table(read([chosen.results])))


if __name__ == "__main__":
    main()
