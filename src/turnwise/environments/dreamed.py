"""Dreamed episodes: a world model, not the environment, says what an action leads to.

Put ``Dreamed`` before an environment: ``class DreamedKeyDoor(Dreamed, KeyDoor)``, and write ``predict`` and ``judge``. A training
episode starts at a real first observation; every later one is predicted from the one before and the action. It ends when the
judge reads success in a prediction, or after ``horizon`` steps. Episodes of the held-out split, and those that the scripted
policy plays, are real: evaluations and demonstrations are of the environment itself.
Knows no model: ``predict`` is whatever a subclass makes of one.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from turnwise.core.protocols import Action, Step
from turnwise.core.records import Message
from turnwise.environments.base import WrappedEnvironment, plain_words, user_message
from turnwise.errors import SettingError

VARIANTS = 8  # different dreams of one transition: what the observation hides may differ between tasks


class Dreamed(WrappedEnvironment):
    """``horizon``: the most steps that are dreamed in an episode."""

    seen: str  # the last observation
    dreamed: int  # steps

    def __init__(self, *, difficulty: int = 1, split: str = "train", horizon: int = 28) -> None:
        if horizon < 1:
            raise SettingError(f"horizon is {horizon}; write at least 1 dreamed step")
        super().__init__(difficulty=difficulty, split=split)
        self.horizon = horizon

    @abstractmethod
    def predict(self, seen: str, action: str, variant: int) -> str:
        """The next observation after ``action`` in a state that shows ``seen``. Equal arguments give an equal text."""

    @abstractmethod
    def judge(self, observation: str) -> bool:
        """Whether an observation shows that the task is done."""

    def reset(self, seed: int) -> Sequence[Message]:
        messages = super().reset(seed)  # type: ignore[safe-super]
        self.dreaming, self.dreamed = self.split == "train", 0
        self.seen, self.variant = str(messages[-1]["content"]), random.Random(f"dream/{seed}").randrange(VARIANTS)
        return messages

    def step(self, action: Action) -> Step:
        if not self.dreaming:
            return self.plain_step(action)
        self.dreamed += 1
        self.seen = self.predict(self.seen, plain_words(action.text), self.variant)
        done = self.judge(self.seen)
        over = not done and self.dreamed >= self.horizon
        info: dict[str, Any] = {"success": done} if done or over else {}
        return Step([user_message(self.seen)], float(done), terminated=done, truncated=over, info=info)

    def oracle(self) -> Action:
        """The scripted policy knows the environment, not a dream: an episode that it begins is real."""
        if self.dreaming and self.dreamed:
            raise NotImplementedError("the scripted policy cannot go on in a dream, whose state nobody knows")
        self.dreaming = False
        return super().oracle()

    def demonstrate(self, rng: random.Random) -> Action:
        # a demonstration that begins is real; a dream goes on as a dream, for which the oracle refuses
        self.dreaming = self.dreaming and bool(self.dreamed)
        return super().demonstrate(rng)

    def state_key(self) -> str | None:
        return None if self.dreaming else super().state_key()
