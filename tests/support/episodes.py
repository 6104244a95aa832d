"""What the tests of episodes share: a session that repeats one text, a patient environment, and one episode of both."""

from __future__ import annotations

import asyncio

from turnwise.core.protocols import Step
from turnwise.core.records import Completion, Sampling, Stop, Task
from turnwise.models.tiny import tiny_tokenizer
from turnwise.rollout.episode import Episode, EpisodeLimits
from turnwise.rollout.renderer import Renderer

RENDERER = Renderer(tiny_tokenizer([], 300))
TASK = Task("test", seed=7)
LIMITS = EpisodeLimits(turns=3, context=400, environment_seconds=9.0)


class FixedSession:
    """A session that says the same thing every time."""

    def __init__(self, text: str = "yes", stop: Stop = Stop.TOKEN, fault: Exception | None = None) -> None:
        self.tokens = RENDERER.encode_turn(text) if stop == Stop.TOKEN else RENDERER.encode(text)
        self.stop, self.fault, self.closed, self.read = stop, fault, 0, []

    async def generate(self, ids, sampling):
        await asyncio.sleep(0)
        if self.fault:
            raise self.fault
        self.read.append(list(ids))
        n = len(self.tokens)
        return Completion(self.tokens, [-1.0] * n, [0.0] * n, [4] * n, self.stop, seconds=0.5)

    def close(self):
        self.closed += 1


class Patient:
    """An environment that asks for ever; what it does wrong is written into a subclass."""

    closed = 0

    def reset(self, seed):
        return [{"role": "user", "content": f"seed {seed}"}]

    def step(self, action):
        return Step([{"role": "user", "content": "again"}], reward=0.5)

    def close(self):
        self.closed += 1


def play(environment, session=None, limits=LIMITS, sampling=None, **more):
    session = session or FixedSession()
    episode = Episode("g.0", TASK, environment, session, RENDERER, sampling or Sampling(), limits, **more)
    trajectory = asyncio.run(episode.run())
    assert session.closed == 1, "the session was not closed exactly once"
    return trajectory


def stepping(value):
    """An environment whose step returns this."""

    class Odd(Patient):
        def step(self, action):
            return value

    return Odd()


def keyed(key):
    """An environment whose state_key does this."""

    class Keyed(Patient):
        state_key = key

    return Keyed()


class Resting:
    """A session of which only the manners are looked at."""

    def __init__(self):
        self.parked = self.closed = False

    def park(self):
        self.parked = True

    def close(self):
        self.closed = True
