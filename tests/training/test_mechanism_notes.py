"""What a method does nothing without is said when the run begins, not refused."""

import pytest

from turnwise.errors import RecipeError, SettingError
from turnwise.recipes.experience import piece
from turnwise.rollout.strategies.tree import AfterToolResults, ConfidenceTree
from turnwise.training.plan import RunPlan
from turnwise.training.refusals import REQUIREMENTS, mechanism_notes, refuse


def notes(**settings):
    plan = RunPlan.from_caller({"out": "unused", **settings}, "", None, None)
    refuse(plan, REQUIREMENTS)
    return " ".join(text for level, text in mechanism_notes(plan) if level == "warning")


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"method": "gdpo"}, "several rewards"),
        ({"method": "mars"}, "several agents"),
        ({"method": "flow_grpo"}, "the fact 'planner'"),
        ({"method": "swarm"}, "groups of other runs"),
        ({"method": "grpo", "replay": "swarm"}, "groups of other runs"),
    ],
)
def test_a_run_says_what_its_method_lacks(settings, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in notes(env="calculator", **settings)


def test_modes_without_tools_are_told():
    assert "compares rollouts with tools and without, and keydoor has none" in notes(env="keydoor", method="a2fm")
    assert notes(env="calculator", method="a2fm") == ""


def test_nothing_is_said_where_it_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "swarm").mkdir()
    (tmp_path / "swarm" / "pool.sqlite").touch()
    assert notes(env="nim", method="mars") == notes(env="calculator", method="swarm") == notes(method="grpo") == ""
    (tmp_path / "mine.py").write_text("def one(completion):\n    return 1.0\n\ndef two(completion):\n    return 2.0\n")
    assert notes(env="calculator", method="gdpo", reward=["mine.py:one", "mine.py:two"]) == ""


def test_a_fact_whose_name_has_a_space_is_asked_for():
    with pytest.raises(SettingError, match="promed requires the fact 'worth 0', and lookup provides none"):
        notes(env="lookup", method="promed")


def test_trunks_that_leave_nothing_to_fork_are_refused():
    with pytest.raises(
        RecipeError, match="8 trunks take a whole group of 8, so nothing would fork; write --group-size 16"
    ):
        AfterToolResults(8).check_group_size(8)
    AfterToolResults().check_group_size(2)
    ConfidenceTree(4).check_group_size(8)
    assert piece("strategy", "arpo") == AfterToolResults(0)
