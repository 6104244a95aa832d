"""Episodes along an expert's path: what is patched, how often, what is read afterwards, and what is trained on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.untrained import Untrained

from turnwise.core.records import Status
from turnwise.environments.base import text_action
from turnwise.environments.expert_path import KeyDoorPath, LookupPath
from turnwise.errors import SettingError
from turnwise.rollout.strategies import Independent

WRONG = {"north": "south", "south": "north", "east": "west", "west": "east", "take": "open", "open": "take"}


def played(env, right):
    """Play to the end: in turn k the expert's action if ``right[k]``, else another readable one. Returns the steps."""
    steps = []
    for k in range(100):
        expected = env.oracle().text
        steps.append(env.step(text_action(expected if right(k) else WRONG[expected])))
        if steps[-1].terminated or steps[-1].truncated:
            return steps
    raise AssertionError("no end")


def length(seed):
    env = KeyDoorPath()
    env.reset(seed)
    return int(env.turns_to_solve())


@pytest.mark.parametrize("cls", [KeyDoorPath, LookupPath])
def test_the_expert_needs_no_patch(cls):
    env = cls()
    env.reset(3)
    steps = []
    while not (steps and steps[-1].terminated):
        steps.append(env.step(env.oracle()))
    assert all(s.reward == pytest.approx(1.0) and s.context is None and s.info["facts"]["match"] == 1 for s in steps)
    assert steps[-1].info["success"] is True and env.patched == 0


@given(st.integers(0, 50), st.sets(st.integers(0, 14)), st.integers(-1, 3))
def test_never_more_patches_than_allowed_and_never_longer_than_the_expert(seed, wrong, patches):
    env = KeyDoorPath(patches=patches)
    env.reset(seed)
    steps = played(env, lambda k: k not in wrong)
    errors = [k for k in range(length(seed)) if k in wrong]
    assert len(steps) <= length(seed) and (patches == -1 or env.patched <= patches)
    assert [s.info["facts"]["match"] for s in steps] == [float(k not in wrong) for k in range(len(steps))]
    if patches == -1 or len(errors) <= patches:  # the whole path is visited
        assert len(steps) == length(seed) and steps[-1].terminated and env.patched == len(errors)
        assert steps[-1].info["success"] is (not errors)
    else:  # it ends at the first error that is not patched
        assert steps[-1].truncated and len(steps) == errors[patches] + 1


def test_a_patched_history_has_the_experts_words():
    env = KeyDoorPath(patches=1)
    first = env.reset(3)
    expected = env.oracle()
    step = env.step(text_action(WRONG[expected.text]))
    assert step.context == [*first, {"role": "assistant", "content": expected.text}]
    twin = KeyDoorPath()
    twin.reset(3)
    assert step.messages == twin.step(expected).messages and env.state_key() == twin.state_key()


def test_rewards_by_what_the_action_is_worth():
    def reward(action):
        env = KeyDoorPath()
        env.reset(3)
        assert env.oracle().text in ("north", "south", "east", "west")
        return env.step(action(env)).reward

    assert reward(lambda env: env.oracle()) == pytest.approx(1.0)
    assert reward(lambda env: text_action(WRONG[env.oracle().text])) == pytest.approx(0.1 + 0.9 * 0.5)
    assert reward(lambda env: text_action("open")) == pytest.approx(0.1 + 0.9 * 0.1)
    assert reward(lambda env: text_action("jump")) == 0.0


def test_held_out_episodes_are_the_environments_own():
    env = KeyDoorPath(split="held_out", patches=0)
    env.reset(3)
    step = env.step(text_action("jump"))
    assert step.reward == 0 and not step.truncated and step.context is None


def test_wrong_limits_are_refused():
    with pytest.raises(SettingError, match="patches is -2"):
        KeyDoorPath(patches=-2)


def test_the_experts_words_are_never_trained_on():
    """Rollouts of an untrained model: after a patch the model reads a new sequence, and what was sampled is what is read."""
    world = Untrained("turnwise.environments.expert_path:KeyDoorPath,patches=3", max_tokens=4, history=0)
    group = world.grow(Independent(), seed=5, size=4)
    assert all(t.status != Status.FAILED for t in group.trajectories), group.trajectories[0].reason
    assert any(turn.restart for t in group.trajectories for turn in t.turns[1:])
    measured, recorded = world.logp(group)
    torch.testing.assert_close(measured, recorded, rtol=1e-4, atol=1e-4)
