"""The environment of a run: its class, its task stream, how an episode is created and where it is truncated.

Knows settings and environment classes; no model, no method.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from turnwise import environments
from turnwise.config.settings import Settings, default_of
from turnwise.core.records import Task
from turnwise.environments.base import overrides
from turnwise.errors import SettingError, nearest
from turnwise.rollout.episode import EpisodeLimits, FailedEnvironment
from turnwise.tasks.task_source import TaskStream

SUGGESTED = (
    "difficulty", "max_tokens", "max_turns", "context", "history", "vocabulary", "hidden", "layers", "copying",
    "cold_steps", "cold_batch", "cold_demos", "cold_lr",
)  # fmt: skip
TINY_MODEL_ONLY = ("vocabulary", "hidden", "layers", "copying", "cold_steps", "cold_batch", "cold_demos", "cold_lr")
SECOND_STREAM = 1_000_003  # added to the seed: tokenizer corpus and cold start play other tasks than the run


def resolve_settings(values: Mapping[str, Any]) -> Settings:
    """The settings of a run: the user's values, then the environment's suggestions, then the defaults."""
    defaults = {f.name: default_of(f) for f in fields(Settings) if f.name in ("env", "model")}
    env_class = environments.load(values.get("env", defaults["env"]))
    suggested = {"difficulty": tuple(getattr(env_class, "difficulties", (1,))), **getattr(env_class, "suggests", {})}
    for name in suggested:
        if name not in SUGGESTED:
            raise SettingError(
                f"{env_class.__name__} suggests a value for {name!r}, which an environment may not set; "
                f"{nearest(name, SUGGESTED)}"
            )
    if values.get("model", defaults["model"]) != defaults["model"]:
        suggested = {name: value for name, value in suggested.items() if name not in TINY_MODEL_ONLY}
    return Settings.of({**suggested, **values})


@dataclass(frozen=True)
class EnvSpec:
    """An environment class with the settings its episodes are created by."""

    settings: Settings
    env_class: type

    @classmethod
    def from_settings(cls, settings: Settings) -> EnvSpec:
        env_class = environments.load(settings.env)
        offered = tuple(getattr(env_class, "difficulties", (1,)))
        wrong = [d for d in settings.difficulty if d not in offered]
        if wrong:
            raise SettingError(f"{settings.env} has no difficulty {wrong[0]}; it offers {', '.join(map(str, offered))}")
        return cls(settings, env_class)

    def make(self, task: Task) -> Any:
        """A fresh episode. A class without splits gets other seeds for held-out tasks instead."""
        arguments = {"difficulty": task.difficulty, "split": task.split}
        return self.env_class(**{key: arguments[key] for key in environments.settings(self.env_class)})

    def try_make(self, task: Task) -> Any:
        """``make``; where the constructor raises, an environment whose episode fails with that reason."""
        try:
            return self.make(task)
        except (Exception, SystemExit) as fault:
            return FailedEnvironment(fault)

    def tasks(self, split: str, purpose: str = "run") -> TaskStream:
        seed = self.settings.seed if split == "train" else 0  # held-out tasks are the same for every run
        seed += 0 if purpose == "run" else SECOND_STREAM
        return TaskStream(self.settings.env, split, self.settings.difficulty, seed)

    def first_tasks(self, split: str, count: int) -> list[Task]:
        """The tasks of an evaluation."""
        tasks = self.tasks(split)
        return [tasks.draw(n) for n in range(count)]

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        return tuple(getattr(self.env_class, "tools", ()))

    @property
    def limits(self) -> EpisodeLimits:
        s = self.settings
        turns = s.max_turns or int(getattr(self.env_class, "max_turns", 8))
        return EpisodeLimits(turns, s.context, s.env_seconds, s.history)

    @property
    def scripted_limits(self) -> EpisodeLimits:
        """For scripted policies: only the environment itself limits them."""
        return replace(self.limits, context=2**31)

    @property
    def can_demonstrate(self) -> bool:
        """Whether the class has scripted policies: an ``oracle`` and an imperfect ``demonstrate``, its own or the base's,
        which mixes ``oracle`` and ``random_action``."""
        cls = self.env_class
        inherited = hasattr(cls, "demonstrate") and overrides(cls, "random_action")
        return overrides(cls, "oracle") and (overrides(cls, "demonstrate") or inherited)
