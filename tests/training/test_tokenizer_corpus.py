"""The dialogues that the tiny tokenizer is trained on are played at the same time, and their texts keep their order."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import ClassVar

import pytest
from support.paying import Paying

from turnwise.core.protocols import Step
from turnwise.environments.base import user_message
from turnwise.training import build
from turnwise.training.plan import EnvSpec, resolve_settings


class Counted(Paying):
    """Counts how many episodes are inside ``step`` at the same time."""

    inside: ClassVar[list[int]] = [0, 0]  # now, most
    inline = False

    def reset(self, seed):
        self.seed = seed
        return [user_message(f"seed {seed}")]

    async def step(self, action):
        Counted.inside[0] += 1
        Counted.inside[1] = max(Counted.inside)
        await asyncio.sleep(0.001 * (self.seed % 5))  # they end in another order than they began
        Counted.inside[0] -= 1
        return Step([user_message("done")], 0.0, True)


class Blocking(Paying):
    inside: ClassVar[list[int]] = [0, 0]
    lock: ClassVar = threading.Lock()
    inline = False

    def step(self, action):
        with Blocking.lock:
            Blocking.inside[0] += 1
            Blocking.inside[1] = max(Blocking.inside)
        time.sleep(0.02)
        with Blocking.lock:
            Blocking.inside[0] -= 1
        return super().step(action)


def spec(cls) -> EnvSpec:
    return EnvSpec.from_settings(resolve_settings({"env": f"{__name__}:{cls.__name__}"}))


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(build, "CORPUS", 40)
    monkeypatch.setattr(build, "CORPUS_WAVE", 16)


def test_dialogues_wait_at_the_same_time_and_keep_their_order(monkeypatch):
    Counted.inside[:] = [0, 0]
    together = build.tokenizer_corpus(spec(Counted))
    assert 8 <= Counted.inside[1] <= 16
    monkeypatch.setattr(build, "CORPUS_WAVE", 1)
    Counted.inside[:] = [0, 0]
    assert build.tokenizer_corpus(spec(Counted)) == together and Counted.inside[1] == 1
    assert len({text for text in together if text.startswith("seed")}) == 40


def test_a_blocking_environment_runs_in_threads():
    build.tokenizer_corpus(spec(Blocking))
    assert Blocking.inside[1] > 1


@pytest.mark.parametrize("env", ["calculator", "lookup"])
def test_the_tokenizer_is_the_same_as_one_by_one(env, monkeypatch):
    env_spec = EnvSpec.from_settings(resolve_settings({"env": env}))
    together = build.load_tokenizer(env_spec.settings, env_spec)
    monkeypatch.setattr(build, "CORPUS_WAVE", 1)
    alone = build.load_tokenizer(env_spec.settings, env_spec)
    assert together.get_vocab() == alone.get_vocab()
