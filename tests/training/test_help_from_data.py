"""Hints and solutions that people bring: columns of their rows, files of dialogues, the ledger of a run."""

from __future__ import annotations

import asyncio
import json

import pytest

from turnwise.config.settings import Settings
from turnwise.core.records import Group, Status, Task, Trajectory, Turn
from turnwise.environments.base import Environment, text_action, user_message
from turnwise.environments.prompts import ToolPromptEnvironment
from turnwise.errors import SettingError
from turnwise.models.tiny import tiny_tokenizer
from turnwise.rollout.renderer import Renderer
from turnwise.rollout.support import Support, SupportResolver
from turnwise.store.ledger import SqliteLedger
from turnwise.store.rundir import FORMAT
from turnwise.training.plan import EnvSpec, RunPlan, read_solutions
from turnwise.training.refusals import REQUIREMENTS, WITH_RECIPE, refuse

RENDERER = Renderer(tiny_tokenizer([], 300))
ROWS = [
    {"prompt": f"{a}+{a}=", "answer": str(2 * a), "hints": ["add", f"twice {a}"], "steps": [f"{a}+{a}", f"is {2 * a}"]}
    for a in range(12)
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("rows.jsonl", ROWS)
    return tmp_path


def write(name, rows):
    with open(name, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def plan(rows=REQUIREMENTS, **settings):
    made = RunPlan(
        Settings.of({"data": "rows.jsonl", "reward": ("exact",), "env": "prompts", "difficulty": (1,), **settings})
    )
    refuse(made, rows)
    return made


def helped(spec: EnvSpec, support: Support, solutions=None):
    resolver = SupportResolver(spec.make, RENDERER, spec.limits, spec.tools, solutions or {})
    task = spec.tasks("train").draw(0)
    return task, asyncio.run(resolver.task_help(task)), asyncio.run(resolver.resolve(support, task))


def test_columns_feed_hints_and_solutions(folder):
    task, found, tiers = helped(plan(guidance="scaf").env_spec, Support(tier=2))
    a = task.seed
    assert found.hints == ("add", f"twice {a}") and found.solution == (f"{a}+{a}\nis {2 * a}",)
    assert tiers.hint == f"add\ntwice {a}"
    _, _, played = helped(plan(guidance="prefix").env_spec, Support(share=0.5, played=True))
    assert not played.turns and RENDERER.decode(played.start) == f"{a}+{a}\nis {2 * a}"[: len(played.start)]


def test_with_tools_each_step_is_a_turn(folder):
    spec = plan(guidance="ipa", tools=("python",)).env_spec
    assert issubclass(spec.env_class, ToolPromptEnvironment)
    task, found, late = helped(spec, Support(turns_left=1))
    assert found.solution == (f"{task.seed}+{task.seed}", f"is {2 * task.seed}") and len(late.turns) == 1
    with pytest.raises(SettingError, match="later turns"):
        plan(guidance="ipa")


@pytest.mark.parametrize(
    ("row", "hints", "solution"),
    [
        ({"hint": "look"}, ("look",), ()),
        ({"solution": "1 + 1 is 2"}, (), ("1 + 1 is 2",)),
        ({"steps": 3, "solution": [1]}, (), ()),  # of another meaning
        ({"steps": '["one", "two"]'}, (), ("one", "two")),  # a cell of a table
    ],
)
def test_columns_that_are_help(row, hints, solution, folder):
    from turnwise.data.prompts import prompt_row

    made, _ = prompt_row(1, {"prompt": "q", "answer": "a", **row})
    assert (made.hints, made.solution) == (hints, solution)


def test_rows_without_hints_are_refused_and_wrong_hints_by_line(folder):
    write("rows.jsonl", [{**row, "hints": None} if n == 3 else row for n, row in enumerate(ROWS)])
    with pytest.raises(SettingError, match="in rows a column hint or hints"):
        plan(guidance="guide", held_out_share=0.0, eval_tasks=0)
    write("rows.jsonl", [{**row, "hints": 7} if n == 3 else row for n, row in enumerate(ROWS)])
    with pytest.raises(SettingError, match="line 4: hints is 7; write a text in hint, or a list of texts in hints"):
        plan()


# ------------------------------------------------------- from files and from runs


class Asking(Environment):
    """Two questions, then it is over. No oracle."""

    max_turns = 3

    def reset(self, seed):
        return [user_message(f"question {seed % 3}")]

    def step(self, action):
        raise NotImplementedError


def dialogue(n, *answers):
    later = [m for text in answers for m in (text_action(text).message, user_message("and?"))][:-1]
    return [user_message(f"question {n}"), *later]


def test_solutions_of_a_file_of_dialogues(folder):
    rows = [
        {"messages": dialogue(0, "a", "bb"), "reward": 1.0},
        {"messages": dialogue(0, "a", "b"), "reward": 1.0},
        {"messages": dialogue(0, "c"), "reward": 0.5},
        {"messages": dialogue(1, "wrong"), "success": False},
    ]
    write("demos.jsonl", rows)
    found = read_solutions("demos.jsonl")
    assert found == {"question 0": ("a", "b")}  # the best, then the shortest
    spec = EnvSpec(Settings.of({"env": "asking", "difficulty": (1,)}), Asking)
    resolver = SupportResolver(spec.make, RENDERER, spec.limits, (), found)
    help_of = lambda seed: asyncio.run(resolver.task_help(Task("asking", seed))).solution  # noqa: E731
    assert [help_of(seed) for seed in (0, 1, 3)] == [("a", "b"), (), ("a", "b")]


def test_solutions_of_a_run(folder):
    task, turn = Task("asking", 2), Turn((1,), (2,), (-0.1,), version=(0,))
    made = [(dialogue(2, "x"), True, ""), (dialogue(2, "y"), False, ""), (dialogue(2, ""), True, "hints 1-1")]
    members = [
        Trajectory(f"g.{n}", task, (turn,), {}, Status.FINISHED, success=good, guidance=help_, messages=tuple(messages))
        for n, (messages, good, help_) in enumerate(made)
    ]
    (folder / "run").mkdir()
    (folder / "run/run.json").write_text(json.dumps({"format": FORMAT, "settings": {}}))
    for successes in (1, 0):
        with SqliteLedger(folder / "run/ledger.sqlite") as ledger:
            ledger.issue("g", task, 0, 0)
            ledger.finish(Group("g", task, tuple(members[1 - successes :])), 0)
        if successes:
            assert read_solutions("run", successes) == {"question 2": ("x",)}
            (folder / "run/ledger.sqlite").unlink()
    with pytest.raises(SettingError, match="no success without help"):
        read_solutions("run", successes)


def test_a_guidance_takes_them_and_others_refuse_them(folder):
    write("demos.jsonl", [{"messages": dialogue(0, "a"), "reward": 1.0}])
    on_nim = {"env": "miniature", "data": "", "reward": (), "solutions": "demos.jsonl"}
    spec = EnvSpec(Settings.of({"env": "asking", "difficulty": (1,)}), Asking)

    def check(**settings):
        made = RunPlan(Settings.of({**on_nim, "difficulty": (1,), **settings}))
        made.__dict__["env_spec"] = spec
        refuse(made, [row for row in REQUIREMENTS if row.__name__ == "requirements"])

    check(guidance="prefix")
    with pytest.raises(SettingError, match="or --solutions"):
        check(guidance="prefix", solutions="")
    with pytest.raises(SettingError, match="reads no solutions"):
        plan(solutions="demos.jsonl")
    plan(WITH_RECIPE, guidance="ghpo", solutions="demos.jsonl")
