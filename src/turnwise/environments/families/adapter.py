"""What adapters of families share: the import of an optional package, ``NAME,key=value`` options, worlds in which an action is
one of a list of words.

Knows no package.
"""

from __future__ import annotations

import importlib
import json
import random
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from turnwise.core.protocols import Action, Step
from turnwise.core.records import Message
from turnwise.environments.base import Environment, text_action, user_message
from turnwise.errors import SettingError

LISTED = 24  # actions that a message lists; the others are counted


def import_package(module: str, family: str, install: str) -> Any:
    """An optional module, or a message that says how to install it: by an extra's name, or by the words of a command."""
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        command = f"pip install {install}" if " " in install else f"pip install 'turnwise[{install}]'"
        raise SettingError(f"{family}:... needs a package ({missing}); write {command}") from missing


def split_options(family: str, spec: str) -> tuple[str, dict[str, Any]]:
    """``"NAME,size=3"`` as the name and its options; values are JSON, or text where they are not."""
    name, *pairs = spec.split(",")
    options: dict[str, Any] = {}
    for pair in pairs:
        key, sign, text = pair.partition("=")
        if not sign:
            raise SettingError(f"{family}:{name} is followed by {pair!r}; write key=value, separated by commas")
        try:
            options[key] = json.loads(text)
        except ValueError:
            options[key] = text
    if not name:
        raise SettingError(
            f"{family}: names nothing; write {family}:NAME (`turnwise environments` lists what there is)"
        )
    return name, options


def world_seed(seed: int, split: str) -> int:
    """The seed of a generated world: even for training, odd for held-out tasks, so that no seed is in both splits."""
    return 2 * (seed % 2**30) + (split != "train")


def clean_word(text: str) -> str:
    """An action as its world spells it: one line, lower case, without a final stop."""
    lines = text.strip().lower().splitlines()
    return " ".join(lines[-1].strip().rstrip(".").split()) if lines else ""


def listed(actions: Sequence[str]) -> str:
    """Actions as a message names them."""
    more = f" and {len(actions) - LISTED} more" if len(actions) > LISTED else ""
    return " | ".join(actions[:LISTED]) + more


class WordWorld(Environment):
    """A world in which an action is one of the texts in ``legal()``. Any other text is answered with the legal ones and costs a
    turn."""

    turns: int = 0

    @abstractmethod
    def legal(self) -> Sequence[str]:
        """The actions of the current state."""

    @abstractmethod
    def act(self, word: str) -> Step:
        """Apply a legal action."""

    @abstractmethod
    def begin(self, seed: int) -> Sequence[Message]:
        """Start the episode; returns its first messages."""

    def reset(self, seed: int) -> Sequence[Message]:
        self.turns = 0
        return self.begin(seed)

    def step(self, action: Action) -> Step:
        self.turns += 1
        word = clean_word(action.text)
        if word not in self.legal():
            return self.refuse(action)
        step = self.act(word)
        return step if step.terminated or step.truncated else self._bounded(step)

    def refuse(self, action: Action) -> Step:
        """The answer to a text that is no action."""
        text = f"that is no action. write one of: {listed(self.legal())}"
        return self._bounded(Step([user_message(text)], 0.0, info={"tool_errors": 1}))

    def _bounded(self, step: Step) -> Step:
        """At the turn limit an unfinished episode has failed."""
        if self.turns < self.max_turns:
            return step
        return Step(step.messages, step.reward, False, True, {"success": False, **step.info})

    def random_action(self, rng: random.Random) -> Action:
        return text_action(rng.choice(list(self.legal())))
