"""The environment of a run: its class, its task stream, how an episode is created and where it is truncated.

Knows settings and environment classes; no model, no method.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from turnwise import environments
from turnwise.config.named_object import GIVEN_OBJECT
from turnwise.config.settings import Settings, default_of
from turnwise.config.values import TINY, ModelName
from turnwise.core.records import Task
from turnwise.environments import prompts
from turnwise.environments.base import overrides
from turnwise.environments.contract import turn_limit
from turnwise.environments.isolated import PROCESSES, HostPool, IsolatedEnvironment
from turnwise.errors import SettingError, nearest
from turnwise.models.facts import read_model_facts
from turnwise.rollout.episode import EpisodeLimits, FailedEnvironment
from turnwise.rollout.scripted import SCRIPTED_POLICIES
from turnwise.tasks.task_source import TaskList, TaskStream
from turnwise.training.agents import Agent, load_agent
from turnwise.training.prompt_data import environment_class, prompt_data, uses_prompts
from turnwise.training.suggestions import Suggestion, is_small, suggest

SUGGESTED = (
    "difficulty", "max_tokens", "max_turns", "context", "history", "vocabulary", "hidden", "layers", "copying",
    "cold_steps", "cold_batch", "cold_demos", "cold_lr",
)  # fmt: skip
TINY_MODEL_ONLY = ("vocabulary", "hidden", "layers", "copying", "cold_steps", "cold_batch", "cold_demos", "cold_lr")
SMALL_MODELS_ONLY = ("max_tokens", "context")
SECOND_STREAM = 1_000_003  # added to the seed: tokenizer corpus and cold start play other tasks than the run


@dataclass(frozen=True)
class Suggested:
    """A value that applies where the user gives none, and why: ``Suggested("max_turns", 6, "environment guess")``."""

    name: str
    value: Any
    origin: str


def resolve_settings(values: Mapping[str, Any], env_class: type | None = None) -> Settings:
    """The settings of a run: the user's values, then what is suggested, then the defaults. ``env_class`` replaces the class
    that the name refers to."""
    values = {**values, "env": prompts.NAME} if uses_prompts(values) and "env" not in values else values
    return Settings.of({**{s.name: s.value for s in suggestions(values, env_class)}, **values})


def suggestions(values: Mapping[str, Any], env_class: type | None = None) -> list[Suggested]:
    """What environment and model suggest for the settings that ``values`` leaves open, the stronger last."""
    defaults = {f.name: default_of(f) for f in fields(Settings) if f.name in ("env", "model")}
    env_class = env_class or environment_class(values, defaults["env"])
    suggested = {"difficulty": tuple(getattr(env_class, "difficulties", (1,))), **getattr(env_class, "suggests", {})}
    for name in suggested:
        if name not in SUGGESTED:
            raise SettingError(
                f"{env_class.__name__} suggests a value for {name!r}, which an environment may not set; "
                f"{nearest(name, SUGGESTED)}"
            )
    turn_limit(env_class)  # refused at once
    origin, model = f"environment {env_class.__name__}", ModelName.parse(str(values.get("model", defaults["model"])))
    fitting: list[Suggestion] = []
    if not model.tiny:
        facts = read_model_facts(model.name)
        unfit = TINY_MODEL_ONLY if is_small(facts) else (*TINY_MODEL_ONLY, *SMALL_MODELS_ONLY)
        suggested = {name: value for name, value in suggested.items() if name not in unfit}
        fitting = [] if is_small(facts) else suggest({**suggested, **values}, facts, env_class)
    found = [Suggested(name, value, origin) for name, value in suggested.items() if name not in values]
    return found + [Suggested(s.name, s.value, s.reason) for s in fitting]


def chosen_for_model(values: Mapping[str, Any], env_class: type | None = None) -> list[str]:
    """What is suggested for a model that is not the tiny one, in sentences: it differs from the defaults of the help text."""
    if ModelName.parse(str(values.get("model", TINY))).tiny:
        return []
    return [f"{s.name} is {s.value} ({s.origin})" for s in suggestions(values, env_class)]


def episode_pool(settings: Settings) -> HostPool | None:
    """Where episodes play: in actors of the run's cluster, in processes of this machine, or None: in this process."""
    if settings.cluster.environments and "ray" in sys.modules:
        from turnwise.training.cluster.environment_pool import pool_of_learner  # late: imports ray

        if (pool := pool_of_learner()) is not None:
            return pool
    return PROCESSES if settings.isolate_env else None


@dataclass(frozen=True)
class EnvSpec:
    """An environment class with the settings its episodes are created by."""

    settings: Settings
    env_class: type
    agent: Agent | None = None  # plays the episodes; None: the turn loop does

    @classmethod
    def from_settings(
        cls, settings: Settings, env_class: type | None = None, agent: Callable[..., Any] | None = None
    ) -> EnvSpec:
        """``env_class`` and ``agent`` replace what the names refer to: they were given as objects."""
        env_class = env_class or environment_class(settings.as_dict(), settings.env)
        offered = tuple(getattr(env_class, "difficulties", (1,)))
        wrong = [d for d in settings.difficulty if d not in offered]
        if wrong:
            raise SettingError(f"{settings.env} has no difficulty {wrong[0]}; it offers {', '.join(map(str, offered))}")
        if settings.isolate_env and settings.env.startswith((GIVEN_OBJECT, prompts.NAME)):
            raise SettingError(
                f"isolate_env: another process cannot import {settings.env}; give a class by its name, module:Class"
            )
        return cls(settings, env_class, load_agent(settings, agent))

    def columns(self, task: Task) -> Mapping[str, Any]:
        """The columns of a task's row, where the tasks are rows of a file."""
        values = self.settings.as_dict()
        return prompt_data(values).row(task).columns if uses_prompts(values) else {}

    def make(self, task: Task) -> Any:
        """A fresh episode. A class without splits gets other seeds for held-out tasks instead."""
        settings, arguments = self.settings, {"difficulty": task.difficulty, "split": task.split}
        accepted = {key: arguments[key] for key in environments.settings(self.env_class)}
        if (pool := episode_pool(settings)) is not None:
            return IsolatedEnvironment(settings.env, accepted, settings.env_seconds, self.tools, pool)
        return self.env_class(**accepted)

    def try_make(self, task: Task) -> Any:
        """``make``; where the constructor raises, an environment whose episode fails with that reason."""
        try:
            return self.make(task)
        except (Exception, SystemExit) as fault:
            return FailedEnvironment(fault)

    def tasks(self, split: str, purpose: str = "run") -> TaskStream:
        seed = self.settings.seed if split == "train" else 0  # held-out tasks are the same for every run
        seed += 0 if purpose == "run" else SECOND_STREAM
        name, difficulties, listed = self.settings.env, self.settings.difficulty, self._listed(split)
        if listed is not None:
            return TaskList(name, split, difficulties, seed, tuple(Task(name, n, split) for n in listed))
        return TaskStream(name, split, difficulties, seed)

    def _listed(self, split: str) -> Sequence[int] | None:
        """The seeds of all tasks of a split, where the class names them (``seeds``); None: they do not end."""
        seeds = getattr(self.env_class, "seeds", None)
        return None if seeds is None else seeds[split]

    def first_tasks(self, split: str, count: int) -> list[Task]:
        """The tasks of an evaluation."""
        listed = self._listed(split)
        count = count if listed is None else min(count, len(listed))
        return [self.tasks(split).draw(n) for n in range(count)]

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        return tuple(getattr(self.env_class, "tools", ()))

    @property
    def limits(self) -> EpisodeLimits:
        s = self.settings
        turns = s.max_turns or turn_limit(self.env_class)
        return EpisodeLimits(turns, s.context, s.env_seconds, s.history)

    @property
    def scripted_limits(self) -> EpisodeLimits:
        """For scripted policies: only the environment itself limits them."""
        return replace(self.limits, context=2**31)

    def require_policy(self, player: str) -> None:
        """Refuse a scripted policy that the class does not have; and an unknown name."""
        if player not in SCRIPTED_POLICIES:
            raise SettingError(f"no scripted policy {player!r}; known: {', '.join(SCRIPTED_POLICIES)}")
        method = {"oracle": "oracle", "random": "random_action", "demonstrator": "demonstrate"}.get(player, "")
        if not method or overrides(self.env_class, method) or (method == "demonstrate" and self.can_demonstrate):
            return
        remedy = "`oracle` and `random_action`, or its own `demonstrate`" if method == "demonstrate" else f"`{method}`"
        raise SettingError(f"{self.settings.env} has no {player} policy; write {remedy} in its class")

    @property
    def can_demonstrate(self) -> bool:
        """Whether the class has scripted policies: an ``oracle`` and an imperfect ``demonstrate``, its own or the base's,
        which mixes ``oracle`` and ``random_action``."""
        cls = self.env_class
        inherited = hasattr(cls, "demonstrate") and overrides(cls, "random_action")
        return overrides(cls, "oracle") and (overrides(cls, "demonstrate") or inherited)
