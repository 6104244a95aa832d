"""How much of the past a prompt shows, and what an environment tells of a turn, of its end, and of a run."""

from __future__ import annotations

import asyncio
import time
from typing import ClassVar

import pytest
from support.episodes import LIMITS, RENDERER, FixedSession, Patient, keyed, play, stepping

from turnwise.config.settings import Settings
from turnwise.core.protocols import Step
from turnwise.core.records import Sampling, Status, Task
from turnwise.errors import SettingError
from turnwise.rollout.episode import Episode, EpisodeLimits
from turnwise.training.plan import EnvSpec, resolve_settings

# ------------------------------------------------------------------- history


class Counting(Patient):
    """Says how often it was asked; ``role`` is who says it."""

    role, n = "user", 0

    def reset(self, seed):
        return [{"role": "system", "content": "task"}, {"role": "user", "content": "0"}]

    def step(self, action):
        self.n += 1
        return Step([{"role": self.role, "content": str(self.n)}])


def read(environment, history, turns=4):
    session = FixedSession("yes")
    t = play(environment, session, EpisodeLimits(turns, 400, history=history))
    return [RENDERER.decode(ids) for ids in session.read], t


def test_all_of_it_unless_asked():
    texts, t = read(Counting(), 0)
    assert not any(turn.restart for turn in t.turns)
    assert all(str(n) in texts[-1] for n in range(4)) and texts[-1].count("yes") == 3


def test_only_the_last_observation_and_the_task():
    texts, t = read(Counting(), 1)
    assert [turn.restart for turn in t.turns] == [False, True, True, True]
    assert texts == [f"<|system|>task<|end|><|user|>{n}<|end|><|assistant|>" for n in range(4)]
    assert [m["content"] for m in t.messages] == ["task", "0", "yes", "1", "yes", "2", "yes", "3", "yes", "4"]
    assert [RENDERER.decode(turn.context) for turn in t.turns] == texts  # what is recorded is what was read


def test_two_observations_and_what_was_said_between():
    texts, _ = read(Counting(), 2)
    assert texts[3].endswith("task<|end|><|user|>2<|end|><|assistant|>yes<|end|><|user|>3<|end|><|assistant|>")


def test_a_tools_reply_keeps_its_call():
    tool = type("Tool", (Counting,), {"role": "tool"})()
    texts, _ = read(tool, 1)
    assert texts[3].endswith("task<|end|><|assistant|>yes<|end|><|tool|>3<|end|><|assistant|>")


# --------------------------------------------------------- facts and the end


def test_facts_go_to_their_turn():
    t = play(stepping(Step((), terminated=True, info={"facts": {"kind": "question", "worth": 2, "sure": 0.5}})))
    assert t.turns[0].facts == {"kind": "question", "worth": 2.0, "sure": 0.5}


@pytest.mark.parametrize("facts", [["x"], {"x": None}, {"x": True}, {"x": float("nan")}, {"x": [1]}, {3: 1.0}])
def test_a_fact_that_is_no_number_and_no_label_is_refused_in_words(facts):
    t = play(stepping(Step((), info={"facts": facts})))
    assert t.status == Status.FAILED and "step returned info['facts']" in t.reason


def test_the_state_after_the_last_step_is_the_end():
    class Growing(Patient):
        n = 0

        def step(self, action):
            self.n += 1
            return Step([{"role": "user", "content": "more"}], terminated=self.n == 2)

        def state_key(self):
            return f"n={self.n}"

    t = play(Growing())
    assert [turn.state for turn in t.turns] == ["n=0", "n=1"] and t.end == "n=2"
    assert play(Patient()).end == "again"  # without keys, what was observed


@pytest.mark.parametrize("power", ["state_key", "answer"])
def test_what_hangs_is_given_up(power):
    hanging = type("Hanging", (Patient,), {power: lambda self: time.sleep(60)})()
    began = time.perf_counter()
    t = play(hanging, limits=EpisodeLimits(3, 400, 0.3))
    assert t.status == Status.FAILED and t.reason.startswith("no answer within 0.3 s")
    assert time.perf_counter() - began < 30


def test_an_answer_that_is_no_text_is_refused_in_words():
    t = play(type("Odd", (Patient,), {"answer": lambda self: 7})())
    assert t.status == Status.FAILED and "answer returned 7; expected a str" in t.reason


def test_one_without_keys_is_asked_once():
    asked = []
    play(keyed(lambda self: asked.append(1)))
    assert len(asked) == 1


# ------------------------------------------------- constructors, suggestions


class Fragile(Patient):
    def __init__(self):
        raise OSError("no display")


class Modest(Patient):
    difficulties, suggests = (1, 4), {"history": 2, "context": 77, "cold_steps": 5}


class Greedy(Patient):
    suggests: ClassVar = {"seed": 3}


def test_a_constructor_that_raises_fails_its_episode_only():
    env_spec = EnvSpec(Settings(difficulty=(1,)), Fragile)
    session = FixedSession()
    episode = Episode("g.0", Task("t", 1), env_spec.try_make(Task("t", 1)), session, RENDERER, Sampling(), LIMITS)
    t = asyncio.run(episode.run())
    assert (t.status, t.reason, session.closed) == (Status.FAILED, "OSError: no display", 1)


def test_what_the_user_gives_comes_before_what_the_environment_suggests():
    env = f"{__name__}:Modest"
    own, given = resolve_settings({"env": env}), resolve_settings({"env": env, "context": 99, "difficulty": (4,)})
    assert (own.difficulty, own.history, own.context, own.cold_steps) == ((1, 4), 2, 77, 5)
    assert (given.difficulty, given.history, given.context) == ((4,), 2, 99)
    assert (
        resolve_settings({"env": env, "model": "elsewhere"}).cold_steps == Settings().cold_steps
    )  # it can speak already
    assert resolve_settings({}).difficulty == (1, 2, 3)


def test_an_environment_may_not_suggest_everything():
    with pytest.raises(SettingError, match="Greedy suggests a value for 'seed', which an environment may not set"):
        resolve_settings({"env": f"{__name__}:Greedy"})
