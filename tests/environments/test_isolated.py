"""An environment in another process may do to it what it likes: the episode fails with the reason, and the next one plays."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from dataclasses import replace

import pytest
from support.episodes import RENDERER, FixedSession

from turnwise.core.protocols import Action, ToolCall
from turnwise.core.records import Sampling, Status, Task
from turnwise.environments import isolated
from turnwise.environments.isolated import PROCESSES, IsolatedEnvironment, decode_action, encode_action
from turnwise.rollout.episode import Episode, EpisodeLimits

HERE = "support.misbehaving"
LIMITS = EpisodeLimits(turns=3, context=400, environment_seconds=4.0)


@pytest.fixture(autouse=True)
def processes(monkeypatch):
    monkeypatch.setenv(
        "PYTHONPATH", os.path.dirname(os.path.dirname(__file__))
    )  # where the process finds tests/support
    yield
    PROCESSES.stop()


def play(*names, limits=LIMITS):
    """Episodes of these classes at once, in one process."""

    async def one(key, name):
        env = IsolatedEnvironment(name, {}, limits.environment_seconds)
        return await Episode(key, Task("test", seed=7), env, FixedSession(), RENDERER, Sampling(), limits).run()

    async def all_of_them():
        return await asyncio.gather(*(one(f"g.{i}", name) for i, name in enumerate(names)))

    began = time.monotonic()
    found = asyncio.run(all_of_them())
    assert time.monotonic() - began < 30
    return found if len(found) > 1 else found[0]


def test_it_plays_as_in_this_process():
    t = play(f"{HERE}:Patient")
    assert (t.status, t.reason, len(t.turns), t.reward) == (Status.TRUNCATED, "turn limit", 3, 1.5)
    assert t.messages[0]["content"] == "seed 7"


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        ("Exits", "process ended with status 3 during step"),
        ("Crashes", "process was ended by SIGABRT during step"),
        ("HoldsTheInterpreter", "no answer within 4 s"),
        ("Spins", "no answer within 3.2 s (at misbehaving.py, line"),
        ("Odd", "step returned 'nonsense'; expected a Step"),
        ("NoSuchClass", "has no class 'NoSuchClass'"),
    ],
)
def test_what_it_does_costs_one_episode(cls, words):
    t = play(f"{HERE}:{cls}")
    assert t.status == Status.FAILED and words in t.reason, t.reason
    assert play(f"{HERE}:Patient").status == Status.TRUNCATED


def test_the_others_of_a_process_that_was_ended_go_on_elsewhere():
    one, other, third = play(f"{HERE}:Exits", f"{HERE}:Patient", f"{HERE}:Spins")
    assert "process ended with status 3 during step" in one.reason and "tried 3 times" in one.reason
    assert (other.status, other.reason, other.reward) == (Status.TRUNCATED, "turn limit", 1.5)
    assert "no answer within" in third.reason


def kill_once(environment, at):
    """Kill the process of an episode with SIGKILL, before its call number ``at``."""
    call, counted = environment._call, itertools.count()

    async def kill_then_call(host, method, args):
        if next(counted) == at:
            host.process.kill()
            host.process.wait()
        return await call(host, method, args)

    environment._call = kill_then_call


def play_killed(name, at, arguments=None):
    """An episode whose process is killed before a call: without ``at``, none is."""

    async def one():
        env = IsolatedEnvironment(name, arguments or {}, LIMITS.environment_seconds)
        if at is not None:
            kill_once(env, at)
        return await Episode("k", Task("test", seed=7), env, FixedSession(), RENDERER, Sampling(), LIMITS).run()

    return asyncio.run(one())


@pytest.mark.parametrize("at", [0, 1, 3, 6])
def test_an_episode_whose_process_is_killed_goes_on_in_another_one(at):
    isolated.moved.clear()
    undisturbed, killed = play_killed("keydoor", None), play_killed("keydoor", at)
    assert killed.messages == undisturbed.messages and killed.status == undisturbed.status
    assert [turn.reward for turn in killed.turns] == [turn.reward for turn in undisturbed.turns]
    assert [turn.state for turn in killed.turns] == [turn.state for turn in undisturbed.turns]
    assert len(isolated.moved) == 1 and "SIGKILL" in isolated.moved[0]


def test_a_death_is_a_fact_of_the_turn():
    calls_before_the_second_step = 5
    turns = play_killed("keydoor", calls_before_the_second_step).turns
    assert sum(turn.facts.get("process_deaths", 0) for turn in turns) in (0, 1)


def test_an_environment_that_does_not_repeat_itself_is_not_continued():
    t = play_killed(f"{HERE}:Random", 4)
    assert t.status == Status.FAILED and "the environment is not deterministic" in t.reason


def test_what_it_prints_does_not_disturb_the_replies():
    assert play(f"{HERE}:Prints").reward == 1.5


def test_numpy_values_arrive_as_numbers():
    t = play(f"{HERE}:NumPyReward")
    assert (t.status, t.reward, t.success, t.turns[0].tool_calls) == (Status.FINISHED, 0.5, True, 2)


def test_a_built_in_environment_with_a_state_key_plays():
    t = play("keydoor")
    assert len(t.turns) == 3 and t.turns[0].state and t.turns[0].tool_errors == 1


def test_processes_are_shared_and_replaced():
    play(*[f"{HERE}:Patient"] * 10)
    assert len(PROCESSES.workers) == 2  # eight episodes in one, two in another
    assert {worker.users for worker in PROCESSES.workers} == {0}
    play(f"{HERE}:Exits")
    play(f"{HERE}:Patient")
    assert not any(worker.ended or worker.alone for worker in PROCESSES.workers)


def test_actions_arrive_as_they_were():
    action = Action("x\ud800", (ToolCall("f", {"a": [1, None, "é"]}, "7"),), ("not JSON",))
    assert decode_action(encode_action(action)) == action


@pytest.mark.parametrize(("cls", "words"), [("Starved", "too many open files"), ("EndedByTheKernel", "SIGKILL")])
def test_a_starved_process_is_no_fault_of_its_environment(cls, words):
    t = play(f"{HERE}:{cls}")
    assert t.lost and words in t.reason and not play(f"{HERE}:Exits").lost


def test_a_stopped_process_is_no_fault_of_its_environment():
    t = play(f"{HERE}:Stopped", limits=replace(LIMITS, environment_seconds=1.0))
    assert t.lost and "was stopped by somebody" in t.reason
