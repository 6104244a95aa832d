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

    async def play_all() -> None:
        for start in range(0, episodes, CONCURRENT):
            numbers = range(start, min(start + CONCURRENT, episodes))
            await asyncio.gather(*(_play(cls, seed + number, seconds, report) for number in numbers))

    asyncio.run(play_all())
    return report


async def _play(cls: type[Any], seed: int, seconds: float, report: FuzzReport) -> None:
    """One episode; what it raises is a fault."""
    rng, action, inline = random.Random(seed), None, bool(getattr(cls, "inline", False))
    choices = {"difficulty": rng.choice(getattr(cls, "difficulties", (1,))), "split": rng.choice(SPLITS)}
    env = cls(**{key: choices[key] for key in environments.settings(cls)})
    legal = (lambda: env.random_action(rng)) if overrides(cls, "random_action") else None

    async def call(function: Any, *args: Any) -> Any:
        began = time.perf_counter()
        try:
            return await call_environment(function, *args, seconds=seconds, inline=inline)
        finally:
            report.slowest = max(report.slowest, time.perf_counter() - began)

    report.episodes += 1
    try:
        read_messages(await call(env.reset, seed), "reset")
        for _ in range(TURNS):
            action = adversarial_action(rng, legal, getattr(env, "tools", ()))
            step = read_step(await call(env.step, action))
            report.turns += 1
            if callable(getattr(env, "state_key", None)):
                read_state_key(await call(env.state_key))
            if step.terminated or step.truncated:
                break
    except Exception as fault:
        last = traceback.extract_tb(fault.__traceback__)[-1]  # a message may quote the action, so the line is the key
        key = f"{type(fault).__name__} in {last.name}, line {last.lineno}"
        report.faults.setdefault(key, f"{str(fault)!a:.{SHOWN}} (seed {seed}, {action!a:.{SHOWN}})")
    finally:
        if hasattr(env, "close"):
            await call(env.close)
