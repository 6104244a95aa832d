"""Every deliberately broken environment is told from a sound one, in the words of its own problem."""

import time

import numpy as np
import pytest
from support.broken import BROKEN, Minimal, Sound, answer

from turnwise.environments import BUILT_IN, load, make
from turnwise.environments.base import text_action
from turnwise.environments.checker.check import check_env
from turnwise.errors import SettingError


@pytest.mark.parametrize(("cls", "words"), BROKEN, ids=[cls.__name__ for cls, _ in BROKEN])
def test_each_problem_is_found(cls, words):
    report = check_env(cls, episodes=4, seconds=0.5 if "did not return" in words else 30.0)
    assert not report.ok
    assert any(words in problem for problem in report.problems), report.text()


def test_nothing_is_found_in_a_sound_one():
    report = check_env(Sound, episodes=10)
    assert report.ok and not report.warnings, report.text()
    assert report.played["oracle"].won == report.played["oracle"].episodes == 20


def test_reset_and_an_async_step_are_enough():
    report = check_env(Minimal, episodes=4)
    assert report.ok, report.text()
    assert "takes no split" in report.warnings[0]


def test_what_an_episode_accepts_the_check_accepts():
    class Tuples(Sound):
        def step(self, action):
            step = super().step(action)
            return step.messages, step.reward, step.terminated, step.truncated, step.info

    class NumPy(Sound):
        def step(self, action):
            step = super().step(action)
            info = {name: np.bool_(value) for name, value in step.info.items()} | {"tool_calls": np.int64(1)}
            return (
                list(step.messages),
                np.float32(step.reward),
                np.bool_(step.terminated),
                np.bool_(step.truncated),
                info,
            )

    for cls in (Tuples, NumPy):
        report = check_env(cls, episodes=4)
        assert report.ok and not report.warnings, report.text()
        assert report.played["oracle"].won == 8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"truncated": None}, "truncated is None, taken as False; write True or False"),
        ({"terminated": 1}, "terminated is 1, taken as True; write True or False"),
        (
            {"info": {"success": False, "tool_calls": 1.5}},
            "info['tool_calls'] is 1.5, taken as 1; write a whole number",
        ),
    ],
)
def test_warns_of_what_an_episode_reads_but_perhaps_not_as_meant(changes, words):
    class Odd(Sound):
        oracle = None

        def step(self, action):
            step = super().step(action)
            return answer(step, **{"info": {"success": False}, "terminated": step.truncated, **changes})

    report = check_env(Odd, episodes=2)
    assert any(words in warning for warning in report.warnings), report.text()


def test_one_mistake_is_one_line_whatever_it_quotes():
    class Text(Sound):
        def reset(self, seed):
            return f"say {seed}"

    assert len(check_env(Text, episodes=6).problems) == 1


def test_warns_of_what_cannot_teach():
    class Easy(Sound):
        def random_action(self, rng):
            return self.oracle()

    class Unpaid(Sound):
        def step(self, action):
            return answer(super().step(action), reward=0.0)

    assert "random actions succeed in 8 of 8" in check_env(Easy, episodes=4).warnings[0]
    assert "earns no reward" in check_env(Unpaid, episodes=4).warnings[0]


def test_a_secret_no_blind_player_can_see_is_no_problem():
    class Secretive(Sound):
        oracle = None

        def reset(self, seed):
            super().reset(seed)
            return [{"role": "user", "content": "guess"}]

        def state_key(self):
            return None

    report = check_env(Secretive, episodes=4)
    assert report.ok and "without an oracle" in report.text(), report.text()


def test_nonsense_without_end_is_a_warning():
    class Patient(Sound):
        def step(self, action):
            step = super().step(action)
            return step if action.text else answer(step, truncated=False)

    report = check_env(Patient, episodes=2)
    assert report.ok and "malformed actions does not end" in report.warnings[0], report.text()


def test_text_says_how_often_and_where_first():
    class Weak(Sound):
        def oracle(self):
            return text_action("no")

    text = check_env(Weak, episodes=3).text()
    assert text.startswith("Weak: 1 problem\n")
    assert "oracle:        6 episodes, 0% won, 3.0 turns each" in text
    assert "problem: the oracle does not succeed (seen 6 times, first at difficulty 1, train, seed 0)" in text


def test_a_hang_costs_no_more_than_its_limit():
    from support.broken import Hangs

    began = time.monotonic()
    check_env(Hangs, episodes=2, seconds=0.2)
    assert time.monotonic() - began < 15, "it waited for the environment, which hangs for 30 s"


@pytest.mark.thorough
@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_environments_pass(name):
    if name == "calculator":
        pytest.importorskip("turnwise.environments.builtin.calculator")
    report = check_env(name, episodes=4)
    assert report.ok, report.text()
    assert "oracle" in report.played and "demonstrate" in report.played


def test_load_resolves_names_and_specs():
    assert load("keydoor") is load("turnwise.environments.builtin.keydoor:KeyDoor")
    assert load("support.broken:Sound") is Sound


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("keydor", "did you mean 'keydoor'"),
        ("turnwise.environments.builtin.keydoor:KeyDor", "did you mean 'KeyDoor'"),
        ("no_such_module_here:Thing", "no module 'no_such_module_here'"),
        (":Thing", "write module:"),
        ("support.broken:answer", "has no class 'answer'"),
    ],
)
def test_load_says_what_to_write(spec, words):
    with pytest.raises(SettingError, match=words):
        load(spec)


def test_make_does_not_ignore_what_a_class_cannot_take():
    assert make("support.broken:Minimal").reset(0)
    for settings in ({"difficulty": 2}, {"split": "held_out"}):
        with pytest.raises(SettingError, match="its __init__ takes no keyword"):
            make("support.broken:Minimal", **settings)


def test_the_report_says_in_words_what_was_tried():
    report = check_env("guess", episodes=2)
    assert len(report.tried) == 8 and all(f"  tried: {words}" in report.text() for words in report.tried)
    assert any("8 episodes at once" in words for words in report.tried)


def test_the_report_says_what_was_not_tried_and_why():
    class Breaks:
        def __init__(self):
            pass

        def reset(self, seed):
            return [{"role": "user", "content": "hello"}]

        def step(self, action):
            raise RuntimeError("broken")

    report = check_env(Breaks, episodes=2)
    assert not report.ok and any("stopped by a problem" in words for words in report.tried)
    assert "no splits: __init__ takes none" in report.tried
