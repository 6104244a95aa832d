"""At the door: what a method must be told and this environment or these flags cannot tell, with the remedy."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from turnwise import environments, recipes
from turnwise.algebra.advantage import Standardise
from turnwise.config.settings import Settings
from turnwise.core.levels import TRAJECTORY, TURN
from turnwise.credit.fact import Fact
from turnwise.data.replay import ExpertCache, RecentBuffer
from turnwise.environments.base import Environment
from turnwise.errors import SettingError
from turnwise.recipes import experience
from turnwise.recipes.recipe import Recipe
from turnwise.rollout.strategies import Branch
from turnwise.rollout.strategies.tree import SegmentTree
from turnwise.training.plan import RunPlan
from turnwise.training.refusals import REQUIREMENTS, refuse


def examine(recipe, **settings):
    chosen = Settings.of({"env": "calculator", **settings})
    refuse(RunPlan(chosen, recipe), REQUIREMENTS)


def refused(recipe, **settings) -> str:
    with pytest.raises(SettingError) as caught:
        examine(recipe, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_states_to_compare():
    """Every environment has them, its own or its observations; an episode of one turn has nothing to compare."""
    said = refused(recipes.build("gigpo"), env="countdown")
    assert "equal states" in said and "countdown has one turn" in said
    for env in ("guess", "calculator", "archive"):
        examine(recipes.build("gigpo"), env=env)


def test_a_gold_answer():
    assert "answer()" in refused(recipes.build("a2tgpo"), env="keydoor")
    examine(recipes.build("a2tgpo"), env="lookup")


def test_forks():
    """By snapshots or by actions played again; of an episode of one turn only inside its answer."""
    forked = replace(recipes.build("grpo"), strategy=Branch())
    assert "later turns" in refused(forked, env="countdown")
    examine(forked, env="guess")
    examine(forked, env="calculator")
    examine(replace(forked, strategy=SegmentTree()), env="countdown")


def test_the_fact_of_one_strategy_is_refused_of_another():
    with_branches = replace(recipes.build("remax"), strategy=Branch())
    told = refused(with_branches, env="guess")
    assert "greedy_reward" in told and "Branch does not" in told and "leave --strategy out" in told
    examine(recipes.build("remax"), env="guess")

    class Own:
        def begin(self, request):
            raise NotImplementedError

    examine(replace(with_branches, strategy=Own()), env="guess")


def test_feedback_needs_a_second_turn():
    assert "--max-turns 2" in refused(recipes.build("infopo"), max_turns=1)
    examine(recipes.build("infopo"))


class Telling(Environment):
    facts = ("mood",)
    rewards = ("style",)
    agents = ("left", "right")

    def reset(self, seed):
        return []

    def step(self, action):
        raise NotImplementedError


@pytest.fixture
def telling(monkeypatch):
    monkeypatch.setitem(environments.BUILT_IN, "telling", f"{__name__}:Telling")
    monkeypatch.setattr(
        environments, "load", lambda name, load=environments.load: Telling if name == "telling" else load(name)
    )


def test_facts_rewards_and_agents(telling):
    turn, whole = Recipe(advantage=Fact("mood", TURN)), Recipe(advantage=Fact("mood", TRAJECTORY))
    assert "the fact 'mood' of each turn" in refused(turn, env="guess") and "--env telling" in refused(
        turn, env="guess"
    )
    assert "the fact 'mood'" in refused(whole, env="guess")
    examine(turn, env="telling", difficulty=(1,))
    examine(whole, env="telling", difficulty=(1,))
    examine(replace(whole, replay=RecentBuffer()))  # a buffer may tell it
    for word, tells in (("reward style", "the reward 'style'"), ("agents", "which of several agents")):
        recipe = Recipe(advantage=Wanting(word))
        assert tells in refused(recipe, env="guess")
        examine(recipe, env="telling", difficulty=(1,))


class Wanting(Standardise):
    """A credit that asks for one thing."""

    def __init__(self, word):
        super().__init__()
        object.__setattr__(self, "_word", word)

    @property
    def requires(self):
        return frozenset({self._word})


@pytest.mark.parametrize(
    ("name", "flag", "words"),
    [("luffy", "demos", "--demos FILE"), ("dpo", "data", "--data FILE"), ("opd", "teacher", "--teacher PATH")],
)
def test_flags(name, flag, words):
    recipe = recipes.build(name)
    said = refused(recipe, method=name)
    assert said.startswith(f"{name} learns from") and words in said
    examine(recipe, **{flag: "something"})
    words = "is not there" if flag == "data" else f"leave --{flag} out"  # a file is looked into first
    assert words in refused(recipes.build("grpo"), method="grpo", **{flag: "something"})


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "1+1=", "answer": "2"}, "neither completions nor pairs; write --reward"),
        ({"prompt": "1+1=", "completion": "2"}, "learns from its own samples"),
    ],
)
def test_a_file_is_opened_before_it_is_refused(tmp_path, row, words):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    assert words in refused(recipes.build("grpo"), method="grpo", data=str(path))


def test_a_buffer_that_asks_for_demonstrations():
    cached = replace(recipes.build("grpo"), replay=ExpertCache())
    assert "--demos" in refused(cached)
    examine(cached, demos="oracle")


def test_either_beside_rollouts_or_instead_of_them():
    assert "write one of them" in refused(recipes.build("luffy"), data="a", demos="b")


def test_replay_is_always_there():
    examine(recipes.build("spear_replay"))


def test_a_vote_needs_finished_groups():
    """A reward that compares answers beside guidance that scores each answer alone, while its group grows."""
    examine(recipes.build("dr_grpo"), env="lookup", reward="majority")
    stuck = replace(recipes.build("dr_grpo"), guidance=experience.piece("guidance", "guide"))
    said = refused(stuck, env="lookup", reward="0.5*majority")
    assert "majority compares" in said and "HintWhenStuck" in said
    examine(stuck, env="lookup", reward="exact")
