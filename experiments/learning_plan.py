"""Which run shows that a method of credit, replay or preference learns: where, with which settings, from what, and why.

    python experiments/learning_plan.py                       prints the plan

Almost all of it follows from what the recipe says it must be told (``needs.asked``); what cannot be derived is listed in
``PLACED`` and ``FILES``. Settings belong to an environment, never to a method. ``experiments/learning_sweep.py --plan`` runs it.
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
    turn_credit,
)
from turnwise.recipes.recipe import Recipe  # noqa: E402
from turnwise.training import requirements  # noqa: E402

FAMILIES = (turn_credit, group_credit, segment_credit, reward_shaping, experts_and_replay, preferences)
METHODS = tuple(
    name for family in FAMILIES for name, made in recipes.METHODS.items() if made.__module__ == family.__name__
)


@dataclass(frozen=True)
class Place:
    """An environment and the settings of every run in it. ``like``: whose cold start it shares, since it looks the same."""

    settings: dict[str, str]
    seconds: int  # what a run takes, about: the longest begin first
    why: str
    like: str = ""


CALCULATOR = {"steps": "50"}
KEYDOOR = {"steps": "30"}
GUESS = {"steps": "60", "difficulty": "1"}
PLACES = {
    "calculator": Place(CALCULATOR, 60, "tools, several turns"),
    "keydoor": Place(KEYDOOR, 80, "states that return, sparse reward"),
    "lookup": Place({"steps": "50"}, 100, "a gold answer, searched for"),
    "guess": Place(GUESS, 60, "answers that inform"),
    "worlds:Duel": Place({"steps": "60", "groups": "16", "lr": "1e-3"}, 90, "two agents, opposed"),
    "worlds:Followed": Place(KEYDOOR, 80, "an expert's move to match", "keydoor"),
    "worlds:Interview": Place(GUESS, 60, "pieces of information, each with a worth", "guess"),
    "worlds:Judged": Place(CALCULATOR, 60, "a judge of the way", "calculator"),
    "worlds:Planned": Place(CALCULATOR, 60, "a planner beside others", "calculator"),
    "worlds:Graded": Place(CALCULATOR, 60, "several rewards", "calculator"),
    "worlds:Directed": Place(CALCULATOR, 60, "two rewards, a direction asked for"),
    "worlds:Suggestions": Place({"steps": "12"}, 30, "answers that should tell much, equally much"),
}
TOLD = {
    "state": "keydoor",
    "answer": "lookup",
    "feedback": "guess",
    "forks": "guess",
    "hints": "lookup",
}  # what is asked for, and who tells it best
PLACED = {  # where what a recipe asks for does not say enough: it can do without, but is about this
    "mars": "worlds:Duel",
    "gdpo": "worlds:Graded",
    "dvao": "worlds:Graded",
    "flow_grpo": "worlds:Planned",
    "information_consistency": "worlds:Suggestions",
    "trloo": "keydoor",
    "srgpo": "keydoor",
    "bilevel_gae": "keydoor",
}
FILES = {"rdpo": "flipped", "mapl": "families", "dpa": "rated"}  # whose rows are not just pairs or demonstrations
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
}
MORE = {"fact revises": {"context": "640"}}  # a revision shows a whole dialogue before it


@dataclass(frozen=True)
class Run:
    method: str
    env: str
    settings: dict[str, str]
    needs: tuple[str, ...]  # what must be made before: cold, teacher, or a file
    why: str
    seconds: int
    flags: dict[str, str] = field(default_factory=dict)  # setting: what is made before and goes there


def planned(method: str) -> Run:
    recipe = recipes.build(method)
    asks = requirements.required_by(recipe)
    env = PLACED.get(method) or place(asks)
    flags, why = told(method, recipe, asks)
    spot, extra = PLACES[env], {k: v for word in asks for k, v in MORE.get(word, {}).items()}
    made = tuple(word for word in flags.values() if word != "oracle")
    return Run(method, env, {**spot.settings, **extra}, ("cold", *made), why or spot.why, spot.seconds, flags)


def place(asks: frozenset[str]) -> str:
    """The environment that is known for what is asked, else the first that tells all the facts and rewards that are."""
    known = [env for word, env in TOLD.items() if word in asks]
    names = {name for word in asks for kind, _, name in [word.partition(" ")] if kind in ("fact", "reward")}
    names |= {word.removeprefix("turn fact ") for word in asks if word.startswith("turn fact ")}
    able = (
        [] if "pairs" in asks else [env for env in PLACES if names <= offers(env)]
    )  # of pairs the file tells everything
    return [*known, *able, "calculator"][0]


def offers(env: str) -> set[str]:
    kind = environments.load(env)
    return {*getattr(kind, "facts", ()), *getattr(kind, "rewards", ())}


def told(method: str, recipe: Recipe, asks: frozenset[str]) -> tuple[dict[str, str], str]:
    """What comes from a file, a player or a teacher, and why that is needed. Without an advantage a file is all there is."""
    alone = isinstance(recipe.advantage, Constant)
    flags: dict[str, str] = {}
    if "pairs" in asks:
        flags["data" if alone else "demos"] = FILES.get(method, "pairs")
    elif "demonstrations" in asks:
        flags |= {"data": FILES.get(method, "demos")} if alone else {"demos": "oracle"}
    if "teacher" in asks:
        flags["teacher"] = "teacher"
    words = [*flags.values(), *(word for word in ("replay", "forks", "hints") if word in asks)]
    return flags, " and ".join(WHY[word] for word in words)


# ------------------------------------------------------------------------ files

Row = dict[str, Any]


def flipped(rows: list[Row]) -> list[Row]:
    """A tenth of the pairs the wrong way round, by their content."""
    swap = {
        "chosen": "rejected",
        "rejected": "chosen",
        "reward_chosen": "reward_rejected",
        "reward_rejected": "reward_chosen",
    }
    lot = lambda row: zlib.crc32(row["task"].encode()) % 10 == 0  # noqa: E731
    return [{swap.get(k, k): v for k, v in row.items()} if lot(row) else row for row in rows]


def families(rows: list[Row]) -> list[Row]:
    """Pairs with how far apart they are (2 where the worse one never used a tool, else 1), in families by difficulty; and each
    third better answer once more, under its own question and under another's."""
    whole = [
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
    return whole + within


def rated(rows: list[Row]) -> list[Row]:
    """Both sides of a pair as answers of their own, rated by what they were paid and how many turns they took, with the
    direction that their prompt states."""
    made = []
    for row in rows:
        toward = {
            f"toward_{name}": int(x) / 100 for name, x in re.findall(r"(\w+)\*(-?\d+)", row["prompt"][-1]["content"])
        }
        for side in ("chosen", "rejected"):
            turns = sum(m["role"] == "assistant" for m in row[side])
            ratings = {"helpfulness": row[f"reward_{side}"], "verbosity": turns / Calculator.max_turns}
            made.append(
                {"prompt": row["prompt"], "completion": row[side], "tools": row.get("tools"), **toward, **ratings}
            )
    return made


MADE: dict[
    str, tuple[str, Callable[[list[Row]], list[Row]] | None]
] = {  # file: what is exported, and what is done to the rows
    "pairs": ("pairs", None),
    "demos": ("demos", None),
    "flipped": ("pairs", flipped),
    "families": ("pairs", families),
    "rated": ("pairs", rated),
}


def main() -> None:
    for run in map(planned, METHODS):
        given = {**run.settings, **run.flags}
        print(f"{run.method:<24} {run.env:<20} {run.why:<58} {' '.join(f'{k}={v}' for k, v in given.items())}")


if __name__ == "__main__":
    main()
