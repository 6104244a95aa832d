"""Fuzzing of an environment: many episodes of adversarial actions, called as training calls it. No action may make it raise,
hang or return an invalid value.

    report = fuzz_environment("calculator", episodes=10_000)
    assert not report.faults
"""

from __future__ import annotations

import asyncio
import random
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

from turnwise import environments
from turnwise.core.protocols import Action
from turnwise.environments.base import SPLITS, overrides
from turnwise.environments.calls import call_environment
from turnwise.environments.checker.adversarial import adversarial_action
from turnwise.environments.contract import read_messages, read_state_key, read_step

CONCURRENT = 16  # episodes at once
TURNS = 40  # of one episode at most
SHOWN = 80  # characters of an action in a fault


@dataclass
class FuzzReport:
    """What happened. ``faults``: one line for each distinct fault, with the seed and the action that caused it first."""

    name: str
    episodes: int = 0
    turns: int = 0
    slowest: float = 0.0  # seconds of the slowest call
    faults: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        counts = f"{self.episodes} episodes, {self.turns} turns, slowest call {self.slowest:.2g} s"
        head = f"{self.name}: {counts}, {len(self.faults)} faults"
        return "\n".join([head, *(f"  {fault}: {first}" for fault, first in self.faults.items())])


def fuzz_environment(env: str | type[Any], episodes: int = 100, seed: int = 0, seconds: float = 30.0) -> FuzzReport:
    """Play ``episodes`` episodes of adversarial actions, over all difficulties and splits; ``seconds`` limits each call."""
    cls = environments.load(env) if isinstance(env, str) else env
    report = FuzzReport(env if isinstance(env, str) else cls.__name__)

    async def play() -> None:
        for start in range(0, episodes, CONCURRENT):
            numbers = range(start, min(start + CONCURRENT, episodes))
            await asyncio.gather(*(_FuzzedEpisode(cls, seed + n, seconds, report).run() for n in numbers))

    asyncio.run(play())
    return report


class _FuzzedEpisode:
    def __init__(self, cls: type[Any], seed: int, seconds: float, report: FuzzReport) -> None:
        self.rng, self.seed, self.seconds, self.report = random.Random(seed), seed, seconds, report
        self.inline = bool(getattr(cls, "inline", False))
        accepted = environments.settings(cls)
        wanted = {"difficulty": self.rng.choice(getattr(cls, "difficulties", (1,))), "split": self.rng.choice(SPLITS)}
        self.env = cls(**{key: value for key, value in wanted.items() if key in accepted})
        self.action: Action | None = None

    async def run(self) -> None:
        self.report.episodes += 1
        try:
            await self._play()
        except Exception as fault:
            last = traceback.extract_tb(fault.__traceback__)[
                -1
            ]  # a message may quote the action, so the line is the key
            key = f"{type(fault).__name__} in {last.name}, line {last.lineno}"
            shown = f"{str(fault)!a:.{SHOWN}} (seed {self.seed}, {self.action!a:.{SHOWN}})"
            self.report.faults.setdefault(key, shown)
        finally:
            if hasattr(self.env, "close"):
                await self._call(self.env.close)

    async def _play(self) -> None:
        env, has_random = self.env, overrides(type(self.env), "random_action")
        legal = (lambda: env.random_action(self.rng)) if has_random else None
        read_messages(await self._call(env.reset, self.seed), "reset")
        for _ in range(TURNS):
            self.action = adversarial_action(self.rng, legal, getattr(env, "tools", ()))
            step = read_step(await self._call(env.step, self.action))
            self.report.turns += 1
            if callable(getattr(env, "state_key", None)):
                read_state_key(await self._call(env.state_key))
            if step.terminated or step.truncated:
                return

    async def _call(self, function: Any, *args: Any) -> Any:
        began = time.perf_counter()
        try:
            return await call_environment(function, *args, seconds=self.seconds, inline=self.inline)
        finally:
            self.report.slowest = max(self.report.slowest, time.perf_counter() - began)
