"""The checker finds what only training would meet: changing threads, episodes at once, texts that are not shown as they are."""

from __future__ import annotations

import asyncio
import sqlite3
import time

import pytest
from support.broken import Minimal, Sound, answer

from turnwise.environments.checker.check import EnvironmentCheck, check_env


def problems_of(cls, **options):
    return "\n".join(check_env(cls, **{"episodes": 3, "seconds": 10.0, **options}).problems)


class OpensInReset(Sound):
    """A database connection that belongs to the thread that opened it."""

    def reset(self, seed):
        self.database = sqlite3.connect(":memory:")
        return super().reset(seed)

    def step(self, action):
        self.database.execute("select 1")
        return super().step(action)


class OpensInConstructor(OpensInReset):
    def __init__(self, **options):
        super().__init__(**options)
        self.database = sqlite3.connect(":memory:")

    def reset(self, seed):
        return Sound.reset(self, seed)


@pytest.mark.parametrize("cls", [OpensInReset, OpensInConstructor])
def test_an_object_of_another_thread_is_found(cls):
    found = problems_of(cls)
    assert "step raises ProgrammingError" in found and "any thread of a pool" in found, found


def test_the_remedy_works():
    class Inline(OpensInReset):
        inline = True

    class Shared(OpensInReset):
        def reset(self, seed):
            self.database = sqlite3.connect(":memory:", check_same_thread=False)
            return Sound.reset(self, seed)

    assert not problems_of(Inline) and not problems_of(Shared)


class RaceOnClass(Sound):
    """Sets a class variable, waits, and reads it: wrong only while another episode runs."""

    current = 0

    def step(self, action):
        type(self).current = self.number
        time.sleep(0.002)
        return super().step(action) if type(self).current == self.number else answer(super().step(action), reward=-1.0)


class RaceOnModule(Minimal):
    """The same in an async method."""

    turns: dict = {}  # noqa: RUF012

    def reset(self, seed):
        RaceOnModule.turns["now"] = seed
        self.seed = seed
        return super().reset(seed)

    async def step(self, action):
        RaceOnModule.turns["now"] = self.seed
        await asyncio.sleep(0.001)
        step = await super().step(action)
        return step if RaceOnModule.turns["now"] == self.seed else answer(step, reward=1.0)


@pytest.mark.parametrize("cls", [RaceOnClass, RaceOnModule])
def test_state_shared_by_concurrent_episodes_is_found(cls):
    assert "several episodes at once change each other" in problems_of(cls)


def test_texts_that_are_not_shown_as_they_are_warn():
    class Halves(Sound):
        def step(self, action):
            return answer(super().step(action), messages=[{"role": "user", "content": "x\ud800"}])

    class Long(Sound):
        def reset(self, seed):
            return [{"role": "user", "content": super().reset(seed)[0]["content"] + "x" * 200_000}]

    halves, long = (check_env(cls, episodes=2) for cls in (Halves, Long))
    assert "step: a message holds half of a surrogate pair" in halves.text() and halves.ok
    assert "reset: an observation has 200,0" in long.text() and long.ok
    assert sum("characters" in warning for warning in long.warnings) == 1  # one mistake, one line


def test_an_endless_loop_is_named_with_its_line():
    class Spins(Sound):
        def step(self, action):
            while True:
                pass

    for cls in (Spins, type("SpinsInline", (Spins,), {"inline": True})):
        found = problems_of(cls, seconds=0.3)
        assert "step did not return within 0.3 s (at test_check_as_training.py, line" in found, found


def test_a_blocked_event_loop_is_found():
    class Blocks(Minimal):
        async def step(self, action):
            while True:
                pass

    assert "step did not return within 0.3 s (at test_check_as_training.py" in problems_of(Blocks, seconds=0.3)


def test_the_report_says_how_fast_it_is():
    report = check_env(Sound, episodes=3)
    assert report.facts["speed"].startswith("reset ") and "inline" in report.facts
    assert "speed:" in report.text()


@pytest.mark.parametrize(
    ("inline", "seconds", "fact", "warning"),
    [
        (True, 0.15, "declared", "although the class says inline = True"),
        (True, 0.0001, "declared", ""),
        (False, 0.0001, "inline = True is safe", ""),
        (False, 0.05, "no: a call may take long", ""),
        (False, 3.0, "no: a call may take long", "a step takes 3.0 s"),
    ],
)
def test_whether_inline_fits_follows_from_the_measured_times(inline, seconds, fact, warning):
    driver = EnvironmentCheck(type("Timed", (Sound,), {"inline": inline}), 1.0)
    driver.durations = {"reset": [seconds] * 9, "step": [seconds] * 40}
    facts = driver.speed()
    driver.loop.close()
    assert facts["inline"].startswith(fact)
    assert [warning in text for text in driver.warnings.lines()] == [True] * bool(warning)
