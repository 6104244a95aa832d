"""Does every credit go with every objective? Two optimiser steps of each pair; the page lists the pairs that are refused.

    python experiments/composition_matrix.py                             all pairs; prints failures
    python experiments/composition_matrix.py --credits gigpo igpo        some rows
    python experiments/composition_matrix.py --write docs/matrix.md      and writes the page
    python experiments/composition_matrix.py --keep cells.jsonl          resumes, and retries failed cells

All cells share one cold start and one set of rollouts: each cell is `improve` on two stored batches with a new small learner.
Inputs that no built-in environment provides (a fact, a named reward) are generated from the trajectory's id. A cell is *ok* if
both steps were taken and every number is finite; *refused* if the two are incompatible, with the reason; else *FAILED*.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import math
import sys
import time
import traceback
import zlib
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from turnwise import recipes
from turnwise.core.records import Group, Trajectory
from turnwise.core.signals import TURN_CRITIC, TURN_CRITIC_TARGET, Signal
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.errors import RecipeError
from turnwise.recipes import catalogue
from turnwise.recipes.compose import compose
from turnwise.recipes.recipe import Recipe
from turnwise.rollout.renderer import Renderer
from turnwise.rollout.strategies import Branch, Independent
from turnwise.tasks.budgets import Fixed
from turnwise.training import build, engines
from turnwise.training.collector import Collector, usable
from turnwise.training.loop import update_policy
from turnwise.training.plan import EnvSpec, resolve_settings
from turnwise.training.task_feed import TaskFeed
from turnwise.training.trainer import cold_start
from turnwise.training.watch import RunEvents

STEPS, GROUPS, SIZE = 2, 2, 3
NEXT = "<!-- Written by `python experiments/experience_pairs.py"  # the part of the page that another script writes
WITH_A_CRITIC = ("ppo", "rloo")  # baseline credits that are also tested: one with a critic, one without


class NullLedger:
    """A ledger that stores nothing."""

    def __getattr__(self, _: str) -> Any:
        return lambda *args, **kwargs: None


@dataclass
class SharedRollouts:
    """Shared by all cells: a cold-started model and its rollouts, independent and forked."""

    model: Any
    plain: list[list[Group]]
    forked: list[list[Group]]

    @classmethod
    def collect(cls) -> SharedRollouts:
        settings = resolve_settings(
            {"env": "guess", "difficulty": (1,), "hidden": 32, "layers": 1, "vocabulary": 512, "cold_steps": 40,
             "cold_batch": 16, "max_tokens": 8, "max_turns": 2, "context": 160, "device": "cpu"}
        )  # fmt: skip
        env_spec = EnvSpec.from_settings(settings)
        tokenizer = build.load_tokenizer(settings, env_spec)
        model = build.load_model(settings, len(tokenizer))
        cold_start(settings, env_spec, tokenizer, model, settings.cold_steps, RunEvents())
        weights = {name: w.detach().clone() for name, w in model.state_dict().items()}
        model = build.load_model(settings, len(tokenizer))  # the first one belongs to the cold start's learner
        model.load_state_dict(weights)
        renderer = Renderer(tokenizer)
        plain, forked = (
            asyncio.run(_collect_batches(settings, env_spec, renderer, model, strategy))
            for strategy in (Independent(), Branch())
        )
        return cls(model, plain, forked)

    def batches(self, asks: frozenset[str]) -> list[list[Group]]:
        stored = self.forked if "forks" in asks else self.plain
        return [[_with_required(group, asks) for group in groups] for groups in stored]

    def learner(self, recipe: Recipe) -> LocalLearner:
        needs = recipe.objective.signals
        return LocalLearner(
            copy.deepcopy(self.model),
            LearnerSettings(lr=1e-3, positions=4096),
            critic=recipe.critics,
            turn_critic=bool(needs & {*TURN_CRITIC, *TURN_CRITIC_TARGET}),
            teacher=copy.deepcopy(self.model) if Signal.TEACHER in needs else None,
            noise=recipe.smoothing,
        )


async def _collect_batches(
    settings: Any, env_spec: EnvSpec, renderer: Renderer, model: Any, strategy: Any
) -> list[list[Group]]:
    """Two batches with masked contexts; in a group of equal rewards one reward is raised."""
    recipe = replace(recipes.build("grpo"), budget=Fixed(GROUPS, SIZE), strategy=strategy)
    generator = engines.make_local_generator(settings, copy.deepcopy(model), renderer)
    play = build.make_play(env_spec, renderer, build.sampling_settings(settings), record_masked=True)
    source = Collector(recipe, generator, TaskFeed.open(recipe, env_spec.tasks("train")), NullLedger(), play, 0)
    batches = []
    for step in range(STEPS):
        groups = [usable(group)[0] for group in await source.collect_step(step)]
        source.training, source.ready = 0, deque()
        batches.append([_with_reward_spread(group) for group in groups])
    return batches


def _with_reward_spread(group: Group) -> Group:
    first, *others = group.trajectories
    if len({t.reward for t in group.trajectories}) > 1 or not others:
        return group
    turns = (*first.turns[:-1], replace(first.turns[-1], reward=first.turns[-1].reward + 1.0))
    return replace(group, trajectories=(replace(first, turns=turns, success=True), *others))


def _with_required(group: Group, asks: frozenset[str]) -> Group:
    """The group with generated values for required facts and rewards that it does not have."""
    names = lambda kind: [a.removeprefix(kind) for a in sorted(asks) if a.startswith(kind)]  # noqa: E731
    value_of = lambda *key: zlib.crc32("/".join(map(str, key)).encode()) % 3  # noqa: E731

    def one(t: Trajectory) -> Trajectory:
        turns = tuple(
            replace(turn, facts={**{n: value_of(t.id, i, n) for n in names("turn fact ")}, **turn.facts})
            for i, turn in enumerate(t.turns)
        )
        facts = {**{n: value_of(t.id, n) for n in names("fact ")}, **t.facts}
        rewards = {**{n: value_of(t.id, n) / 2 for n in names("reward ")}, **t.rewards}
        return replace(t, turns=turns, facts=facts, rewards=rewards)

    return replace(group, trajectories=tuple(map(one, group.trajectories)))


# ----------------------------------------------------------------------- cells


def run_cell(shared: SharedRollouts, objective: Recipe, credit: Recipe) -> tuple[str, str]:
    """(``ok``, ``refused`` or ``FAILED``, the reason)."""
    try:
        recipe = compose(objective, credit)
    except RecipeError as fault:
        return "refused", str(fault)
    try:
        learner, kept = shared.learner(recipe), recipe.objective
        if kept.signals & {Signal.REFERENCE, Signal.HELLINGER}:
            learner.reference()
        for step, groups in enumerate(shared.batches(recipe.requirements)):
            metrics = update_policy(learner, recipe, groups, step, kept)
            learner.version = step + 1
            wrong = [name for name, value in metrics.items() if name != "policy_check" and not math.isfinite(value)]
            if metrics.get("skipped", 0) or wrong:
                return (
                    "FAILED",
                    f"step {step}: {'skipped' if metrics.get('skipped') else 'not finite: ' + ', '.join(wrong)}",
                )
        if not all(bool(torch.isfinite(w).all()) for w in learner.weights().values()):
            return "FAILED", "weights are not finite"
    except Exception as fault:
        last = traceback.extract_tb(fault.__traceback__)[-1]
        return "FAILED", f"{type(fault).__name__}: {str(fault)[:120]} ({Path(last.filename).name}:{last.lineno})"
    return "ok", ""


def of_kind(kind: str) -> list[str]:
    return [name for name in recipes.METHODS if catalogue.kind(name) == kind]


Cells = dict[tuple[str, str], tuple[str, str]]


def run_cells(
    shared: SharedRollouts, credits: Sequence[str], objectives: Sequence[str], keep: Path | None = None
) -> Cells:
    built = {name: recipes.build(name) for name in {*credits, *objectives}}
    cells, done, began = read_cells(keep), 0, time.perf_counter()
    results: Cells = {}
    for credit in credits:
        for objective in objectives:
            if cells.get((credit, objective), ("FAILED",))[0] == "FAILED":
                cells[credit, objective] = run_cell(shared, built[objective], built[credit])
                done += 1
                if keep is not None:
                    with keep.open("a") as stream:
                        print(json.dumps([credit, objective, *cells[credit, objective]]), file=stream)
            results[credit, objective] = verdict, why = cells[credit, objective]
            if verdict == "FAILED":
                print(f"FAILED  {objective} --credit {credit}: {why}", flush=True)
        rate = done / (time.perf_counter() - began)
        print(f"{credit:24} {Counter(results[credit, o][0] for o in objectives)}  {rate:.1f} cells/s", file=sys.stderr)
    return results


def read_cells(path: Path | None) -> Cells:
    """The cells of an earlier, interrupted run; the last entry of each counts."""
    lines = path.read_text().splitlines() if path is not None and path.is_file() else []
    return {(credit, objective): (verdict, why) for credit, objective, verdict, why in map(json.loads, lines)}


def page(results: Cells, credits: Sequence[str], objectives: Sequence[str]) -> str:
    """How many pairs were tried, and those that did not run, grouped by reason."""
    counts = Counter(verdict for verdict, _ in results.values())
    lines = [
        "# Pairs that are refused",
        "",
        "<!-- Written by `python experiments/composition_matrix.py --write docs/matrix.md`. Do not edit. -->",
        "",
        "`turnwise train OBJECTIVE --credit CREDIT` takes the advantage, and what it depends on, from one method and everything",
        "else from another. Every pair was tried with two optimiser steps on stored rollouts of a tiny model. A pair passes if",
        "both steps were taken and every number stayed finite. This shows that it runs, not that it learns well.",
        "",
        "| | pairs |",
        "|---|---|",
        f"| tried: {len(credits)} credits × {len(objectives)} objectives | {len(results):,} |",
        f"| run | {counts['ok']:,} |",
        f"| refused before the run | {counts['refused']:,} |",
        f"| failed | {counts['FAILED']:,} |",
    ]
    untried = [f"`{name}`" for name in of_kind("objective") if name not in objectives]
    lines += ["", f"Objectives that were not tried: {', '.join(untried)}."] if untried else []
    for reason, pairs in by_reason(results).items():
        lines += [
            "",
            f"## {reason[:1].upper()}{reason[1:]}",
            "",
            f"{len(pairs)} pairs.",
            "",
            "| objective | credit | detail |",
        ]
        lines += ["|---|---|---|"]
        same: dict[tuple[str, str], list[str]] = {}
        for objective, credit, detail in pairs:
            same.setdefault((objective, detail), []).append(credit)
        for (objective, detail), names in same.items():
            which = "every credit tried" if len(names) == len(credits) else ", ".join(f"`{name}`" for name in names)
            lines.append(f"| `{objective}` | {which} | {detail.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def by_reason(results: Cells) -> dict[str, list[tuple[str, str, str]]]:
    """(objective, credit, detail) of every pair that did not run, by reason; a reason ends at its first colon."""
    out: dict[str, list[tuple[str, str, str]]] = {}
    for (credit, objective), (verdict, why) in results.items():
        if verdict != "ok":
            reason, _, detail = why.partition(": ")
            out.setdefault(reason if verdict == "refused" else "failed", []).append((objective, credit, detail or why))
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--credits", nargs="*", default=None)
    parser.add_argument("--objectives", nargs="*", default=None)
    parser.add_argument("--write", type=Path, default=None)
    parser.add_argument("--keep", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    credits = options.credits or [*WITH_A_CRITIC, *of_kind("credit")]
    objectives = options.objectives or of_kind("objective")
    results = run_cells(SharedRollouts.collect(), credits, objectives, options.keep)
    print(", ".join(f"{n} {verdict}" for verdict, n in Counter(v for v, _ in results.values()).items()))
    if options.write:
        before = options.write.read_text(encoding="utf-8") if options.write.is_file() else ""
        rest = "\n" + before[before.index(NEXT) :] if NEXT in before else ""
        options.write.write_text(page(results, credits, objectives) + rest, encoding="utf-8")
    return int(any(verdict == "FAILED" for verdict, _ in results.values()))


if __name__ == "__main__":
    sys.exit(main())
