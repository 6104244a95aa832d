"""Episodes that a limit cut: out of the loss where a method or ``--mask-truncated`` asks for it, in the baseline all the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.batches import records_of

from turnwise import recipes
from turnwise.algebra.aggregate import Mean
from turnwise.checks.synthetic import gradient, random_policy
from turnwise.config.settings import Settings
from turnwise.core.batch import pack
from turnwise.core.levels import TOKEN, TRAJECTORY
from turnwise.core.records import Status, Stop
from turnwise.core.signals import Signal
from turnwise.credit.selectors import Finished
from turnwise.training.plan import make_recipe

SHAPE = [[[2], [1, 3], [2, 2]], [[2, 2], [3]]]


def batch_of(cut: tuple[int, ...], how: str = "status"):
    groups, place, made = records_of(SHAPE, 3), 0, []
    for group in groups:
        members = []
        for t in group.trajectories:
            turns = tuple(replace(turn, stop=Stop.TOKEN) for turn in t.turns)
            t = replace(t, status=Status.FINISHED, turns=turns)
            if place in cut:
                last = replace(t.turns[-1], stop=Stop.LENGTH)
                t = replace(t, status=Status.TRUNCATED) if how == "status" else replace(t, turns=(*t.turns[:-1], last))
            members.append(t)
            place += 1
        made.append(replace(group, trajectories=tuple(members)))
    return random_policy(pack(made), 3)


def slope(recipe, batch, leaves):
    return gradient(recipe.objective, batch, leaves).of[Signal.LOGP]


def test_without_a_cut_episode_it_is_grpo():
    """Identity: GRPO without KL, with the wider upper clip and the mean over tokens."""
    batch, leaves = batch_of(())
    grpo = recipes.build("two_sided_grpo", clip=0.2)
    base = replace(grpo, gate=recipes.build("mini_o3").gate, aggregate=Mean(TOKEN))
    torch.testing.assert_close(slope(recipes.build("mini_o3"), batch, leaves), slope(base, batch, leaves))


@pytest.mark.parametrize("how", ["status", "tokens of the last turn"])
def test_a_cut_episode_counts_in_the_baseline_and_not_in_the_loss(how):
    batch, leaves = batch_of((1,), how)
    recipe, plain = recipes.build("mini_o3"), recipes.build("grpo")
    advantage = recipe.objective.credit(batch)["advantage"].x
    torch.testing.assert_close(advantage, plain.objective.credit(batch)["advantage"].x)
    of_cut = batch.tree.ancestor(TOKEN, TRAJECTORY) == 1
    found = slope(recipe, batch, leaves)
    assert not found[of_cut].any() and found[~of_cut].any()
    whole = slope(replace(recipe, keep=plain.keep), batch, leaves)
    share = batch.tree.count(TOKEN) / int((~of_cut).sum())  # the average is over what is left
    torch.testing.assert_close(found[~of_cut], whole[~of_cut] * share)


def test_what_was_left_out_is_counted():
    batch, leaves = batch_of((1, 4))
    stats = gradient(recipes.build("mini_o3").objective, batch, leaves).stats
    assert stats["dropped/tokens: unfinished"] == 4 + 3


def test_any_method_takes_the_mask():
    for name in ("gspo", "ppo", "gigpo", "capo"):
        plain = make_recipe(Settings(method=name))
        masked = make_recipe(Settings.of({"method": name, "mask_truncated": True}))
        assert Finished() not in set(plain.keep.parts) and Finished() in set(masked.keep.parts)
        assert replace(masked, keep=plain.keep) == plain
    batch, leaves = batch_of((0,))
    of_cut = batch.tree.ancestor(TOKEN, TRAJECTORY) == 0
    for name in ("reinforce", "gspo"):
        found = slope(make_recipe(Settings(method=name, mask_truncated=True)), batch, leaves)
        assert not found[of_cut].any() and found[~of_cut].any()
