"""Worlds of Gymnasium with discrete actions, in words.

    load("gymnasium:FrozenLake-v1,is_slippery=false")

Where the package can draw a world as text, that is the observation; otherwise its numbers are. Actions of the toy worlds have
names, others are "action 0", "action 1", ... An episode succeeds when its rewards reach the threshold of the world's
specification; where there is none, only the reward is reported.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from turnwise.core.protocols import Step
from turnwise.core.records import Message
from turnwise.environments.base import user_message
from turnwise.environments.families import adapter
from turnwise.environments.families.adapter import WordWorld
from turnwise.errors import SettingError

NAMES = {  # actions in the order of the package
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
    "CartPole": ("left", "right"),
    "MountainCar": ("left", "wait", "right"),
    "Acrobot": ("left", "wait", "right"),
    "LunarLander": ("wait", "left", "main", "right"),
}
MARKED = re.compile(r"\x1b\[4[0-9]m(.)\x1b\[0m")  # a cell on a coloured background: where the agent is
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
TURNS = 200  # for a world without a limit of its own


class GymnasiumEnvironment(WordWorld):
    """One episode of one world. ``environment`` makes a subclass for each id."""

    suggests: ClassVar[Mapping[str, Any]] = {"history": 1, "context": 256, "max_tokens": 6}
    make: ClassVar[Any]  # returns a new world of the package
    words: ClassVar[tuple[str, ...]]
    threshold: ClassVar[float | None]

    def begin(self, seed: int) -> Sequence[Message]:
        self.world, self.total = type(self).make(), 0.0
        observation, _ = self.world.reset(seed=adapter.world_seed(seed, self.split))
        return [user_message(f"{self._view(observation)}\nsay {adapter.listed(self.words)}")]

    def legal(self) -> Sequence[str]:
        return self.words

    def move(self, word: str) -> Step:
        observation, reward, terminated, truncated, _ = self.world.step(self.words.index(word))
        self.total += float(reward)
        # without a threshold nobody knows what success is
        judged = self.threshold is not None and (terminated or truncated)
        info = {"success": self.total >= (self.threshold or 0.0)} if judged else {}
        return Step([user_message(self._view(observation))], float(reward), terminated, truncated, info)

    def _view(self, observation: Any) -> str:
        drawn = self.world.render() if self.world.render_mode == "ansi" else None
        if isinstance(drawn, str):
            lines = ESCAPES.sub("", MARKED.sub(r"[\1]", drawn)).strip().splitlines()
            return "\n".join(line for line in lines if not line.strip().startswith("("))
        return in_words(observation)

    def close(self) -> None:
        self.world.close()


def maker(gymnasium: Any, name: str, options: Mapping[str, Any]) -> Callable[[], Any]:
    """A function that returns a new world, without the warnings that the package prints for each."""

    def make() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return gymnasium.make(name, disable_env_checker=True, **options)

    return make


def in_words(observation: Any) -> str:
    """Numbers of an observation, rounded; a dict by its keys."""
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Mapping):
        return "; ".join(f"{key} {in_words(value)}" for key, value in observation.items())
    if isinstance(observation, tuple):
        return " ".join(map(in_words, observation))
    if hasattr(observation, "ravel"):
        return " ".join(f"{float(value):.2f}" for value in observation.ravel())
    return str(observation)


@cache
def environment(spec: str) -> type[GymnasiumEnvironment]:
    """The class of an id, with options of the world's constructor."""
    name, options = adapter.split_options("gymnasium", spec)
    gymnasium = adapter.import_package("gymnasium", "gymnasium")
    adapter.require_offered(name, gymnasium.registry, "gymnasium has no world")
    entry = gymnasium.registry[name]
    module, _, attribute = str(entry.entry_point).partition(":")
    try:
        # read from the class, before a world is made: the mode is an argument of its constructor
        modes = getattr(adapter.import_package(module, "gymnasium"), attribute).metadata.get("render_modes", ())
    except (SettingError, AttributeError):
        modes = ()
    if "ansi" in modes:  # it draws itself as text
        options = {"render_mode": "ansi", **options}

    make = maker(gymnasium, name, options)
    with adapter.refusing(f"gymnasium:{spec}"):  # a missing dependency, or a wrong option
        world = make()
    if not isinstance(world.action_space, gymnasium.spaces.Discrete):
        raise SettingError(f"gymnasium:{name} has the actions {world.action_space}; only discrete ones can be words")
    words, count = NAMES.get(name.split("-")[0], ()), int(world.action_space.n)
    return adapter.member_class(
        "gymnasium", spec, GymnasiumEnvironment, f"{name} of Gymnasium.",
        make=staticmethod(make),
        words=words if len(words) == count else tuple(f"action {n}" for n in range(count)),
        threshold=entry.reward_threshold,
        max_turns=entry.max_episode_steps or TURNS,
    )  # fmt: skip
