"""No text and no tool call makes a built-in environment raise, hang or return an invalid value."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.broken import Sound

from turnwise.core.protocols import Action, ToolCall
from turnwise.environments import BUILT_IN, load
from turnwise.environments.calls import call_environment
from turnwise.environments.checker.fuzz import adversarial_action, fuzz_environment
from turnwise.environments.contract import read_step


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_environments_answer_everything(name):
    report = fuzz_environment(name, episodes=24, seed=0)
    assert not report.faults, str(report)
    assert report.episodes == 24 and report.turns >= 24


@pytest.mark.parametrize("answer", ["_", "__", "-", "1e30000000", "9" * 5_000, "²", "٣", "\ud800", "t" * 5_000, ""])
def test_an_odd_answer_to_the_calculator_is_wrong_and_no_fault(answer):
    async def play():
        env = load("calculator")()
        env.reset(0)
        try:
            step = read_step(await env.step(Action(f"answer: {answer}")))
        finally:
            env.close()
        assert step.reward == 0 and step.info.get("success") in (None, False)

    asyncio.run(play())


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3), max_leaves=5)
ARGUMENTS = st.dictionaries(st.text() | st.just("query"), JSON, max_size=3)
CALLS = st.lists(st.builds(ToolCall, st.just("search") | st.text(), ARGUMENTS), max_size=3)
ANYTHING = st.text(st.characters(), max_size=60)  # surrogates included


@pytest.mark.parametrize("name", [name for name in BUILT_IN if load(name).inline])
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 50), texts=st.lists(ANYTHING, min_size=1, max_size=4), calls=CALLS)
def test_any_text_is_answered(name, seed, texts, calls):
    env = load(name)()
    env.reset(seed)
    for text in texts:
        read_step(env.step(Action(text, tuple(calls), tuple(texts[:1]) if calls else ())))


def test_a_fault_is_reported_once_with_its_seed_and_action():
    class Fragile(Sound):
        def step(self, action):
            return super().step(Action(str(int(action.text))))

    report = fuzz_environment(Fragile, episodes=20)
    assert [fault.split(",")[0] for fault in report.faults] == ["ValueError in step"]
    assert "(seed " in str(report) and "Action(text=" in str(report)


def test_an_episode_that_hangs_is_a_fault_of_its_own():
    class Loops(Sound):
        def step(self, action):
            while not action.text.isprintable():
                pass
            return super().step(action)

    report = fuzz_environment(Loops, episodes=6, seed=3, seconds=0.2)
    assert "no answer within 0.2 s" in str(report), str(report)


def test_equal_seeds_give_equal_actions():
    tools = load("lookup").tools
    one, two = (
        [repr(adversarial_action(rng, None, tools)) for _ in range(30)] for rng in (random.Random(5), random.Random(5))
    )
    assert one == two and len(set(one)) > 15


def test_calls_of_the_fuzzer_are_those_of_training():
    """``call_environment`` turns a SystemExit into an error, so that a fuzzed environment cannot end the program."""

    async def play():
        def leave():
            raise SystemExit(3)

        with pytest.raises(RuntimeError, match="SystemExit"):
            await call_environment(leave, seconds=1, inline=True)

    asyncio.run(play())


def test_calls_that_never_end_cost_a_bounded_time():
    """Each call has the tool's own limit, so a turn of many has a bounded number of them."""

    async def play():
        env = load("calculator")()
        env.reset(0)
        try:
            return read_step(await env.step(Action("", tuple(ToolCall("python", {"code": "1"}) for _ in range(50)))))
        finally:
            env.close()

    step = asyncio.run(play())
    assert [m["content"].startswith("error: at most 4") for m in step.messages] == [False] * 4 + [True] * 46
