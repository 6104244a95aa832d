"""Tasksets of verifiers: prompts and rewards of the package, answers of ours. Skipped where the package is missing."""

from __future__ import annotations

import asyncio

import pytest

from turnwise.core.protocols import Action
from turnwise.environments import load, make
from turnwise.errors import SettingError

pytestmark = pytest.mark.integration
SPEC = "verifiers:small_taskset"


@pytest.fixture
def taskset(monkeypatch):
    pytest.importorskip("verifiers.v1", reason="verifiers 0.4 is not installed")
    import sys

    from support import small_taskset

    monkeypatch.setitem(sys.modules, "small_taskset", small_taskset)


def test_the_rewards_of_a_task_score_the_answer(taskset):
    env = make(SPEC)
    system, user = env.reset(3)
    assert system == {"role": "system", "content": "add."} and user["content"].endswith("?")
    a, b = map(int, user["content"].rstrip("?").split("+"))
    right = asyncio.run(env.step(Action(str(a + b))))
    assert right.terminated and right.reward == 1.5 and right.info["success"]
    assert right.info["rewards"] == {"right": 1.0, "short": 0.5}
    wrong = asyncio.run(env.step(Action("a long answer")))
    assert wrong.reward == 0 and not wrong.info["success"]


def test_splits_are_disjoint(taskset):
    cls = load(SPEC)
    keys = {where: {task.key for task in tasks} for where, tasks in cls.tasks.items()}
    assert keys["train"] and keys["held_out"] and not keys["train"] & keys["held_out"]


def test_what_cannot_be_loaded_or_played_is_refused(taskset, monkeypatch):
    with pytest.raises(SettingError, match="cannot be made"):
        load("verifiers:no-such-taskset")
    with pytest.raises(SettingError, match="tasks"):
        load(f"{SPEC},task=3")
    from support import small_taskset

    monkeypatch.setattr(small_taskset.SumTask, "toolsets", classmethod(lambda cls, config: [object()]))
    with pytest.raises(SettingError, match="tool servers"):
        load(f"{SPEC},tasks=7")


def test_a_missing_package_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(SettingError, match=r"turnwise-rl\[verifiers\]"):
        load("verifiers:anything")
