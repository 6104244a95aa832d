"""Semi-online episodes: the policy acts in the states of an expert's path, and a wrong step is replaced by the expert's.

    --env turnwise.environments.expert_path:KeyDoorPath,patches=2

Each training episode follows the scripted policy. An action that equals the expert's is taken. Any other is recorded with its
reward, the expert's action is taken in its place and written into the history that the policy reads next, at most ``patches``
times (−1: always); after that a wrong action ends the episode. The expert's words are context and are never trained on. Episodes
of the held-out split are those of the environment itself, so an evaluation measures what the policy does alone.

Knows no tokens. What an action is worth: 0.1 for a readable one and 0.9 times 1 if it equals the expert's, 0.5 if it is of the
same kind, 0.1 if it is another readable one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from turnwise.core.protocols import Action, Step
from turnwise.core.records import Message
from turnwise.environments.base import WrappedEnvironment, plain_words
from turnwise.environments.builtin.keydoor import MOVES, WORDS, KeyDoor
from turnwise.environments.builtin.lookup import ANSWER, Lookup
from turnwise.errors import SettingError


class ExpertPath(WrappedEnvironment):
    """Put before an environment with an ``oracle`` and a plain ``step``: ``class KeyDoorPath(ExpertPath, KeyDoor)``."""

    facts: ClassVar[tuple[str, ...]] = ("match",)
    read: list[Message]  # what the policy has read, with the expert's words in the place of wrong ones

    def __init__(self, *, difficulty: int = 1, split: str = "train", patches: int = 2) -> None:
        if patches < -1:
            raise SettingError(f"patches is {patches}; write -1 (no limit), 0 or a positive number")
        super().__init__(difficulty=difficulty, split=split)
        self.patches = patches

    def action_kind(self, action: Action) -> str | None:
        """What kind of action it is, and its words; None: it cannot be read."""
        raise NotImplementedError(f"{type(self).__name__} does not say what kind an action is: write `action_kind`")

    def reset(self, seed: int) -> Sequence[Message]:
        self.read, self.patched = list(super().reset(seed)), 0  # type: ignore[safe-super]
        return list(self.read)

    def step(self, action: Action) -> Step:
        if self.split != "train":
            return self.plain_step(action)
        expected = self.oracle()
        matched, kind = _words(action) == _words(expected), self.action_kind(action)
        likeness = 1.0 if matched else 0.5 if kind == self.action_kind(expected) else 0.1
        reward = 0.0 if kind is None else 0.1 + 0.9 * likeness
        if not matched and self.patches >= 0 and self.patched >= self.patches:
            return Step([], reward, truncated=True, info={"success": False, "facts": {"match": 0.0}})
        self.patched += not matched
        taken = action if matched else expected
        step = self.plain_step(taken)
        # the expert's words replace the policy's own in what it reads next
        context = None if matched else [*self.read, taken.message]
        self.read += [taken.message, *step.messages]
        info = {**step.info, "facts": {**step.info.get("facts", {}), "match": float(matched)}}
        if step.terminated or step.truncated:
            # an episode that the expert mended is not a success of the policy
            info["success"] = bool(info.get("success")) and not self.patched
        return Step(step.messages, reward, step.terminated, step.truncated, info, context)


def _words(action: Action) -> object:
    """An action for comparison: its calls, or its text without case and final dot."""
    return [(c.name, c.arguments) for c in action.calls] or plain_words(action.text)


class KeyDoorPath(ExpertPath, KeyDoor):
    """KeyDoor along the shortest way. Moves are of one kind. Of several shortest ways only the scripted one counts."""

    def action_kind(self, action: Action) -> str | None:
        word = str(_words(action))
        return None if word not in WORDS else "move" if word in MOVES else word


class LookupPath(ExpertPath, Lookup):
    """Lookup along its scripted searches."""

    facts: ClassVar[tuple[str, ...]] = (*Lookup.facts, "match")

    def action_kind(self, action: Action) -> str | None:
        if action.calls or action.faults:
            return "search" if action.calls and not action.faults else None
        return "answer" if ANSWER.search(action.text.strip().lower()) else None
