"""Any credit with any objective: which slots are whose, and what cannot go together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.batches import records_of

from turnwise import recipes
from turnwise.algebra.mask import Both, InformativeGroups
from turnwise.algebra.value import Constant
from turnwise.core.batch import pack
from turnwise.core.levels import TOKEN
from turnwise.core.signals import TOKEN_CRITIC
from turnwise.data.replay import RecentBuffer, SuccessBuffer
from turnwise.errors import RecipeError, SettingError
from turnwise.recipes import catalogue
from turnwise.recipes.compose import CRITIC_SIGNALS, compose
from turnwise.recipes.recipe import Kind, Recipe
from turnwise.rollout.strategies import Branch, EntropyControl
from turnwise.tasks.budgets import Fixed

OBJECTIVE_SLOTS = ("ratio", "gate", "aggregate", "admission", "control", "gradient", "smoothing")


@pytest.mark.parametrize("objective", ["sapo", "gspo", "dapo", "vcpo", "aepo", "see_upo", "scale_rl"])
@pytest.mark.parametrize("credit", ["rloo", "grpo", "aspo", "a2tgpo", "ppo", "gigpo"])
def test_each_slot_is_one_side_s(objective, credit):
    a, b = recipes.build(objective), recipes.build(credit)
    both = compose(a, b)
    assert both.advantage == b.advantage
    assert all(getattr(both, slot) == getattr(a, slot) for slot in OBJECTIVE_SLOTS)
    split = lambda r, critic: [w for w in r.penalties if bool(w.signals & CRITIC_SIGNALS) == critic]  # noqa: E731
    assert split(both, False) == split(a, False)
    assert split(both, True) == split(b, True)
    assert hash(both) == hash(compose(a, b))


def test_a_method_with_its_own_credit_is_itself():
    for name in ("grpo", "ppo", "gspo", "a2tgpo", "turn_ppo", "gigpo"):
        recipe = recipes.build(name)
        assert compose(recipe, recipe) == recipe


def test_the_credit_is_that_of_the_one_and_the_update_that_of_the_other():
    """The advantages are the credit's to the last bit; with them in place of its own, so is the objective's loss."""
    batch = pack(records_of([[[2], [3, 1], [2]], [[1, 2], [2], [1]]], 2))
    a, b = recipes.build("gspo"), recipes.build("rloo")
    both = compose(a, b).objective
    credited, theirs = both.credit(batch), b.objective.credit(batch)
    torch.testing.assert_close(credited["advantage"].at(TOKEN).x, theirs["advantage"].at(TOKEN).x, rtol=0, atol=0)
    assert (both.ratio, both.gate, both.aggregate) == (a.ratio, a.gate, a.aggregate)


def test_a_critic_comes_with_the_credit_that_reads_it_and_goes_with_the_one_that_did():
    critic, plain = recipes.build("ppo"), recipes.build("grpo")
    assert compose(plain, critic).critics == 1 and compose(plain, critic).objective.signals & TOKEN_CRITIC
    assert compose(critic, plain).critics == 0 and not compose(critic, plain).objective.signals & TOKEN_CRITIC


def test_what_a_credit_lives_on_comes_along():
    lent = replace(
        recipes.build("rloo"), strategy=Branch(), replay=SuccessBuffer(), budget=Fixed(8, 4), keep=InformativeGroups()
    )
    both = compose(recipes.build("gspo"), lent)
    assert (both.strategy, both.replay, both.budget, both.keep) == (
        Branch(),
        SuccessBuffer(),
        Fixed(8, 4),
        InformativeGroups(),
    )
    assert "forks" in both.requirements
    assert compose(replace(recipes.build("gspo"), budget=Fixed(3, 5)), recipes.build("rloo")).budget == Fixed(3, 5)
    masks = compose(recipes.build("scale_rl"), replace(lent, keep=recipes.build("rec_ring").keep)).keep
    assert isinstance(masks, Both) or masks == InformativeGroups()


def preference() -> Recipe:
    return recipes.build("dpo")


@pytest.mark.parametrize(
    ("objective", "credit", "words"),
    [
        (lambda: recipes.build("gspo"), preference, "part of its loss (PreferenceLoss)"),
        (preference, lambda: recipes.build("gspo"), "no advantage for a credit to replace"),
        (lambda: recipes.build("gspo"), lambda: recipes.build("chord"), "learns from demonstrations is part of its loss"),
        (lambda: replace(recipes.build("gspo"), strategy=EntropyControl()),
         lambda: replace(recipes.build("rloo"), strategy=Branch()), "both methods define a strategy"),
        (lambda: replace(recipes.build("gspo"), replay=RecentBuffer()),
         lambda: replace(recipes.build("rloo"), replay=SuccessBuffer()), "both methods define a replay"),
    ],
    ids=["preference as credit", "preference as objective", "imitation as credit", "two strategies", "two buffers"],
)  # fmt: skip
def test_what_cannot_go_together_is_refused_in_words(objective, credit, words):
    with pytest.raises(RecipeError) as caught:
        compose(objective(), credit())
    assert words in str(caught.value)


def test_the_peers_of_a_credit_need_a_group():
    with pytest.raises(RecipeError, match="--group-size 2"):
        compose(replace(recipes.build("ppo"), budget=Fixed(8, 1)), recipes.build("grpo"))


# -------------------------------------------------------------------- catalogue


def test_every_method_has_a_kind():
    kinds = {name: catalogue.kind(name) for name in recipes.METHODS}
    assert set(kinds.values()) <= set(Kind)
    expected = {"grpo": "objective", "ppo": "objective", "aepo": "objective", "a2tgpo": "credit", "gigpo": "credit"}
    expected |= {"luffy": "data", "opd": "data", "dpo": "preference", "chord": "data"}
    assert {name: kinds[name] for name in expected} == expected


def test_named_with_a_credit():
    both = compose(recipes.build("sapo"), recipes.build("gigpo"))
    assert catalogue.parse_method("sapo", "gigpo") == catalogue.parse_method("sapo+gigpo") == both
    entry = catalogue.describe_method("sapo", "gigpo")
    assert entry["name"] == "sapo+gigpo" and entry["slots"] == both.slots() and "state" in entry["requirements"]
    changed = {row["slot"] for row in catalogue.slot_differences("sapo", "sapo+gigpo")}
    assert "advantage" in changed and not changed & set(OBJECTIVE_SLOTS)
    with pytest.raises(SettingError, match="no method 'nope' to take the credit of"):
        catalogue.parse_method("sapo", "nope")
    with pytest.raises(SettingError, match="the credit of dpo does not go with this method"):
        catalogue.parse_method("sapo", "dpo")


def test_a_constant_is_no_credit():
    with pytest.raises(RecipeError, match="part of its loss"):
        compose(recipes.build("grpo"), Recipe(advantage=Constant(1.0)))
