"""A method by its name alone is the paper's whole recipe; what the user says wins; what must be there is asked for."""

from __future__ import annotations

import json

import pytest

from turnwise.data.replay import ExpertCache
from turnwise.errors import SettingError
from turnwise.observe.mechanism import shares
from turnwise.observe.trackers import read_rows
from turnwise.recipes import METHODS, build
from turnwise.recipes.signatures import suggested_settings
from turnwise.rollout.guidance import BackwardStarts, SelfRolledPlans, SolvedExamples
from turnwise.rollout.strategies import Branch, ForcedModes, Hinted, Independent, Reworded
from turnwise.rollout.strategies.tree import (
    AfterToolResults,
    BottleneckTree,
    ConfidenceTree,
    HintedRetry,
    SegmentTree,
    UncertainTokens,
)
from turnwise.tasks.budgets import Fixed, RoundsOfUncertainty
from turnwise.tasks.samplers import CyclePool, Stages
from turnwise.training import api
from turnwise.training.plan import RunPlan, chosen
from turnwise.training.refusals import REQUIREMENTS, refuse

SMALL = {
    "hidden": 64, "cold_steps": 20, "steps": 2, "groups": 3, "eval_tasks": 0, "trackers": (), "keep_tokens": 0,
}  # fmt: skip
WHOLE = {  # the pieces and settings that make a method its paper
    "arpo": {"strategy": AfterToolResults},
    "craft_gui": {"sampler": Stages},
    "latr": {"strategy": UncertainTokens},
    "xrpo": {"budget": RoundsOfUncertainty, "guidance": SolvedExamples},
    "a2fm": {"strategy": ForcedModes},
    "dynaweb": {"demos": "oracle"},
    "bepa": {"demos": "oracle", "guidance": SelfRolledPlans, "replay": ExpertCache, "sampler": CyclePool},
    "direct_advantage": {"strategy": Branch},
    "echo": {"strategy": ConfidenceTree, "reward": ("majority",), "env_reward_weight": 0.0},
    "guide": {"strategy": Hinted},
    "ib_tpo": {"strategy": BottleneckTree},
    "information_consistency": {"strategy": Reworded},
    "ipa": {"guidance": BackwardStarts, "sampler": CyclePool},
    "r3l": {"strategy": HintedRetry},
    "spo_tree": {"strategy": SegmentTree},
}


def plan(**settings) -> RunPlan:
    return RunPlan.from_caller({"out": "unused", **settings}, "", None, None)


@pytest.mark.parametrize("method", WHOLE)
def test_a_name_alone_is_the_whole_recipe(method):
    made = plan(method=method)
    for part, expected in WHOLE[method].items():
        here = getattr(made.recipe if isinstance(expected, type) else made.settings, part)
        assert isinstance(here, expected) if isinstance(expected, type) else here == expected


@pytest.mark.parametrize(
    "name, base, options",
    [
        ("retool", "ppo", {"lam": 1.0}),
        ("tapo", "dapo", {"dual": None}),
        ("craft_gui", "grpo", {"beta": 0.0}),
        ("latr", "arpo", {"copies": True}),
    ],
)
def test_what_it_optimises_is_another_methods_objective(name, base, options):
    assert repr(build(name).objective) == repr(build(base, **options).objective)


def test_tools_come_with_rows_and_are_asked_for(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n} + 1", "answer": str(n + 1)}) + "\n" for n in range(20)))
    where = {"data": str(rows), "reward": "exact"}
    assert plan(method="retool", **where).settings.tools == ("python",)
    assert plan(method="retool", env="calculator").settings.tools == ()
    for method in ("retool", "tapo"):
        refuse(plan(method=method, **where), REQUIREMENTS)
        refuse(plan(method=method, env="calculator"), REQUIREMENTS)
        with pytest.raises(SettingError, match=rf"{method} requires tools .*, and keydoor provides none"):
            refuse(plan(method=method, env="keydoor"), REQUIREMENTS)


def test_what_the_user_says_wins():
    assert plan(method="dynaweb", demos="demonstrator").settings.demos == "demonstrator"
    assert isinstance(plan(method="arpo", strategy="independent").recipe.strategy, Independent)
    alone = plan(method="xrpo", budget="fixed", guidance="none").recipe
    assert isinstance(alone.budget, Fixed) and not isinstance(alone.guidance, SolvedExamples)


def test_what_belongs_to_a_method_is_read_without_importing_it():
    built = {name: getattr(build, "suggests", {}) for name, build in METHODS.items()}
    assert {name: suggested_settings(name) for name in METHODS} == built
    assert suggested_settings("no such method") == {} and built["dynaweb"]


def test_a_run_says_and_records_what_belongs_to_its_method(tmp_path):
    assert chosen({"method": "dynaweb"}) == ["demos is oracle (method dynaweb)"]
    assert chosen({"method": "dynaweb", "demos": "oracle"}) == chosen({"method": "grpo"}) == []
    (tmp_path / "mine.py").write_text(
        "from turnwise.recipes.signatures import suggests\nfrom turnwise.recipes import build\n"
        "@suggests(max_turns=3)\ndef mine():\n    return build('grpo')\n"
    )
    where = {"method": f"{tmp_path}/mine.py:mine", "env": "guess"}
    assert plan(**where).settings.max_turns == 3 and plan(**where, max_turns=4).settings.max_turns == 4
    tiny = {**SMALL, "hidden": 32, "cold_steps": 1, "cold_batch": 2, "steps": 1, "groups": 1, "group_size": 2}
    api.train(lambda *_: None, **{**tiny, **where}, out=str(tmp_path), name="run")
    recorded = json.loads((tmp_path / "run" / "run.json").read_text())
    assert recorded["settings"]["max_turns"] == 3 and "max_turns is 3" in recorded["chosen"][0]


def test_a_setting_that_does_not_exist_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from turnwise.recipes.signatures import suggests\nfrom turnwise.recipes import build\n"
        "@suggests(max_turn=3)\ndef mine():\n    return build('grpo')\n"
    )
    with pytest.raises(SettingError, match="no setting 'max_turn'; did you mean 'max_turns'"):
        plan(method=f"{tmp_path}/mine.py:mine")


def test_a_dream_is_asked_for():
    with pytest.raises(SettingError, match=r"dynaweb requires a world model .*, and lookup provides none"):
        refuse(plan(method="dynaweb", env="lookup"), REQUIREMENTS)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "method, env, slots",
    [
        ("arpo", "lookup", {"strategy"}),
        ("a2fm", "calculator", {"strategy"}), ("bepa", "lookup", {"guidance", "replay"}), ("ipa", "keydoor", {"guidance"}),
        ("spo_tree", "lookup", {"strategy"}), ("latr", "lookup", {"strategy"}),
        ("craft_gui", "guess", {"sampler"}), ("alp", "lookup", {"smoothing"}),
    ],
)
def test_the_mechanism_acts(method, env, slots, tmp_path):
    api.train(lambda *_: None, **SMALL, method=method, env=env, out=str(tmp_path), name="run")
    acted = shares(read_rows(tmp_path / "run" / "metrics.jsonl"))
    assert any(acted.get(slot) for slot in slots), acted
