"""The world of a run: which environment, which tasks of it, how an episode is opened and where it is cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from turnwise import environments
from turnwise.config.settings import Settings, default_of
from turnwise.core.records import Task
from turnwise.errors import SettingError, nearest
from turnwise.rollout.episode import Limits, Unopened
from turnwise.tasks.samplers import Tasks

SUGGESTED = (
    "difficulty", "max_tokens", "max_turns", "context", "history", "vocabulary", "hidden", "layers", "copying",
    "cold_steps", "cold_batch", "cold_demos", "cold_lr",
)  # fmt: skip
OF_THE_TINY_MODEL = ("vocabulary", "hidden", "layers", "copying", "cold_steps", "cold_batch", "cold_demos", "cold_lr")


def settle(given: Mapping[str, Any]) -> Settings:
    """The settings of a run: what the user gives, then what the environment suggests, then the defaults."""
    defaults = {f.name: default_of(f) for f in fields(Settings) if f.name in ("env", "model")}
    kind = environments.load(given.get("env", defaults["env"]))
    own = {"difficulty": tuple(getattr(kind, "difficulties", (1,))), **getattr(kind, "suggests", {})}
    for name in own:
        if name not in SUGGESTED:
            raise SettingError(
                f"{kind.__name__} suggests {name!r}, which is not its to say; {nearest(name, SUGGESTED)}"
            )
    if given.get("model", defaults["model"]) != defaults["model"]:  # another model needs no such help
        own = {name: value for name, value in own.items() if name not in OF_THE_TINY_MODEL}
    return Settings.of({**own, **given})


@dataclass(frozen=True)
class World:
    """The environment class of a run and how its tasks are opened."""

    settings: Settings
    kind: type

    @classmethod
    def of(cls, settings: Settings) -> World:
        kind = environments.load(settings.env)
        offered = tuple(getattr(kind, "difficulties", (1,)))
        wrong = [d for d in settings.difficulty if d not in offered]
        if wrong:
            raise SettingError(f"{settings.env} has no difficulty {wrong[0]}; it offers {', '.join(map(str, offered))}")
        return cls(settings, kind)

    def open(self, task: Task) -> Any:
        """A fresh episode. A class without splits has other seeds for held-out tasks, and must make do with that."""
        wanted = {"difficulty": task.difficulty, "split": task.split}
        return self.kind(**{key: wanted[key] for key in environments.settings(self.kind)})

    def attempt(self, task: Task) -> Any:
        """The same; where the class raises, something whose episode fails with that reason."""
        try:
            return self.open(task)
        except (Exception, SystemExit) as fault:
            return Unopened(fault)

    def tasks(self, split: str, purpose: str = "run") -> Tasks:
        seed = self.settings.seed if split == "train" else 0  # held-out tasks are the same for every run
        return Tasks(self.settings.env, split, self.settings.difficulty, seed if purpose == "run" else seed + 1_000_003)

    def first(self, split: str, count: int) -> list[Task]:
        """The tasks of an evaluation."""
        tasks = self.tasks(split)
        return [tasks.draw(n) for n in range(count)]

    @property
    def limits(self) -> Limits:
        s = self.settings
        turns = s.max_turns or int(getattr(self.kind, "max_turns", 8))
        return Limits(turns, s.context, s.env_seconds, s.history)

    @property
    def unbounded(self) -> Limits:
        """For players that are not a model: only the environment itself limits them."""
        return replace(self.limits, context=2**31)

    @property
    def demonstrates(self) -> bool:
        return hasattr(self.kind, "demonstrate") and hasattr(self.kind, "oracle")
