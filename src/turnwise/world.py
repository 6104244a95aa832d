"""The world of a run: which environment, which tasks of it, how an episode is opened and where it is cut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from turnwise import environments
from turnwise.data import Task
from turnwise.environments.base import Environment
from turnwise.errors import SettingError
from turnwise.rollout.episode import Limits
from turnwise.settings import Settings
from turnwise.tasks.sampler import Tasks


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
        return Limits(s.max_turns or int(getattr(self.kind, "max_turns", 8)), s.context, s.env_seconds)

    @property
    def unbounded(self) -> Limits:
        """For players that are not a model: only the environment itself limits them."""
        return replace(self.limits, context=2**31)

    @property
    def answers(self) -> bool:
        """Whether its tasks have a gold answer."""
        own = getattr(self.kind, "answer", None)
        return own is not None and own is not Environment.answer

    @property
    def demonstrates(self) -> bool:
        return hasattr(self.kind, "demonstrate") and hasattr(self.kind, "oracle")
