"""Writes docs/learning.md, short, and docs/learning-all.md from the rows of finished sweeps. Knows rows; runs nothing."""

from __future__ import annotations

from collections.abc import Hashable
from statistics import fmean
from typing import Any

import learning_plan
from learning_change import change, mean_change
from learning_jobs import key
from processes import ROOT, Row, read

from turnwise import recipes

DEFAULT_ROWS = ROOT / "experiments/results/default.jsonl"
VALUES_ROWS = ROOT / "experiments/results/values.jsonl"
GENERATED = "<!-- Written by `make learning` from the rows in `experiments/results/`. Do not edit. -->"
ABOUT = """Held-out success of methods before and after a short run with a million parameters, and the change in points with its
95 % interval (Newcombe). A method *learns* if that interval lies above zero in every seed that was run. Most methods have
one seed: that shows that a method can learn here, not that it learns from every start, and not which of two is better.

## The default method

The eight baselines end within a few points of each other (100 steps each from the same cold starts), so the default is
the cheapest and simplest of them, `dr_grpo`: no critic, no reference model, no division by a group's standard
deviation. `dapo` takes longest, because it samples groups until all have a signal.

DEFAULTS

Five seeds of five of the default run reached 95 % and gained at least 53 points (`experiments/default_seeds.md`).

## Best and worst

Every method has the settings of its task; none was tuned for a method, except where the plan
(`experiments/learning_plan.py`) names one. Each line is one task: compare methods inside a line, not between lines.

TASKS

Notable:

- With one update on each fresh batch the importance ratio is 1, and many trust-region methods coincide. With two passes
  of four mini-batches the data is up to seven updates old, and they differ: there `opmd` and `rloo_kl` do not learn.
- On `keydoor`, whose reward comes 10 to 28 turns late, credit by state (`gigpo`, `hgpo`, `srgpo`) learns within 30
  steps.
- Methods that learn from files alone reach what on-policy methods reach only in a few cases (`orpo`, `cpo`, `otr`).
- Critics that learn from their own later estimates need a warm-up (`archer`), and so does `b_coder`.

[All methods, one line each](learning-all.md), with what was changed for a method that did not learn at first.
"""
ALL = """Every method of the [short page](learning.md), from the rows of finished sweeps; `python experiments/learning_sweep.py`
makes new ones. Where there are several seeds, the interval is that of the mean over them.

## Objectives

All methods start from the same cold-started model of a seed and have the same budget and learning rate (3e-4).
`see_upo` has its own optimiser steps, one for each turn.
"""

SPECIAL = """`python experiments/learning_sweep.py --plan` runs each of these methods in an environment that has what the method
needs (`experiments/learning_plan.py`, `experiments/worlds.py`). Methods on files learn from episodes of the
environment's scripted players and then play its held-out tasks.

What was changed because a method did not learn in a first run (chosen on seed 0; the longer runs of `echo` and
`polychromic_ppo` after both seeds):

- `gdpo` on `Graded` fell from 32 to 10 %: it weights every reward alike, and a wrong answer was paid for being clean
  and short. Now the other rewards are paid only with a right answer, as its paper advises.
- `mars` on `Duel` rose little (39 to 50 %): in self-play success hardly rises before play is perfect. Now heaps go up
  to 9 and held-out games are played against a random player. The learning rate of 1e-3 matters: with 3e-4 it went from
  20 to 25 %.
- `archer` lacked its paper's warm-up: critics that learn from their own later estimates first prefer whatever ends soon
  (`calculator`: 32 to 17 %). With 10 batches and 10 passes a batch for the critics first, it rises (32 to 57 % in 35
  steps). On `keydoor` that was not enough: a reward 10 to 28 turns away is too far for such critics.
- `information_consistency` does not read the verdict: it rises for some ten steps and then trades correctness for
  variety (31 to 26 % in 40 steps), so its runs are short.
- `pivotrl` with the threshold of 0.9 calls nearly every turn a pivot (509 of 512); it learned moves (48 to 92 %) and
  forgot the turn that opens the door (19 to 2 %), because a group that fails as a whole has no gradient. With
  `below=0.35`, 146 turns are pivots, the door reaches 90 %, and games follow.
- `discopop` with its paper's `beta` of 0.05 first learns the wrong order, because the loss rises with the margin up to
  1.4 nats and every run begins at 0. With `beta=1` that stretch ends at 0.07 nats.
- `trimpi` on `lookup` fell from 28 to 2 % with seed 1: the document disturbed a policy whose cold start has none. Now
  half of the cold start's prompts contain it (`worlds:Documented`), in place of the paper's pre-training.
- `digi_q` on `guess` stayed at 34 to 37 % (one seed; the cause was not looked for). Its runs are on `lookup` now.
- `echo` and `polychromic_ppo` gained 11 to 27 points in 60 steps, about the width of the interval. Their runs have 120
  steps and 200 tasks. `echo` branches at the paper's entropy of 3.5 nowhere here (the tiny model's tokens have 0.5), so
  its run sets `high` to 0.5 and `confident` to 6, untuned.

Not tried: `swarm` with two runs at the same time.
"""

VALUES = """`python experiments/values_learning.py` on `calculator`, each run with a cold start of its own; `ppo` for comparison.
`b_coder` with `alpha=1` ends without a right answer: the gaps of its Q are alpha times the gaps of log-probabilities,
so rewards of 0 and 1 allow gaps of 1 nat, and the policy becomes noise. Now alpha is 0.02 (chosen on seed 0), the
weight of the KL 0.001, and the value is fitted for 12 batches before the policy moves. These runs sample four answers
to a task and count all of them; "ranked first" counts the one that Q ranks first. With fresh actions `archer` ends as
with the step's own turns (`fresh=0`). Steering by ten times the value (`vas beta=10`) helps with one seed and hurts
with the other.
"""


def page(rows: list[Row]) -> str:
    """The short page: the default, and the ends of every task."""
    about = ABOUT.strip().replace("DEFAULTS", default_table(read([DEFAULT_ROWS]))).replace("TASKS", task_table(rows))
    return f"# Learning\n\n{GENERATED}\n\n{about}\n"


def whole_page(rows: list[Row]) -> str:
    """Every method, one line each."""
    plain, special = [r for r in rows if "why" not in r], [r for r in rows if "why" in r]
    parts = ["# Learning: all methods", GENERATED, ALL.strip()]
    parts += [table(plain)] if plain else []
    parts += ["## Credit, other data, preferences", SPECIAL.strip(), plan_table(special)]
    parts += ["## Values of tokens", VALUES.strip(), values_table(read([VALUES_ROWS]))]
    return "\n\n".join(parts) + "\n"


def task_table(rows: list[Row], ends: int = 3) -> str:
    """Tasks with at least ``2 · ends`` methods: how many learn, and those with the largest and the smallest change."""
    lines = ["| task | learn | largest change | smallest change |", "|---|--:|---|---|"]
    ended = {key(r) for r in rows if "why" in r and "error" not in r}
    current = [r for r in rows if "why" not in r or setting(r) == planned_setting(r["method"])]
    current = [r for r in current if "error" not in r or "why" not in r or key(r) not in ended]
    for task in dict.fromkeys(task_of(r) for r in current):
        inside = [r for r in current if task_of(r) == task]
        runs = {method: [r for r in inside if r["method"] == method] for method in ran(inside)}
        if len(runs) < 2 * ends:
            continue
        good = {method: [r for r in each if "error" not in r] for method, each in runs.items()}
        changes = {method: mean_change(each) for method, each in good.items() if each}
        order = [f"`{m}` {changes[m]}" for m in sorted(changes, key=lambda m, c=changes: -c[m].value)]
        count = f"{sum(learns(each) for each in runs.values())} of {len(runs)}"
        lines.append(f"| {task} | {count} | {', '.join(order[:ends])} | {', '.join(order[-ends:])} |")
    return "\n".join(lines)


def task_of(row: Row) -> str:
    """What runs must share to stand in one line of the short page."""
    return kind(row) if "why" not in row else f"{row['env'].removeprefix('worlds:')}: {row['why']}"


def values_table(rows: list[Row]) -> str:
    """One line for each run of experiments/values_learning.py."""
    lines = ["| run | seed | before | after |", "|---|--:|--:|--:|"]
    for row in sorted(rows, key=lambda row: (row["row"], row["seed"])):
        low, high = row["after"].get("interval") or (0.0, 0.0)
        shown = f"{row['after']['success'] or 0.0:.1%} [{low:.0%}, {high:.0%}]{ranked_first(row['after'])}"
        before = f"{row['before']['success']:.1%}{ranked_first(row['before'])}"
        lines.append(f"| {row['row']} | {row['seed']} | {before} | {shown} |")
    return "\n".join(lines)


def ranked_first(evaluation: Row) -> str:
    success = evaluation.get("reranked_success")
    return "" if success is None else f", ranked first {success:.1%}"


def default_table(rows: list[Row]) -> str:
    """The baselines, highest success first, with the time of a run against the default's."""
    by_method = {method: [r for r in rows if r["method"] == method] for method in ran(rows)}
    seconds = {method: fmean(r["seconds"] for r in runs) for method, runs in by_method.items()}
    lines = ["| method | seeds | after | change | time |", "|---|--:|--:|--:|--:|"]
    for method, runs in sorted(by_method.items(), key=lambda pair: -_mean(pair[1], "after")):
        time = seconds[method] / seconds["dr_grpo"]
        lines.append(f"| {method} | {len(runs)} | {_mean(runs, 'after'):.1%} | {mean_change(runs)} | {time:.1f} × |")
    return "\n".join(lines)


def table(rows: list[Row]) -> str:
    """One line per method, one pair of columns for each setting that was swept."""
    kinds = list(dict.fromkeys(kind(r) for r in rows))
    lines = [
        "| method | before | " + " | ".join(f"{k} | change" for k in kinds) + " |",
        "|---|---|" + "---|---|" * len(kinds),
    ]
    for method in ran(rows):
        runs = [r for r in rows if r["method"] == method]
        good = [r for r in runs if "error" not in r]
        cells = [cell([r for r in good if kind(r) == k], any(kind(r) == k for r in runs)) for k in kinds]
        cells = [each.rpartition(" | ")[0] for each in cells]  # the sentences below the table name those that do not learn
        before = f"{_mean(good, 'before'):.0%}" if good else "–"
        lines.append(f"| {method} | {before} | " + " | ".join(cells) + " |")
    for k in kinds:
        lines += ["", f"{k}: {verdict([r for r in rows if kind(r) == k])}"]
    return "\n".join(lines)


def ran(rows: list[Row]) -> list[str]:
    """Methods that have rows, in the order of the catalogue."""
    return [method for method in recipes.METHODS if any(r["method"] == method for r in rows)]


def learns(runs: list[Row]) -> bool:
    """Whether the interval of the change lies above zero in every seed."""
    return bool(runs) and all("error" not in r and change(r).low > 0 for r in runs)


def _mean(runs: list[Row], what: str) -> float:
    return fmean(r[what] for r in runs)  # exact: from Python 3.12 on `sum` rounds differently


def verdict(rows: list[Row]) -> str:
    """How many methods learn in every seed, and which do not."""
    methods = ran(rows)
    not_yet = [m for m in methods if not learns([r for r in rows if r["method"] == m])]
    once = [m for m in methods if sum(r["method"] == m for r in rows) == 1]
    count = f"{len(methods) - len(not_yet)} of {len(methods)} methods that were run learn in every seed"
    failed = f"; not {', '.join(f'`{m}`' for m in not_yet)}" if not_yet else ""
    return f"{count}{failed}. {len(once)} of them were run with one seed."


def plan_table(rows: list[Row]) -> str:
    """The runs of a plan, one line per method and setting, with environment and reason. Settings that the plan no longer has are
    listed but not counted. An error is ignored if the same run succeeded later."""
    lines = [
        "| method | environment | steps | because of | before | after | change | learns |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ended = {key(r) for r in rows if "error" not in r}
    rows = [r for r in rows if "error" not in r or key(r) not in ended]
    current = [r for r in rows if setting(r) == planned_setting(r["method"])]
    for one in [
        each for method in ran(rows) for each in dict.fromkeys(setting(r) for r in rows if r["method"] == method)
    ]:
        runs = [r for r in rows if setting(r) == one]
        good = [r for r in runs if "error" not in r]
        before = f"{_mean(good, 'before'):.0%}" if good else "–"
        first, old = runs[-1], "" if runs[-1] in current else " (given up)"
        about = f"{first['env'].removeprefix('worlds:')}{old} | {first['steps']} | {first['why']}"
        lines.append(f"| {first['method']} | {about} | {before} | {cell(good, True)} |")
    absent = [m for m in learning_plan.METHODS if m not in ran(current)]
    missing = f" Not run yet: {', '.join(f'`{m}`' for m in absent)}." if absent else ""
    return "\n".join([*lines, "", verdict(current) + missing])


def setting(row: Row) -> tuple[Hashable, ...]:
    """The key of a run without its seed."""
    return tuple(part for index, part in enumerate(key(row)) if index != 1)


def planned_setting(method: str) -> tuple[Hashable, ...]:
    """The setting that the plan has for a method now."""
    run = learning_plan.plan_run(method)
    settings = {name: value for name, value in run.settings.items() if name != "steps"} | run.flags | run.options
    return setting({"method": method, "seed": 0, "env": run.env, "steps": int(run.settings["steps"]), "set": settings})


def kind(row: dict[str, Any]) -> str:
    """The settings that the runs of a column share."""
    others = ", ".join(f"{key} {value}" for key, value in row.get("set", {}).items())
    return f"{row['env']}, {row['steps']} steps" + (f", {others}" if others else "")


def cell(runs: list[dict[str, Any]], tried: bool) -> str:
    """Success after, its change, and whether the method learns."""
    if not runs:
        return "failed | – | no" if tried else "– | – | –"
    seeds = f" ({len(runs)} seeds)" if len(runs) > 1 else ""
    return f"{_mean(runs, 'after'):.0%}{seeds} | {mean_change(runs)} | {'yes' if learns(runs) else 'no'}"
