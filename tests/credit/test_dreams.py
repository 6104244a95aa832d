"""DynaWeb: its loss against the oracle, the mixture of expert items, and episodes in a world model."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import dreams, objectives, records
from support.batches import from_oracle
from support.drawn import CLIP
from support.outcomes import episode
from support.segment_helpers import close, credit, slopes

from turnwise import recipes
from turnwise.core.records import Fork, Group, Origin, Task
from turnwise.core.signals import Signal
from turnwise.data.replay import ExpertItems, ReplaySources
from turnwise.environments.base import text_action
from turnwise.environments.builtin.keydoor import KeyDoor
from turnwise.environments.dreamed import VARIANTS, Dreamed
from turnwise.errors import RecipeError, SettingError

SEEDS = st.integers(0, 10**6)


@settings(deadline=None, max_examples=25)
@given(seed=SEEDS, low=CLIP, high=CLIP)
def test_oracle(seed, low, high):
    reference, dice = records.random_batch(seed), random.Random(seed)
    for one in records.trajectories(reference):
        one.facts["origin"] = dice.choice(["expert", "policy", "policy"])
    batch, policy = from_oracle(reference)
    expected, recipe = dreams.dynaweb(reference, low, high), recipes.build("dynaweb", low=low, high=high)
    close(credit(recipe, batch), expected.advantage)
    loss, found = slopes(recipe.objective, batch, policy)
    assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-9, abs=1e-9)
    close(found[Signal.LOGP], records.gradients(reference, expected.loss))


@settings(deadline=None, max_examples=10)
@given(seed=SEEDS)
def test_without_experts_it_is_gspo(seed):
    """Card: q = 0 → pure imagination."""
    reference = records.random_batch(seed)
    batch, policy = from_oracle(reference)
    loss, _ = slopes(recipes.build("dynaweb", low=0.1, high=0.2).objective, batch, policy)
    assert loss.item() == pytest.approx(objectives.gspo(reference, 0.1, 0.2)[1].item(), rel=1e-9, abs=1e-9)


# ----------------------------------------------------------------- expert items

TASK = Task("test", 1)


def group(number, size=8):
    return Group(str(number), TASK, tuple(episode(f"{number}.{i}", TASK, False) for i in range(size)))


def opened(share, expert=True):
    shown = replace(episode("oracle:t", TASK, True), origin=Origin.EXPERT)
    return ExpertItems(share).open(ReplaySources(lambda key: None, lambda task: shown if expert else None, 7))


def experts(mixed):
    return [t.origin == Origin.EXPERT for t in mixed.trajectories]


def test_a_share_of_the_rollouts_is_replaced():
    live, groups = opened(0.5), [group(n) for n in range(100)]
    mixed = live.mix(groups, 3)
    drawn = [flag for one in mixed for flag in experts(one)]
    assert 0.42 < sum(drawn) / len(drawn) < 0.58
    assert all(len({t.id for t in one.trajectories}) == 8 for one in mixed)
    assert mixed == opened(0.5).mix(groups, 3) and mixed != live.mix(groups, 4)
    assert opened(0.0).mix(groups, 0) == groups and opened(0.5, expert=False).mix(groups, 0) == groups
    assert all(all(experts(one)) for one in opened(1.0).mix(groups, 0))
    assert live.missing_demonstrations(groups[:2]) == [TASK, TASK] and opened(0.0).missing_demonstrations(groups) == []


def test_a_trajectory_that_others_fork_from_stays():
    forked = replace(
        group(0, 3), trajectories=(*group(0, 2).trajectories, replace(episode("0.2", TASK, False), fork=Fork("0.0", 0)))
    )
    assert experts(opened(1.0).mix([forked], 0)[0]) == [False, True, True]
    with pytest.raises(RecipeError, match="share is 2; write a number in"):
        ExpertItems(2)


# ------------------------------------------------------------------- the dream


class Dream(Dreamed, KeyDoor):
    """Every third step leads to the goal, if it was north."""

    def predict(self, seen, action, variant):
        return f"{action} from ({seen[-40:]}) as {variant}" + (
            " goal here" if self.dreamed == 3 and action == "north" else ""
        )

    def judge(self, observation):
        return "goal here" in observation


def test_a_training_episode_is_dreamed_from_a_real_start():
    env, real = Dream(horizon=5), KeyDoor()
    assert env.reset(4) == real.reset(4) and env.state_key() is None
    steps = [env.step(text_action(word)) for word in ("east", "take", "north")]
    assert steps[0].messages[0]["content"].startswith("east from (") and steps[2].terminated and steps[2].reward == 1
    assert steps[2].info == {"success": True} and not steps[1].info and not steps[1].reward
    with pytest.raises(NotImplementedError, match="cannot go on in a dream"):
        env.oracle()
    env.reset(4)
    ends = [env.step(text_action("east")) for _ in range(5)]
    assert [step.truncated for step in ends] == [False] * 4 + [True] and ends[-1].info == {"success": False}
    assert {Dream().reset(n) is not None for n in range(3)} == {True}
    with pytest.raises(SettingError, match="horizon is 0"):
        Dream(horizon=0)


def test_evaluations_and_demonstrations_are_real():
    for make, act in ((lambda: Dream(split="held_out"), KeyDoor.oracle), (Dream, Dream.oracle)):
        env = make()
        real = KeyDoor(split=env.split)
        env.reset(2), real.reset(2)
        for _ in range(28):
            one, two = env.step(act(env)), real.step(real.oracle())
            assert one.messages == two.messages and one.reward == two.reward
            if one.terminated:
                break
        assert one.terminated and one.reward == 1


def test_dreams_of_one_transition_differ_between_tasks():
    env, variants = Dream(), set()
    for seed in range(60):
        env.reset(seed)
        variants.add(env.variant)
    assert variants == set(range(VARIANTS))
