"""Scripted policies of an environment (oracle, random, demonstrator) behind the session protocol, so that they run through the
same episode loop as a model. Knows environments' methods; no engine and no loss."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from turnwise.core.protocols import Action, Session
from turnwise.core.records import Completion, Message, Origin, Sampling, Stop, Task, Trajectory
from turnwise.core.seeds import stable_seed
from turnwise.environments.contract import read_step
from turnwise.errors import SettingError
from turnwise.rollout.episode import Episode, EpisodeLimits
from turnwise.rollout.renderer import Renderer

SCRIPTED_POLICIES = ("oracle", "random", "demonstrator")


@dataclass
class ScriptedSession:
    """Generates the text of the next action of ``act``, whatever the prompt."""

    act: Callable[[], Action]
    renderer: Renderer

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        tokens = self.renderer.encode_turn(self.act().text)
        zeros = [0.0] * len(tokens)
        return Completion(tokens, zeros, zeros, [0] * len(tokens), Stop.TOKEN)

    def fork(self, seed: int) -> Session:
        raise NotImplementedError("a scripted session cannot be forked")

    def park(self) -> None:
        pass

    def cancel(self) -> None:
        pass

    def close(self) -> None:
        pass


def scripted_policy(name: str, environment: Any, seed: int) -> Callable[[], Action]:
    """A function that returns the next action of the named scripted policy in this environment."""
    rng = random.Random(seed)
    policies = {
        "oracle": ("oracle", lambda: environment.oracle()),
        "random": ("random_action", lambda: environment.random_action(rng)),
        "demonstrator": ("demonstrate", lambda: environment.demonstrate(rng)),
    }
    if name not in policies:
        raise SettingError(f"no scripted policy {name!r}; known: {', '.join(SCRIPTED_POLICIES)}")
    method, act = policies[name]
    if not hasattr(environment, method):
        raise SettingError(f"{type(environment).__name__} has no {name} policy: write a method `{method}`")
    return act


async def play_scripted(
    policy: str, environment: Any, key: str, task: Task, renderer: Renderer, limits: EpisodeLimits
) -> Trajectory:
    """One episode of a scripted policy, as expert data: its tokens have no behaviour policy."""
    act = scripted_policy(policy, environment, stable_seed(policy, task.key, key))
    episode = Episode(key, task, environment, ScriptedSession(act, renderer), renderer, Sampling(), limits)
    played = await episode.run()
    turns = tuple(replace(turn, logp=(), mass=(), version=()) for turn in played.turns)
    return replace(played, turns=turns, origin=Origin.EXPERT)


async def scripted_messages(policy: str, environment: Any, seed: int, turns: int) -> list[Message]:
    """The messages of one scripted episode, for use before a tokenizer exists."""
    act = scripted_policy(policy, environment, seed)
    messages = list(environment.reset(seed))
    for _ in range(turns):
        action = act()
        step = environment.step(action)
        step = read_step(await step if inspect.isawaitable(step) else step)
        messages += [action.message, *step.messages]
        if step.terminated or step.truncated:
            break
    if hasattr(environment, "close"):
        environment.close()
    return messages
