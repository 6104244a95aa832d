"""Players that are not a model: a script behind the session port, so that demonstrations, oracles and random players run
through the very same episode loop as a policy."""

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
from turnwise.rollout.episode import Episode, Limits
from turnwise.rollout.renderer import Renderer

PLAYERS = ("oracle", "random", "demonstrator")


@dataclass
class Scripted:
    """Answers every request with what ``act`` says now."""

    act: Callable[[], Action]
    renderer: Renderer

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        tokens = self.renderer.encode_turn(self.act().text)
        nothing = [0.0] * len(tokens)
        return Completion(tokens, nothing, nothing, [0] * len(tokens), Stop.TOKEN)

    def fork(self, seed: int) -> Session:
        raise NotImplementedError("a script cannot be forked")

    def park(self) -> None:
        pass

    def cancel(self) -> None:
        pass

    def close(self) -> None:
        pass


def actor(player: str, environment: Any, seed: int) -> Callable[[], Action]:
    """The next action of a named player in this environment."""
    rng = random.Random(seed)
    acts = {
        "oracle": ("oracle", lambda: environment.oracle()),
        "random": ("random_action", lambda: environment.random_action(rng)),
        "demonstrator": ("demonstrate", lambda: environment.demonstrate(rng)),
    }
    if player not in acts:
        raise SettingError(f"no player {player!r}; known: {', '.join(PLAYERS)}")
    method, act = acts[player]
    if not hasattr(environment, method):
        raise SettingError(f"{type(environment).__name__} has no {player} player: write a method `{method}`")
    return act


async def play_script(
    player: str, environment: Any, key: str, task: Task, renderer: Renderer, limits: Limits
) -> Trajectory:
    """One episode of a scripted player, as expert data: its tokens have no behaviour policy."""
    act = actor(player, environment, stable_seed(player, task.key, key))
    episode = Episode(key, task, environment, Scripted(act, renderer), renderer, Sampling(), limits)
    played = await episode.run()
    turns = tuple(replace(turn, logp=(), mass=(), version=()) for turn in played.turns)
    return replace(played, turns=turns, origin=Origin.EXPERT)


async def dialogue(player: str, environment: Any, seed: int, turns: int) -> list[Message]:
    """The messages of one scripted episode, before any tokenizer exists."""
    act = actor(player, environment, seed)
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
