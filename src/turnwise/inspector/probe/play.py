"""Plays scripted behaviours in an environment that may be faulty, and keeps what was said and what was paid.

``Lore`` is what adversaries know before they attack: how the oracle and the random policy act on other tasks.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from turnwise.core.protocols import Action
from turnwise.core.records import Message
from turnwise.environments import settings
from turnwise.environments.base import tool_action
from turnwise.environments.calls import call_environment, call_here, with_timeout
from turnwise.environments.checker.check import DriverLoop
from turnwise.environments.contract import DEFAULT_TURNS, read_messages, read_step

SECONDS = 10.0  # limit of one call
LORE_TASKS = 16
WORD = re.compile(r"[\w.+-]+")
ODD_VALUES = ("", "nan", "inf", "-1", "0", "none", "true", "*", ".", "?")
ODD_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "integer": (-1, 0, -1000, 10**6),
    "number": (-1.0, 0.0, -1e3, 1e6),
    "boolean": (True, False),
    "array": ((), ("",)),
    "object": ({},),
}
DIVERSE = 40  # at most so many different actions, words or calls are kept


@dataclass(frozen=True)
class ProbeTask:
    """Which task of the environment is played."""

    seed: int
    difficulty: int = 1
    split: str = "train"

    def __str__(self) -> str:
        return f"difficulty {self.difficulty}, {self.split}, seed {self.seed}"


@dataclass(frozen=True)
class ProbeEpisode:
    """One played episode. ``right``: what the flag, or the check that replaces it, says; None where nothing says it."""

    task: ProbeTask
    messages: tuple[Message, ...]
    actions: tuple[Action, ...]
    rewards: tuple[float, ...]
    right: bool | None
    fault: str = ""

    @property
    def reward(self) -> float:
        return sum(self.rewards)

    @property
    def said(self) -> tuple[str, ...]:
        """The actions as comparable texts."""
        return tuple(f"{action.text.strip()} {action.calls}" for action in self.actions)


@dataclass
class Moment:
    """What a behaviour sees before it acts: the dialogue, the turn, and the environment's own oracle."""

    messages: list[Message]
    turn: int
    rng: random.Random
    last_turn: bool
    oracle: Callable[[], Action | None]
    memory: dict[str, Any] = field(default_factory=dict)  # of one episode

    @property
    def prompt(self) -> str:
        return str(self.messages[0]["content"])

    @property
    def reply(self) -> str:
        """The environment's latest message."""
        return str(self.messages[-1]["content"])


Behaviour = Callable[[Moment], Action]
RightCheck = Callable[[Any, Sequence[Message]], bool]


class ProbePlayer:
    """Plays one environment class. Close it afterwards."""

    def __init__(self, cls: type[Any], check: RightCheck | None = None) -> None:
        self.cls, self.check = cls, check
        self.loop, self.settings = DriverLoop(), settings(cls)
        self.played = 0

    def play(self, task: ProbeTask, behaviour: Behaviour) -> ProbeEpisode:
        """An episode up to the turn limit. A fault of the environment ends it and is kept: training drops such an episode."""
        # faulty episodes count too: they take their time
        self.played += 1
        messages: list[Message] = []
        actions: list[Action] = []
        rewards: list[float] = []
        right: bool | None = None
        fault, env = "", None
        try:
            env = self.cls(**{key: getattr(task, key) for key in self.settings})
            messages = list(read_messages(self._call(env.reset, task.seed), "reset"))
            turns, memory, rng = getattr(env, "max_turns", DEFAULT_TURNS), dict[str, Any](), random.Random(task.seed)
            limit = turns if isinstance(turns, int) and turns >= 1 else DEFAULT_TURNS
            for turn in range(limit):
                moment = Moment(messages, turn, rng, turn == limit - 1, lambda: self.oracle(env), memory)
                action = behaviour(moment)
                step = read_step(self._call(env.step, action))
                actions.append(action)
                rewards.append(float(step.reward))
                messages += [action.message, *step.messages]
                ended = step.terminated or step.truncated
                if ended or turn == limit - 1:
                    flag = step.info.get("success") if self.check is None else self.check(env, messages)
                    right = None if flag is None and self.check is None else bool(flag)
                if ended:
                    break
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        finally:
            self._close(env)
        return ProbeEpisode(task, tuple(messages), tuple(actions), tuple(rewards), right, fault)

    def oracle(self, env: Any) -> Action | None:
        """The next action of the environment's oracle; None without one."""
        method = getattr(env, "oracle", None)
        if not callable(method):
            return None
        try:
            action = self._call(method)
        except NotImplementedError:
            return None
        return action if isinstance(action, Action) else None

    def random_actions(self, task: ProbeTask, count: int) -> list[Action]:
        """Actions of the environment's random policy at the first turn of a task; empty without one."""
        env = None
        try:
            env = self.cls(**{key: getattr(task, key) for key in self.settings})
            self._call(env.reset, task.seed)
            rng = random.Random(task.seed)
            return [self._call(env.random_action, rng) for _ in range(count)]
        except Exception:
            return []
        finally:
            self._close(env)

    def close(self) -> None:
        self.loop.close()

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """In this thread, which costs a tenth of a call in another one; what is ``async`` runs on the event loop."""
        if inspect.iscoroutinefunction(function):
            return self.loop.run(call_environment(function, *args, seconds=SECONDS, inline=True), 3 * SECONDS)
        value = call_here(function, *args, seconds=SECONDS)
        return self.loop.run(with_timeout(value, SECONDS), 3 * SECONDS) if inspect.isawaitable(value) else value

    def _close(self, env: Any) -> None:
        close = getattr(env, "close", None)
        if callable(close):
            with contextlib.suppress(Exception):
                self._call(close)


@dataclass(frozen=True)
class Lore:
    """``prefix``: what all final texts of the oracle begin with, such as ``answer: ``; ``values``: what follows it."""

    oracle_episodes: tuple[ProbeEpisode, ...]
    oracle_actions: tuple[Action, ...]
    random_actions: tuple[Action, ...]
    prefix: str
    values: tuple[str, ...]
    words: tuple[str, ...]
    tools: tuple[dict[str, Any], ...]

    @property
    def tool_names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.tools]

    def calls(self, rng: random.Random, words: Sequence[str], count: int = DIVERSE) -> list[Action]:
        """Calls of every tool, with arguments of the right type: odd ones, and words of the dialogue."""
        calls = []
        for function in (tool["function"] for tool in self.tools):
            properties = function.get("parameters", {}).get("properties", {})
            for _ in range(1 + count // len(self.tools)):
                arguments = {key: _argument(rng, schema, words) for key, schema in properties.items()}
                calls.append(tool_action(function["name"], **arguments))
        return _distinct(calls)


def follow_oracle(moment: Moment) -> Action:
    return moment.oracle() or Action("")


def gather_lore(player: ProbePlayer, tasks: Sequence[ProbeTask]) -> Lore:
    """Plays the oracle on ``tasks``, none of which is attacked later."""
    played = [player.play(task, follow_oracle) for task in tasks]
    has_oracle = any(action.text or action.calls for episode in played for action in episode.actions)
    episodes = tuple(e for e in played if not e.fault) if has_oracle else ()
    oracle_actions = _distinct([action for episode in episodes for action in episode.actions])
    drawn = [action for task in tasks[:4] for action in player.random_actions(task, 12)]
    finals = list(dict.fromkeys(e.actions[-1].text for e in episodes if e.actions and not e.actions[-1].calls))
    # what several final texts begin with, up to the last blank; empty where it would be a whole text
    first, last = (min(finals), max(finals)) if len(finals) > 1 else ("", "")
    common = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last)))
    prefix = common[: common.rfind(" ") + 1]
    texts = " ".join(str(m["content"]) for e in played for m in e.messages)
    words = tuple(dict.fromkeys(WORD.findall(texts)))[:200]
    tools = tuple(getattr(player.cls, "tools", ()) or ())
    values = tuple(dict.fromkeys(text[len(prefix) :].strip() for text in finals))
    return Lore(episodes, tuple(oracle_actions), tuple(_distinct(drawn)), prefix, values, words, tools)


def _argument(rng: random.Random, schema: Any, words: Sequence[str]) -> Any:
    if isinstance(schema, dict) and schema.get("enum"):
        return rng.choice(list(schema["enum"]))
    odd = ODD_ARGUMENTS.get(str(schema.get("type")) if isinstance(schema, dict) else "")
    return rng.choice(odd if odd is not None else ("", *words))


def _distinct(actions: Sequence[Action]) -> list[Action]:
    by_text = {f"{action.text} {action.calls}": action for action in actions}
    return list(by_text.values())[:DIVERSE]


def changed_call(action: Action, **changes: Any) -> Action:
    """The action with other arguments in its first call."""
    call = action.calls[0]
    return tool_action(call.name, **{**call.arguments, **changes})
