"""Plays scripted behaviours in an environment that may be faulty, and keeps what was said and what was paid."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.core.protocols import Action
from turnwise.core.records import Message
from turnwise.environments import settings
from turnwise.environments.calls import call_environment, call_here, with_timeout
from turnwise.environments.checker.check import DriverLoop
from turnwise.environments.contract import DEFAULT_TURNS, read_messages, read_step

SECONDS = 10.0  # limit of one call


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
    tools: Sequence[dict[str, Any]]
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
        self.played += 1
        messages: list[Message] = []
        actions: list[Action] = []
        rewards: list[float] = []
        right: bool | None = None
        fault, env = "", None
        try:
            env = self.cls(**{key: getattr(task, key) for key in self.settings})
            messages = list(read_messages(self._call(env.reset, task.seed), "reset"))
            limit, memory, rng = self._turns(env), dict[str, Any](), random.Random(task.seed)
            for turn in range(limit):
                moment = Moment(
                    messages, turn, rng, getattr(env, "tools", ()), turn == limit - 1, lambda: self.oracle(env), memory
                )
                action = behaviour(moment)
                step = read_step(self._call(env.step, action))
                actions.append(action)
                rewards.append(float(step.reward))
                messages += [action.message, *step.messages]
                if step.terminated or step.truncated or turn == limit - 1:
                    right = self._right(env, step.info, messages)
                if step.terminated or step.truncated:
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

    def _right(self, env: Any, info: Any, messages: Sequence[Message]) -> bool | None:
        if self.check is not None:
            return bool(self.check(env, messages))
        return bool(info["success"]) if info.get("success") is not None else None

    def _turns(self, env: Any) -> int:
        turns = getattr(env, "max_turns", DEFAULT_TURNS)
        return turns if isinstance(turns, int) and turns >= 1 else DEFAULT_TURNS

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """In this thread, which costs a tenth of a call in another one; what is ``async`` runs on the event loop."""
        if inspect.iscoroutinefunction(function):
            return self.loop.run(call_environment(function, *args, seconds=SECONDS, inline=True), 3 * SECONDS)
        value = call_here(function, *args, seconds=SECONDS)
        return self.loop.run(with_timeout(value, SECONDS), 3 * SECONDS) if inspect.isawaitable(value) else value

    def _close(self, env: Any) -> None:
        close = getattr(env, "close", None)
        if callable(close):
            try:
                self._call(close)
            except Exception:
                return
