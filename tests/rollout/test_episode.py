"""Whatever an environment does ends as a record with a reason in words, and costs nobody else anything."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from support.episodes import RENDERER, TASK, FixedSession, Patient, keyed, play, stepping

from turnwise.core.protocols import Step
from turnwise.core.records import Limit, Sampling, Status, Stop
from turnwise.rollout.episode import Episode, EpisodeLimits
from turnwise.rollout.strategies import GroupRequest, Independent

IMPATIENT = EpisodeLimits(turns=3, context=400, environment_seconds=1.5)


def raising(fault):
    class Raising(Patient):
        def step(self, action):
            raise fault

    return Raising()


# ------------------------------------------------------------------- endings


def test_a_whole_episode():
    class Once(Patient):
        def step(self, action):
            info = {"success": True, "rewards": {"right": 1.0}, "tool_calls": 2, "tool_errors": 1}
            return Step([{"role": "user", "content": action.text}], 1, terminated=True, info=info)

    env = Once()
    t = play(env)
    (turn,) = t.turns
    assert (t.id, t.task, t.status, t.reason, t.success, t.rewards) == (
        "g.0",
        TASK,
        Status.FINISHED,
        "",
        True,
        {"right": 1.0},
    )
    assert (turn.reward, turn.tool_calls, turn.tool_errors, turn.seconds_generating) == (1.0, 2, 1, 0.5)
    assert turn.version == (4,) * len(turn.tokens) and turn.mass == () and env.closed == 1
    assert [m["content"] for m in t.messages] == ["seed 7", "yes", "yes"]


def test_the_turn_limit_cuts_and_what_was_read_is_what_was_recorded():
    session = FixedSession()
    t = play(Patient(), session)
    assert (t.status, t.reason, len(t.turns), t.reward) == (Status.TRUNCATED, "turn limit", 3, 1.5)
    spoken = [i for turn in t.turns[:2] for i in (*turn.context, *turn.tokens)]
    assert session.read[2] == [*spoken, *t.turns[2].context]
    assert not any(turn.restart for turn in t.turns)


def test_a_reminder_counts_turns_and_says_when_the_limit_was_extended():
    plain, told = play(Patient()), play(Patient(), max_turns=[2, 3])
    said = [m["content"].splitlines()[-1] for m in told.messages if m["role"] == "user"]
    assert said[:3] == [
        "[turns used: 0, left: 2]", "[turns used: 1, left: 1]", "[the limit was extended; turns used: 2, left: 1]",
    ]  # fmt: skip
    assert len(told.turns) == len(plain.turns) == 3 and told.limit == Limit.TURNS
    assert [t.tokens for t in told.turns] == [t.tokens for t in plain.turns]  # a reminder is context
    assert len(play(Patient(), max_turns=[2]).turns) == len(play(Patient(), max_turns=2).turns) == 2
    assert not any("turns used" in str(m["content"]) for m in play(Patient(), max_turns=2).messages)


def full(context):
    return f"context window of {context} tokens (--context)"


def test_the_context_limit_cuts_between_turns():
    first = len(RENDERER.open(Patient().reset(7)).ids)
    t = play(Patient(), limits=EpisodeLimits(5, first + 3))
    assert (t.status, t.reason, len(t.turns)) == (Status.TRUNCATED, full(first + 3), 1)


def test_a_prompt_longer_than_the_context_samples_nothing():
    t = play(Patient(), limits=EpisodeLimits(5, 2))
    assert (t.status, t.reason, t.sampled) == (Status.TRUNCATED, full(2), 0)


def test_the_environment_may_cut_too():
    t = play(stepping(Step((), truncated=True)))
    assert (t.status, t.reason) == (Status.TRUNCATED, "environment")


def test_an_empty_completion_is_a_turn():
    t = play(Patient(), FixedSession("", Stop.LENGTH))
    assert (t.status, t.sampled, len(t.turns)) == (Status.TRUNCATED, 0, 3)


@pytest.mark.parametrize("reward", [0, -2, 0.25, np.float32(0.5), np.int64(3)])
def test_gymnasium_tuples_are_understood(reward):
    t = play(stepping(([{"role": "user", "content": "over"}], reward, True, False, {"success": False})))
    assert (t.status, t.reward, t.success) == (Status.FINISHED, reward, False)


def test_an_async_step_and_an_async_reset_are_awaited():
    class Async(Patient):
        async def reset(self, seed):
            await asyncio.sleep(0)
            return super().reset(seed)

        async def step(self, action):
            await asyncio.sleep(0)
            return Step((), 1.0, terminated=True)

    class Deferred(Patient):
        def step(self, action):
            return Async().step(action)

    assert play(Async()).reward == play(Deferred()).reward == 1.0


def test_reset_and_step_are_all_an_environment_needs():
    class Bare:
        reset, step = Patient.reset, lambda self, action: Step((), terminated=True)

    assert play(Bare()).status == Status.FINISHED


def test_rewards_and_states_go_to_their_turns():
    class Counting(Patient):
        n = 0

        def step(self, action):
            self.n += 1
            return Step([{"role": "user", "content": "more"}], float(self.n), info={"rewards": {"steps": 1}})

        def state_key(self):
            return f"n={self.n}"

    t = play(Counting())
    assert [(turn.reward, turn.state) for turn in t.turns] == [(1.0, "n=0"), (2.0, "n=1"), (3.0, "n=2")]
    assert t.rewards == {"steps": 3.0} and t.success is None


def test_greedy_sampling_is_recorded_with_the_temperature_its_log_probabilities_have():
    assert {turn.temperature for turn in play(Patient(), sampling=Sampling(temperature=0)).turns} == {1.0}
    assert {turn.temperature for turn in play(Patient(), sampling=Sampling(temperature=0.7)).turns} == {0.7}


# -------------------------------------------------------------------- faults


MESSAGE = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (stepping(None), "step returned None; expected a Step"),
        (stepping("done"), "step returned 'done'"),
        (stepping(([], 0.0, True)), "expected a Step or (messages, reward, terminated, truncated, info)"),
        (stepping(Step((), float("nan"))), "reward nan; expected a finite number"),
        (stepping(Step((), float("inf"))), "reward inf"),
        (stepping(Step((), "1.0")), "reward '1.0'"),
        (stepping(Step((), True)), "reward True"),
        (stepping(Step((), None)), "reward None"),
        (stepping(Step("hello")), "step returned 'hello'; expected a list of messages"),
        (stepping(Step(["hello"])), "expected a list of messages with role and content"),
        (stepping(Step([{"role": "user"}])), "expected a list of messages with role and content"),
        (stepping(Step([{"content": "x"}])), "expected a list of messages with role and content"),
        (stepping(Step([{"role": "user", "content": 7}])), "expected a list of messages with role and content"),
        (stepping(Step(None)), "expected a list of messages"),
        (stepping(Step([MESSAGE], info=None)), "info"),
        (stepping(Step([MESSAGE], info={"tool_calls": "many"})), "many"),
        (stepping(Step([MESSAGE], info={"rewards": {"x": "much"}})), "much"),
        (
            stepping(Step([MESSAGE], info={"rewards": {"x": float("nan")}})),
            "info['rewards']['x'] nan; expected a finite number",
        ),
        (stepping(Step([MESSAGE], info={"rewards": [1.0]})), "info['rewards'] [1.0]; expected a dict"),
        (stepping(Step([MESSAGE], info={"tool_errors": True})), "info['tool_errors'] True; expected a finite number"),
        (stepping(Step([MESSAGE], terminated=np.array([True, False]))), "terminated array([ True, False]); expected"),
        (raising(KeyError("door")), "KeyError: 'door'"),
        (raising(ValueError("no such move")), "ValueError: no such move"),
        (raising(StopIteration()), "StopIteration"),
        (raising(SystemExit(3)), "SystemExit"),
        (raising(RecursionError("too deep")), "RecursionError: too deep"),
    ],
)
def test_a_wrong_step_is_recorded_in_words(environment, words):
    t = play(environment)
    assert t.status == Status.FAILED and words in t.reason
    assert len(t.turns) == 1 and t.turns[0].tokens  # what was sampled is kept, to be looked at
    assert environment.closed == 1


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "reset returned None"),
        ("hello", "reset returned 'hello'"),
        ([1], "reset returned [1]"),
        ({}, "reset returned {}"),
    ],
)
def test_a_wrong_reset_is_recorded_in_words(value, words):
    class Odd(Patient):
        def reset(self, seed):
            return value

    t = play(Odd())
    assert t.status == Status.FAILED and words in t.reason and not t.turns


def test_a_raising_reset_is_recorded():
    class Odd(Patient):
        def reset(self, seed):
            raise OSError("no display")

    t = play(Odd())
    assert (t.status, t.reason) == (Status.FAILED, "OSError: no display")


def quits(self):
    raise SystemExit(3)


async def quits_later(self):
    quits(self)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (lambda self: {}["door"], "KeyError: 'door'"),
        (lambda self: [1], "state_key returned [1]; expected a str, or None"),
        (lambda self: 7, "state_key returned 7; expected a str, or None"),
        (lambda self: next(iter(())), "StopIteration"),
        (quits, "SystemExit"),
        (quits_later, "SystemExit"),
        (lambda self: asyncio.sleep(60), "no answer within 1.5 s"),
    ],
)
def test_a_wrong_state_key_is_recorded_in_words(key, words):
    environment = keyed(key)
    t = play(environment, limits=IMPATIENT)
    assert t.status == Status.FAILED and words in t.reason
    assert not t.turns and environment.closed == 1  # nothing was sampled for a state that nobody can name


def test_a_state_key_may_be_none_or_async_or_absent():
    async def later(self):
        return "here"

    keys = (lambda self: None, later, None)
    assert [play(keyed(key)).turns[0].state for key in keys] == ["seed 7", "here", "seed 7"]


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("power", ["reset", "step", "state_key", "close"])
def test_an_environment_that_exits_does_not_take_the_run_with_it(power, inline):
    def leave(self, *_):
        raise SystemExit(3)

    environment = type("Leaving", (Patient,), {power: leave, "inline": inline})()
    t = play(environment)
    assert (t.status, "SystemExit" in t.reason) == (
        (Status.TRUNCATED, False) if power == "close" else (Status.FAILED, True)
    )


class HangsAwake(Patient):
    def step(self, action):
        time.sleep(60)  # in a daemon thread: nobody waits for it


class HangsAsleep(Patient):
    async def step(self, action):
        await asyncio.sleep(60)


class HangsInReset(Patient):
    def reset(self, seed):
        time.sleep(60)  # in a daemon thread: nobody waits for it


class HangsDeferred(Patient):
    def step(self, action):
        return asyncio.sleep(60)


@pytest.mark.parametrize("kind", [HangsAwake, HangsAsleep, HangsInReset, HangsDeferred])
def test_a_hanging_environment_is_given_up(kind):
    began = time.perf_counter()
    t = play(kind(), limits=IMPATIENT)
    assert t.status == Status.FAILED and t.reason.startswith("no answer within 1.5 s")
    assert ("line" in t.reason) == (kind in (HangsAwake, HangsInReset))  # where the thread is
    assert time.perf_counter() - began < 30


@pytest.mark.parametrize("fault", [RuntimeError("bad"), OSError("gone")])
def test_a_failing_close_does_not_cost_the_episode(fault):
    class Slam(Patient):
        def close(self):
            raise fault

    assert play(Slam()).reason == "turn limit"


def test_a_broken_engine_is_recorded_too():
    t = play(Patient(), FixedSession(fault=RuntimeError("a kernel failed")))
    assert (t.status, t.reason, t.turns, t.lost) == (Status.FAILED, "RuntimeError: a kernel failed", (), False)


def test_a_cancelled_request_is_recorded():
    t = play(Patient(), FixedSession(stop=Stop.CANCELLED))
    assert (t.status, t.reason) == (Status.FAILED, "cancelled")


def test_half_a_character_of_an_environment_is_replaced():
    t = play(stepping(Step([{"role": "user", "content": "half of a pair: \ud800"}])))
    assert t.status == Status.TRUNCATED and t.messages[-1]["content"] == "half of a pair: \ufffd"


def test_cancelling_closes_session_and_environment():
    async def cancel():
        session, env = FixedSession(), HangsAsleep()
        episode = Episode("g.0", TASK, env, session, RENDERER, Sampling(), EpisodeLimits(3, 400, 9.0))
        running = asyncio.ensure_future(episode.run())
        await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return running.cancelled(), session.closed, env.closed

    assert asyncio.run(cancel()) == (True, 1, 1)


# ------------------------------------------------------------------ siblings


def test_siblings_of_a_broken_environment_are_unaffected():
    """One of four raises, one hangs, one exits: the fourth plays on, and the group is whole."""
    environments = [raising(ValueError("broken")), HangsAwake(), raising(SystemExit(1)), Patient()]
    sessions = [FixedSession() for _ in environments]

    async def one(key, task, session):
        env = environments[int(key.split(".")[1])]
        return await Episode(key, task, env, session, RENDERER, Sampling(), IMPATIENT).run()

    async def grow():
        return await Independent().begin(GroupRequest("5", TASK, 4, lambda i: sessions[i], one))

    group = asyncio.run(grow())
    assert [t.id for t in group.trajectories] == ["5.0", "5.1", "5.2", "5.3"]
    assert [t.status for t in group.trajectories] == [Status.FAILED] * 3 + [Status.TRUNCATED]
    assert len(group.trajectories[3].turns) == 3
    assert [s.closed for s in sessions] == [1, 1, 1, 1]
