"""Scripted policies of an environment (oracle, random, demonstrator) behind the session protocol, so that they run through the
same episode loop as a model. Knows environments' methods; no engine and no loss."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from turnwise.core.protocols import Action
from turnwise.core.records import Completion, Message, Origin, Sampling, Stop, Task, Trajectory
from turnwise.core.seeds import stable_seed
from turnwise.environments.calls import call_environment
from turnwise.environments.contract import read_messages, read_step
from turnwise.errors import SettingError
from turnwise.rollout.episode import Episode, EpisodeLimits, UnforkedSession
from turnwise.rollout.renderer import Renderer

ScriptedPolicy = Callable[[], Action | Awaitable[Action]]
SCRIPTED_POLICIES = ("oracle", "random", "demonstrator")


@dataclass
class ScriptedSession(UnforkedSession):
    """Generates the text of the next action of ``act``, whatever the prompt."""

    act: ScriptedPolicy
    renderer: Renderer
    tools: Sequence[dict[str, Any]] = ()  # whose schemas tell texts from numbers

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        action = await next_action(self.act)
        tokens = self.renderer.encode_turn(self.renderer.turn_text(action.text, self.tools))
        zeros = [0.0] * len(tokens)
        return Completion(tokens, zeros, zeros, [0] * len(tokens), Stop.TOKEN)


async def next_action(act: ScriptedPolicy) -> Action:
    """The next action, awaited where the environment plays in another process."""
    action = act()
    return await action if isinstance(action, Awaitable) else action


def scripted_policy(name: str, environment: Any, seed: int) -> ScriptedPolicy:
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
    remote = getattr(environment, "scripted_action", None)  # of an environment in another process
    if remote is not None:
        return partial(remote, method, seed)
    if not hasattr(environment, method):
        raise SettingError(f"{type(environment).__name__} has no {name} policy: write a method `{method}`")
    return act


async def play_scripted(
    policy: str, environment: Any, key: str, task: Task, renderer: Renderer, limits: EpisodeLimits
) -> Trajectory:
    """One episode of a scripted policy, as expert data."""
    act = scripted_policy(policy, environment, stable_seed(policy, task.key, key))
    session = ScriptedSession(act, renderer, tuple(getattr(environment, "tools", ())))
    episode = Episode(key, task, environment, session, renderer, Sampling(), limits)
    return as_expert(await episode.run())


def as_expert(played: Trajectory, **more: Any) -> Trajectory:
    """A trajectory as expert data: its tokens have no behaviour policy. ``more``: other fields of every turn."""
    turns = tuple(replace(turn, logp=(), mass=(), version=(), **more) for turn in played.turns)
    return replace(played, turns=turns, origin=Origin.EXPERT)


async def scripted_messages(
    policy: str | ScriptedPolicy, environment: Any, seed: int, turns: int, seconds: float = 30.0
) -> list[Message]:
    """The messages of one episode of a scripted policy, given by name or as a function, for use before a tokenizer exists. The
    environment is called as in an episode, so that several of them wait at the same time."""
    inline = bool(getattr(type(environment), "inline", False))
    call = partial(call_environment, seconds=seconds, inline=inline)
    act = scripted_policy(policy, environment, seed) if isinstance(policy, str) else policy
    messages = read_messages(await call(environment.reset, seed), "reset")
    for _ in range(turns):
        action = await next_action(act)
        step = read_step(await call(environment.step, action))
        messages += [action.message, *step.messages]
        if step.terminated or step.truncated:
            break
    if hasattr(environment, "close"):
        await call(environment.close)
    return messages
