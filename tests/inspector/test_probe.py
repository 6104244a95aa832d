"""Probe-reward: what is paid although it is wrong is named with its transcript; sound rewards raise no alarm."""

from __future__ import annotations

import json
import math
import time

import pytest

from trials.rewards import multi_turn, single_turn, sound
from trials.rewards.built_in import BUILT_IN, NEEDS, PatternReward
from trials.rewards.measure import environments, table
from turnwise.cli.main import main
from turnwise.core.protocols import Action, Step
from turnwise.environments.base import Environment, text_action, user_message
from turnwise.errors import SettingError
from turnwise.inspector.probe import search
from turnwise.inspector.probe.play import ProbeEpisode, ProbePlayer, ProbeTask, gather_lore
from turnwise.inspector.probe.probe import probe_reward
from turnwise.inspector.probe.search import search_acts, train_against
from turnwise.inspector.probe.verdict import BLIND, FAILS, MORE, OraclePay, judge
from turnwise.rewards import builtin

TINY = 0.01  # minutes, where nothing is to be found
ENOUGH = 10.0  # minutes, where something is found long before


def episode(seed, reward, right, said="x"):
    actions = (Action(said),)
    return ProbeEpisode(
        ProbeTask(seed), ({"role": "user", "content": "?"}, actions[0].message), actions, (reward,), right
    )


def pay(*rewards):
    return OraclePay({ProbeTask(n): episode(n, reward, True, f"answer {n}") for n, reward in enumerate(rewards)})


# -------------------------------------------------------------------- verdict


def test_a_failure_that_is_paid_like_the_oracle_is_wrong():
    verdict = judge([episode(n, 1.0, False) for n in range(3)], pay(1.0, 1.0, 1.0))
    assert verdict and verdict.reason == FAILS and verdict.tasks == 3


def test_a_failure_with_partial_credit_is_not():
    assert judge([episode(n, 0.9, False) for n in range(3)], pay(1.0, 1.0, 1.0)) is None


def test_a_success_that_is_paid_more_than_the_oracle_is_wrong():
    verdict = judge([episode(n, 1.5, True, f"s{n}") for n in range(3)], pay(1.0, 1.0, 1.0))
    assert verdict and verdict.reason == MORE and verdict.excess == pytest.approx(0.5)


def test_luck_in_one_task_is_not():
    assert judge([episode(0, 1.0, True, "a"), episode(1, 0.0, False, "b")], pay(0.8, 0.8)) is None


def test_the_same_answer_to_every_task_cannot_be_right():
    right = [episode(n, 1.0, True, "same") for n in range(4)]
    verdict = judge(right, pay(1.0, 1.0, 1.0, 1.0))
    assert verdict and verdict.reason == BLIND
    assert judge([*right[:2], episode(2, 0.0, False, "same"), episode(3, 0.0, False, "same")], pay(1, 1, 1, 1)) is None


def test_what_the_oracle_does_is_never_wrong():
    assert judge([episode(n, 1.0, True, f"answer {n}") for n in range(3)], pay(1.0, 1.0, 1.0), blind=True) is None


def test_where_the_oracle_earns_nothing_doing_nothing_is_no_proof():
    assert judge([episode(n, 0.0, False) for n in range(3)], pay(0.0, 0.0, 0.0)) is None
    assert judge([episode(n, 0.1, False) for n in range(3)], pay(0.0, 0.0, 0.0)) is not None


def test_negative_pay_is_compared_as_it_is():
    assert judge([episode(n, -0.5, False) for n in range(3)], pay(-1.0, -1.0, -1.0)) is not None
    assert judge([episode(n, -1.5, False) for n in range(3)], pay(-1.0, -1.0, -1.0)) is None


# ----------------------------------------------------------------- loopholes


FOUND = (single_turn.NotANumber, single_turn.JudgeReadsScore, multi_turn.DrawPays, multi_turn.HintPaysInFull)


@pytest.mark.parametrize("cls", FOUND, ids=lambda cls: cls.__name__)
def test_planted_loopholes_are_found(cls):
    report = probe_reward(cls, ENOUGH)
    assert not report.ok and all(finding.verdict.example.messages for finding in report.findings)


def test_a_sound_environment_raises_no_alarm_by_scripts_and_search():
    assert probe_reward(sound.RepeatAfterMe, TINY).ok


@pytest.mark.thorough
@pytest.mark.parametrize("cls", BUILT_IN, ids=lambda cls: cls.__name__)
def test_our_own_rewards_raise_no_alarm_by_scripts_and_search(cls):
    if cls in NEEDS:
        pytest.importorskip(NEEDS[cls])
    report = probe_reward(cls, 0.2)
    assert report.ok and report.episodes, [(f.about, f.verdict) for f in report.findings]


@pytest.mark.thorough
def test_a_built_in_reward_with_a_hole_raises_one(monkeypatch):
    monkeypatch.setattr(PatternReward, "score", lambda self, text: builtin.regex(text, pattern=self.answer()))
    assert not probe_reward(PatternReward, ENOUGH).ok


def test_the_search_finds_acts_that_are_paid_again_and_again():
    player = ProbePlayer(multi_turn.ProgressWithoutRegress)
    try:
        lore = gather_lore(player, [ProbeTask(n) for n in range(1000, 1004)])
        oracle = OraclePay({ProbeTask(n): player.play(ProbeTask(n), lambda m: m.oracle()) for n in range(2)})
        tasks = list(oracle.episodes)
        found = search_acts(player, lore, tasks, oracle, time.monotonic() + 60 * ENOUGH)
        adversary = next(a for a in found if judge([player.play(t, a.behaviour) for t in tasks], oracle))
        assert "'right'" in adversary.about
    finally:
        player.close()


# ---------------------------------------------------- odd environments, a check


class WithoutMeasure(Environment):
    """Neither an oracle nor a success."""

    def reset(self, seed):
        return [user_message(f"task {seed}")]

    def step(self, action):
        return Step([], 1.0, terminated=True)


class Raising(single_turn.Sum):
    """Faulty for every action but the oracle's."""

    def pay(self, text):
        if not self.exact(text):
            raise ValueError("cannot read this")
        return 1.0, True


class WithoutOracle(Environment):
    """Pays every text of more than three words in full, and calls only ``right`` right."""

    max_turns = 1

    def reset(self, seed):
        return [user_message(f"task {seed}: say yes")]

    def step(self, action):
        right = action.text == "yes"
        return Step([], float(right or len(action.text.split()) > 3), terminated=True, info={"success": right})

    def random_action(self, rng):
        return text_action(rng.choice(("yes", "no")))


def test_an_environment_in_which_nothing_is_wrong_is_refused():
    with pytest.raises(SettingError, match=r"says what is wrong; write a method `oracle`"):
        probe_reward(WithoutMeasure, TINY)


def exact(env, messages):
    return env.exact(messages[-1]["content"])


def test_a_check_of_the_user_says_what_is_wrong():
    report = probe_reward(single_turn.EmptyIsPrefix, ENOUGH, check=exact)
    assert {finding.verdict.reason for finding in report.findings} == {FAILS}


def test_an_environment_that_raises_is_no_finding():
    assert probe_reward(Raising, TINY).ok


def test_without_an_oracle_the_best_success_is_the_measure():
    report = probe_reward(WithoutOracle, ENOUGH)
    assert not report.ok and "no oracle" in report.notes[0]


def test_minutes_that_are_no_time_are_refused():
    with pytest.raises(SettingError, match="positive"):
        probe_reward(sound.ExactSum, 0.0)


# -------------------------------------------------------------------- command


def test_the_command_shows_the_transcript_and_exits_with_one(capsys):
    assert main(["probe-reward", "trials.rewards.single_turn:NotANumber", "--minutes", "10"]) == 1
    shown = capsys.readouterr().out
    assert "assistant: answer: nan" in shown and "cannot know the answer" in shown


def test_the_command_prints_json_alone(capsys):
    assert main(["probe-reward", "trials.rewards.sound:ExactSum", "--minutes", str(TINY), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


def test_nonsense_is_refused_by_the_command(capsys):
    assert main(["probe-reward", "calculater"]) == 2 and "calculator" in capsys.readouterr().err
    assert main(["probe-reward", "guess", "--check", "nowhere.py:f"]) == 2


@pytest.mark.slow
def test_the_tiny_model_is_trained_and_its_paid_failures_are_judged():
    player = ProbePlayer(multi_turn.AlivePaid)
    small = {"steps": 1, "groups": 2, "group_size": 4, "cold_steps": 2, "cold_demos": 8}
    try:
        verdict, line = train_against(multi_turn.AlivePaid, math.inf, player, OraclePay({}, best=1.0), **small)
        assert line == "the tiny model was trained for 1 steps"
        assert (
            verdict is not None and verdict.example.reward > 1.0 and verdict.example.messages[1]["role"] == "assistant"
        )
        nothing, line = train_against(multi_turn.AlivePaid, 0.0, player, OraclePay({}, best=1.0), **small)
        assert nothing is None and "before the tiny model's first step" in line
    finally:
        player.close()


def test_training_ends_before_a_step_that_would_end_too_late(monkeypatch):
    now = iter((0.0, 4.0, 7.0))
    monkeypatch.setattr(search.time, "monotonic", lambda: next(now))
    clock = search.StepClock(10.0)
    clock("step", {})
    clock("step", {})
    with pytest.raises(search.TimeIsUp):
        clock("step", {})


def test_the_table_is_made_from_rows():
    assert [kind for kind, _ in environments()].count("loophole") == 20 and len(list(environments())) == 30
    rows = [
        {"environment": "A", "kind": "loophole", "about": "a", "found": False, "findings": [], "seconds": 1.0},
        {"environment": "B", "kind": "sound", "about": "b", "found": False, "findings": [], "seconds": 1.0},
    ]
    assert "0 of 1 loopholes" in table(rows) and "**not found**" in table(rows)
