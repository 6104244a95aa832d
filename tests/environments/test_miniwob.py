"""Pages of MiniWoB++ in a headless browser; skipped where the package or a browser is missing."""

from __future__ import annotations

import importlib.util
import random
import re
import shutil

import pytest

from turnwise.core.protocols import Action
from turnwise.environments.families.miniwob import BROWSERS
from turnwise.errors import SettingError

missing = [name for name in ("miniwob", "playwright") if importlib.util.find_spec(name) is None]
missing += [] if any(map(shutil.which, BROWSERS)) else ["a browser"]
installed = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def make(name):
    from turnwise.environments import make

    return make(name)


@installed
@pytest.mark.slow
@pytest.mark.integration
def test_the_page_is_told_and_the_scripted_policy_solves_tasks_of_one_click():
    for task in ("click-test", "click-button"):
        env = make(f"miniwob:{task}")
        first = env.reset(3)
        assert len(first) == 2 and re.search(r'^[0-9]+ button "', first[1]["content"], re.MULTILINE)
        step = env.step(env.oracle())
        assert step.terminated and step.info["success"] and step.reward == 1.0, task
        assert env.step(Action("click 1")).terminated
        env.close()


@installed
@pytest.mark.slow
@pytest.mark.integration
def test_the_seed_decides_and_words_are_typed():
    one, same, other = (make("miniwob:enter-text") for _ in range(3))
    tasks = [env.reset(seed)[0]["content"] for env, seed in ((one, 1), (same, 1), (other, 2))]
    assert tasks[0] == tasks[1] != tasks[2]
    word = re.search(r'"([^"]+)"', tasks[0])[1]
    number = next(n for n, (kind, *_) in enumerate(one.elements, 1) if kind == "input text")
    step = one.step(Action(f"type {number} {word}"))
    assert not step.terminated and word in step.messages[0]["content"]
    button = next(n for n, (kind, *_) in enumerate(one.elements, 1) if kind == "button")
    assert one.step(Action(f"click {button}")).info["success"]
    for env in (one, same, other):
        env.close()


@installed
@pytest.mark.slow
@pytest.mark.integration
def test_what_is_no_action_is_answered_and_the_turns_are_limited():
    env = make("miniwob:click-test,turns=3")
    env.reset(0)
    assert env.random_action(random.Random(0)).text == "click 1"
    for text, words in (("press it", "no action"), ("click 99", "no action"), ("type 1 x", "not possible")):
        step = env.step(Action(text))
        assert words in step.messages[0]["content"] and step.info["tool_errors"] == 1
    assert step.truncated and step.info["success"] is False
    env.close()


@installed
@pytest.mark.parametrize(
    ("name", "words"), [("miniwob:click-tests", "click-test"), ("miniwob:click-test,turn=3", "turns")]
)
def test_an_unknown_task_or_option_is_refused(name, words):
    with pytest.raises(SettingError, match=words):
        make(name)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    from turnwise.environments.families.miniwob import pages

    with pytest.raises(SettingError, match=r"turnwise-rl\[miniwob\]"):
        pages()
