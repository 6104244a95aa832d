"""Playing whole episodes in tests."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from turnwise.core.protocols import Action, Step
from turnwise.environments import make

SPLITS = ("train", "held_out")


def play(env: Any, seed: int, act: Callable[[Any], Action]) -> tuple[list[str], Step, float]:
    """All texts the agent read, the last step and the sum of rewards."""
    texts = [message["content"] for message in env.reset(seed)]
    total = 0.0
    for _ in range(4 * env.max_turns):
        step = env.step(act(env))
        total += step.reward
        texts += [message["content"] for message in step.messages]
        if step.terminated or step.truncated:
            return texts, step, total
    raise AssertionError("the episode did not end")


def success_rate(name: str, difficulty: int, split: str, player: str, episodes: int = 200) -> float:
    won = 0
    for seed in range(episodes):
        rng = random.Random(f"{player}/{difficulty}/{seed}")
        arguments = () if player == "oracle" else (rng,)
        env = make(name, difficulty, split)
        _, step, total = play(env, seed, lambda env, a=arguments: getattr(env, player)(*a))
        assert total == float(step.info["success"])
        won += step.info["success"]
    return won / episodes
