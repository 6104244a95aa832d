"""The run that tests whether a method of credit, replay or preference learns: environment, settings, data, and the reason.

    python experiments/learning_plan.py                       prints the plan

Almost all of it follows from the requirements of the recipe (``plan.required_by``); the exceptions are listed in
``ENV_OVERRIDES``, ``FILES``, ``STEPS`` and ``OPTIONS``. Other settings belong to an environment, never to a method; ``OPTIONS``
holds the arguments without which a method would not act here. ``experiments/learning_sweep.py --plan`` runs the plan.
"""

from __future__ import annotations

import json
import re
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

from turnwise import environments, recipes  # noqa: E402
from turnwise.algebra.value import Constant  # noqa: E402
from turnwise.environments.builtin.calculator import Calculator  # noqa: E402
from turnwise.recipes.families import (  # noqa: E402
    experts_and_replay,
    group_credit,
    preferences,
    reward_shaping,
    segment_credit,
    selection,
    turn_credit,
)
from turnwise.recipes.recipe import Recipe  # noqa: E402
from turnwise.training.plan import required_by  # noqa: E402

FAMILIES = (turn_credit, group_credit, segment_credit, reward_shaping, experts_and_replay, selection, preferences)
ALSO = ("echo",)  # an objective whose trees need an environment that can be forked
METHODS = (
    *(name for family in FAMILIES for name, build in recipes.METHODS.items() if build.__module__ == family.__name__),
    *ALSO,
)


@dataclass(frozen=True)
class EnvironmentPlan:
    """The settings of every run in an environment. ``cold_start_of``: the environment whose cold start it shares, because its
    observations are the same."""

    settings: dict[str, str]
    seconds: int  # approximate duration of a run: the longest start first
    why: str
    cold_start_of: str = ""


CALCULATOR = {"steps": "50"}
KEYDOOR = {"steps": "30"}
GUESS = {"steps": "60", "difficulty": "1"}
TURNS = "turnwise.environments.expert_turns:KeyDoorTurns"
ENVIRONMENTS = {
    "calculator": EnvironmentPlan(CALCULATOR, 60, "tools, several turns"),
    "keydoor": EnvironmentPlan(KEYDOOR, 80, "states that return, sparse reward"),
    "lookup": EnvironmentPlan({"steps": "50"}, 100, "a gold answer, searched for"),
    "guess": EnvironmentPlan(GUESS, 60, "answers that inform"),
    "worlds:Duel": EnvironmentPlan({"steps": "60", "groups": "16", "lr": "1e-3"}, 90, "two agents, opposed"),
    TURNS: EnvironmentPlan({"steps": "40", "groups": "64"}, 40, "single turns of an expert", "keydoor"),
    "worlds:Followed": EnvironmentPlan(KEYDOOR, 80, "an expert's move to match", "keydoor"),
    "worlds:Interview": EnvironmentPlan(GUESS, 60, "pieces of information, each with a worth", "guess"),
    "worlds:Judged": EnvironmentPlan(CALCULATOR, 60, "a judge of the way", "calculator"),
    "worlds:Planned": EnvironmentPlan(CALCULATOR, 60, "a planner beside others", "calculator"),
    "worlds:Graded": EnvironmentPlan(CALCULATOR, 60, "several rewards", "calculator"),
    "worlds:Directed": EnvironmentPlan(CALCULATOR, 60, "two rewards, a direction asked for"),
    "worlds:Documented": EnvironmentPlan({"steps": "50"}, 100, "a document in half of the prompts"),
    "worlds:Internalised": EnvironmentPlan({"steps": "50"}, 100, "a gold answer, searched for", "worlds:Documented"),
    "worlds:Suggestions": EnvironmentPlan({"steps": "12"}, 30, "answers that should tell much, equally much"),
}
ENV_BY_REQUIREMENT = {
    "state": "keydoor",
    "answer": "lookup",
    "feedback": "guess",
    "forks": "guess",
    "hints": "lookup",
    "expert turns": TURNS,
}  # requirement: the environment that serves it best
ENV_OVERRIDES = {  # methods whose subject is not among their requirements
    "mars": "worlds:Duel",
    "gdpo": "worlds:Graded",
    "dvao": "worlds:Graded",
    "flow_grpo": "worlds:Planned",
    "information_consistency": "worlds:Suggestions",
    "trloo": "keydoor",
    "srgpo": "keydoor",
    "bilevel_gae": "keydoor",
    "trimpi": "worlds:Internalised",  # no cold start of a built-in environment has read a document
    "dart": "keydoor",  # groups that fail, many turns
    "fapo": "worlds:Judged",  # calculator tells the fact error, too
    "digi_q": "lookup",  # its critics do not reach over the 10 to 28 turns of keydoor
}
FILES = {
    "rdpo": "flipped",
    "mapl": "families",
    "dpa": "rated",
}  # methods whose rows are not plain pairs or demonstrations
OPTIONS: dict[str, dict[str, str]] = {  # arguments of methods; a value may be an input
    "swarm": {"folder": "pool"},
    "pivotrl": {"pool": "512", "below": "0.35"},  # above 0.35 are mostly moves, which crowd out the one turn that opens
    "discopop": {"beta": "1"},  # with 0.05 a pair has to cross 1.4 nats against the slope of its loss
    "echo": {
        "high": "0.5",
        "confident": "6",
    },  # the entropies of the tiny model hardly exceed 1, so it would never branch
}
STEPS = {
    "echo": "120",
    "polychromic_ppo": "120",
}  # other than the environment's; in 60 they gain as much as the interval is wide
WHY = {
    "pairs": "pairs of a file",
    "flipped": "pairs, a tenth of them flipped",
    "families": "pairs of near and far, one answer under two prompts",
    "rated": "answers with two ratings, a direction asked for",
    "demos": "an expert's dialogues alone",
    "oracle": "an expert beside the policy",
    "teacher": "a teacher",
    "replay": "past episodes",
    "forks": "episodes that fork",
    "hints": "hints where all fail",
    "pool": "groups that another run left",
}
WHY_HERE = {  # methods of which neither requirements nor environment say what acts
    "dart": "groups that fail, past successes",
    "digirl": "several turns, one reward at the end",
    "digi_q": "several actions of one state, critics",
    "evocua": "success and failure that part at a state",
    "trimpi": "a document that half of the group reads",
    "a2fm": "two ways to begin: answer at once, or call a tool",
    "d3s": "tools, several turns; most rows and tokens left out",
    "oapl": "past batches",
    "optimal_token": "rows of several lengths",
}
EXTRA_SETTINGS = {"fact revises": {"context": "640"}}  # the prompt of a revision contains a whole dialogue


@dataclass(frozen=True)
class Run:
    method: str
    env: str
    settings: dict[str, str]
    needs: tuple[str, ...]  # inputs to make first: cold, teacher, or a file
    why: str
    seconds: int
    flags: dict[str, str] = field(default_factory=dict)  # setting: the input it takes
    options: dict[str, str] = field(default_factory=dict)  # argument of the method: a value, or the input it takes


def plan_run(method: str) -> Run:
    recipe = recipes.build(method)
    required = required_by(recipe)
    env = ENV_OVERRIDES.get(method) or choose_environment(required)
    flags, why = data_flags(method, recipe, required)
    plan, extra = ENVIRONMENTS[env], {k: v for word in required for k, v in EXTRA_SETTINGS.get(word, {}).items()}
    options = OPTIONS.get(method, {})
    inputs = tuple(word for word in (*flags.values(), *options.values()) if word in INPUTS)
    why = (
        WHY_HERE.get(method)
        or " and ".join(WHY[word] for word in options.values() if word in INPUTS)
        or why
        or plan.why
    )
    settings = {**plan.settings, **extra} | ({"steps": STEPS[method]} if method in STEPS else {})
    return Run(method, env, settings, ("cold", *inputs), why, plan.seconds, flags, options)


def choose_environment(required: frozenset[str]) -> str:
    """The environment listed for a requirement, else the first that provides all required facts and rewards."""
    listed = [env for word, env in ENV_BY_REQUIREMENT.items() if word in required]
    names = {name for word in required for kind, _, name in [word.partition(" ")] if kind in ("fact", "reward")}
    names |= {word.removeprefix("turn fact ") for word in required if word.startswith("turn fact ")}
    # with pairs the file provides everything
    able = [] if "pairs" in required else [env for env in ENVIRONMENTS if names <= provided(env)]
    return [*listed, *able, "calculator"][0]


def provided(env: str) -> set[str]:
    """The facts and named rewards that an environment declares."""
    cls = environments.load(env)
    return {*getattr(cls, "facts", ()), *getattr(cls, "rewards", ())}


def data_flags(method: str, recipe: Recipe, required: frozenset[str]) -> tuple[dict[str, str], str]:
    """The settings that name a file, a scripted policy or a teacher, and the reason. A recipe without an advantage is offline."""
    offline = isinstance(recipe.advantage, Constant)
    flags: dict[str, str] = {}
    if "pairs" in required:
        flags["data" if offline else "demos"] = FILES.get(method, "pairs")
    elif "demonstrations" in required:
        flags |= {"data": FILES.get(method, "demos")} if offline else {"demos": "oracle"}
    if "teacher" in required:
        flags["teacher"] = "teacher"
    words = [*flags.values(), *(word for word in ("replay", "forks", "hints") if word in required)]
    return flags, " and ".join(WHY[word] for word in words)


# ------------------------------------------------------------------------ files

Row = dict[str, Any]


def flipped(rows: list[Row]) -> list[Row]:
    """The pairs with a tenth of them swapped, selected by a hash of their task."""
    swap = {
        "chosen": "rejected",
        "rejected": "chosen",
        "reward_chosen": "reward_rejected",
        "reward_rejected": "reward_chosen",
    }
    selected = lambda row: zlib.crc32(row["task"].encode()) % 10 == 0  # noqa: E731
    return [{swap.get(k, k): v for k, v in row.items()} if selected(row) else row for row in rows]


def families(rows: list[Row]) -> list[Row]:
    """Pairs with a ``gap`` (2 if the rejected answer used no tool, else 1) and a ``family`` by difficulty; and every third chosen
    answer again as a pair of its own prompt and another one."""
    graded = [
        {
            **row,
            "family": float(row["task"].split("/")[2]),
            "gap": 1.0 + ("<tool_call>" not in json.dumps(row["rejected"])),
        }
        for row in rows
    ]
    within = [
        {"prompt_chosen": row["prompt"], "prompt_rejected": other["prompt"], "chosen": row["chosen"], "rejected": row["chosen"],
         "tools": row.get("tools"), "within": 1.0}
        for row, other in list(zip(rows, [*rows[1:], rows[0]]))[::3]
        if row["prompt"] != other["prompt"]
    ]  # fmt: skip
    return graded + within


def rated(rows: list[Row]) -> list[Row]:
    """Both sides of a pair as separate answers, rated by their reward and their number of turns, with the direction that their
    prompt states."""
    answers = []
    for row in rows:
        toward = {
            f"toward_{name}": int(x) / 100 for name, x in re.findall(r"(\w+)\*(-?\d+)", row["prompt"][-1]["content"])
        }
        for side in ("chosen", "rejected"):
            turns = sum(m["role"] == "assistant" for m in row[side])
            ratings = {"helpfulness": row[f"reward_{side}"], "verbosity": turns / Calculator.max_turns}
            answers.append(
                {"prompt": row["prompt"], "completion": row[side], "tools": row.get("tools"), **toward, **ratings}
            )
    return answers


DERIVED_FILES: dict[str, tuple[str, Callable[[list[Row]], list[Row]] | None]] = {  # file: exported form, transformation
    "pairs": ("pairs", None),
    "demos": ("demos", None),
    "flipped": ("pairs", flipped),
    "families": ("pairs", families),
    "rated": ("pairs", rated),
}
INPUTS = (*DERIVED_FILES, "teacher", "pool")  # what is made before a run


def main() -> None:
    for run in map(plan_run, METHODS):
        values = {**run.settings, **run.flags, **run.options}
        print(f"{run.method:<24} {run.env:<20} {run.why:<58} {' '.join(f'{k}={v}' for k, v in values.items())}")


if __name__ == "__main__":
    main()
