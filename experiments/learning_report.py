"""Writes the page docs/learning.md from the rows of finished sweeps. Knows rows; runs nothing."""

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
ABOUT = """<!-- Written by `make learning` from the rows in `experiments/results/`. Do not edit. -->

Held-out success of every method before and after a short run, and the change in points with its 95 % interval
(Newcombe, from the Wilson intervals of both evaluations). `python experiments/learning_sweep.py` makes new rows. A
method is said to learn if the interval of the change lies above zero in every seed that was run. Most methods have one
seed: that shows that a method can learn here, not that it learns from every start, and not which of two is better.
Where there are several seeds, the interval is that of the mean over them.

## The default method

Why `dr_grpo` is the default: from the same cold starts, 100 steps each (`experiments/learning_sweep.py` with `--steps
100 --eval-tasks 200`, stopped after seven minutes; rows in `experiments/results/default.jsonl`), the eight baselines
end within a few points of each other, so the default is the cheapest and simplest of them: no critic, no reference
model, no division by a group's standard deviation. `dapo` takes longest, because it samples groups until all have a
signal.

DEFAULTS

Five seeds of five of the default run reached 95 % and gained at least 53 points (`experiments/default_seeds.md`).

## Objectives

All methods start from the same cold-started model of a seed and have the same budget and learning rate (3e-4, nothing
tuned for a method). With one update on each fresh batch the importance ratio is 1 and many trust-region methods
coincide. With two passes of four mini-batches the data is up to seven updates old, and they differ (`see_upo` has its
own optimiser steps, one for each turn).
"""

SPECIAL = """`python experiments/learning_sweep.py --plan` runs each of these methods in an environment that has what the method
needs (`experiments/learning_plan.py`; where no built-in one has it, one of `experiments/worlds.py`), all from the
same cold-started model of an environment and a seed, with settings that belong to the environment, except where the
plan names a method. Methods on files learn from episodes of the environment's scripted players and then play its
held-out tasks. The only question is whether a method learns: results of different environments cannot be compared.

Environments, settings and two recipes were changed because a method did not learn in a first run; they were chosen on
seed 0, and the longer runs of `echo` and `polychromic_ppo` after both seeds.

- `gdpo` on `Graded` fell from 32 to 10 %. A wrong answer was rewarded there too for being clean and short, and
  `gdpo`, which weights every reward alike, learned to guess at once: in 30 steps clean rose from 78 to 98 % of the
  episodes, tool calls fell from 0.92 to 0.17 an episode, right answers from 41 to 16 %. Now the other rewards are
  paid only with a right answer, as its paper advises.
- `mars` on `Duel` rose little (39 to 50 %), and stayed at chance on plain nim (55 to 45 %). In self-play success
  hardly rises before play is perfect, and only 4 starts were held out. Now heaps go up to 9 (8 starts held out), and
  held-out games are played against a random player. The learning rate of 1e-3 matters: with 3e-4 it went from 20 to
  25 % in 50 steps.
- `archer` rose from 15 to 22 % on `keydoor`. It lacked its paper's warm-up: critics that learn from their own later
  estimates first prefer whatever ends soon, and on `calculator` success fell with them (32 to 17 % in 50 steps). With
  10 batches and 10 passes a batch for the critics first, it rises there (32 to 57 % in 35 steps). Without warm-up it
  did not learn on `guess` either (34 to 38 % in 60 steps; with a critic of its own trunk 34 to 34 % in 45), and on
  `keydoor` ten passes alone did not help (14 to 7 % in 12 steps): a reward 10 to 28 turns away is too far for such
  critics.
- `information_consistency` does not read the verdict: it rises for some ten steps and then trades correctness for
  variety (31 to 26 % in 40 steps), so its runs are short.
- `pivotrl` learned its turns and not whole games of `keydoor`. Most turns are moves, and with the threshold of 0.9
  nearly all turns are pivots (509 of 512). In 40 steps of 64 turns moves rose from 48 to 92 % right, and the turn that
  opens the door fell from 19 to 2 %: there the policy moves on towards the door, 69 % of its groups fail as a whole, and
  such a group has no gradient. Games rose from 15 to 19 %. With `below=0.35`, 146 turns are pivots, moves reach 81 % and
  the door 90 %, no group fails as a whole, and games follow.
- `discopop`: with its paper's `beta` of 0.05 the loss rises with the margin d up to 1.4 nats, and every run begins at
  0: it first learned the wrong order and stayed there. With `beta=1` that stretch ends at 0.07 nats.
- `trimpi` on `lookup` rose from 36 to 53 % with seed 0 and fell from 28 to 2 % with seed 1. The document only disturbed
  the policy, whose cold start has none: with all hints as the document (`tier=3`) none of the first 160 episodes with it
  succeeded, and a third of those without it (success rose from 34 to 71 % all the same, one seed). Now half of the cold
  start's prompts contain the document (`worlds:Documented`), in place of the paper's pre-training on it, and RL starts
  with 66 % with it against 24 % without.
- `digi_q` on `guess` stayed at 34 to 37 % in 60 steps, ten of which are for its critics alone (one seed); the cause was
  not looked for. Its runs are on `lookup` now.
- `echo` and `polychromic_ppo` gained 11 to 27 points in 60 steps, about as much as the interval of 100 held-out tasks is
  wide. Their runs have 120 steps and 200 tasks; nothing else was changed.
- `echo` branches at the paper's entropy of 3.5 nowhere here: the tiny model's tokens have 0.5 on average. Its run sets
  `high` to 0.5 and `confident` to 6, which were not tuned.

Not tried:

- `swarm` reads groups that another run of the same start left before; two runs at the same time were not tried.
"""

VALUES = """
`python experiments/values_learning.py` on `calculator`, each run with a cold start of its own; `ppo` for comparison.
`b_coder` with `alpha=1` and no pre-training of its value ends without a right answer. The gaps of its Q are alpha times
the gaps of log-probabilities, so rewards of 0 and 1 allow gaps of 1 nat, and the policy becomes noise (entropy 0.6 to 1.4
in 30 steps). Now alpha is 0.02, the weight of the KL 0.001, and the value is fitted for 12 batches before the policy
moves, as its paper pre-trains it; alpha was chosen on seed 0, and the critic has its own trunk. These runs sample four
answers to a task and count all of them; "ranked first" counts the one that Q ranks first. With fresh actions `archer`
ends as with the step's own turns (`fresh=0`), within the intervals. Steering by ten times the value (`vas beta=10`)
helps with one seed and hurts with the other.
"""


def page(rows: list[Row]) -> str:
    plain, special = [r for r in rows if "why" not in r], [r for r in rows if "why" in r]
    parts = ["# Learning", ABOUT.strip().replace("DEFAULTS", default_table(read([DEFAULT_ROWS])))]
    parts += [table(plain)] if plain else []
    parts += ["## Credit, other data, preferences", SPECIAL.strip(), plan_table(special)]
    parts += ["## Values of tokens", VALUES.strip(), values_table(read([VALUES_ROWS]))]
    return "\n\n".join(parts) + "\n"


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
        "| method | before | " + " | ".join(f"{k} | change | learns" for k in kinds) + " |",
        "|---|---|" + "---|---|---|" * len(kinds),
    ]
    for method in ran(rows):
        runs = [r for r in rows if r["method"] == method]
        good = [r for r in runs if "error" not in r]
        cells = [cell([r for r in good if kind(r) == k], any(kind(r) == k for r in runs)) for k in kinds]
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
