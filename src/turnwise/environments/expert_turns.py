"""Single turns of an expert: the policy reads an expert's history, takes one turn, and is paid if that turn is as good.

    --env turnwise.environments.expert_turns:KeyDoorTurns
    --env turnwise.environments.expert_turns:LookupTurns,demonstrations=128,rule=arguments

A training task is one turn of one scripted demonstration: its seed says which. The turns before it are the expert's words, which
are context. No environment goes on after the turn. Episodes of the held-out split are those of the environment itself, so an
evaluation measures what the policy does alone. Knows no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from turnwise.core.protocols import Action, Step
from turnwise.core.records import Message
from turnwise.environments.base import WrappedEnvironment
from turnwise.environments.builtin.keydoor import KeyDoor
from turnwise.environments.builtin.lookup import Lookup
from turnwise.environments.demonstrated import check_rule, equivalent
from turnwise.errors import SettingError


class ExpertTurns(WrappedEnvironment):
    """Put before an environment with an ``oracle`` and a plain ``step``: ``class KeyDoorTurns(ExpertTurns, KeyDoor)``.

    ``demonstrations``: how many there are; a seed chooses one of them and one of its turns. ``rule`` and ``likeness``: which turn
    is as good as the expert's (``environments/demonstrated.py``)."""

    expert_turns: ClassVar[bool] = True
    turn_index: int  # which turn of the demonstration this episode is

    def __init__(
        self,
        *,
        difficulty: int = 1,
        split: str = "train",
        demonstrations: int = 64,
        rule: str = "arguments",
        likeness: float = 0.8,
    ) -> None:
        if demonstrations < 1:
            raise SettingError(f"{demonstrations} demonstrations; write at least 1")
        check_rule(rule, likeness)
        super().__init__(difficulty=difficulty, split=split)
        self.demonstrations, self.rule, self.likeness = demonstrations, rule, likeness

    def acceptable(self, action: Action) -> bool:
        """Whether an action is as good as the expert's in the present state."""
        return equivalent(action, self.expected, self.rule, self.likeness)

    def reset(self, seed: int) -> Sequence[Message]:
        self.turn_index = 0
        if self.split != "train":
            return super().reset(seed)  # type: ignore[safe-super]
        # neighbouring seeds are different demonstrations, not neighbouring turns of one
        number, place = seed % self.demonstrations, seed // self.demonstrations
        # the turns of the demonstration, counted in an episode of its own
        twin = type(self)(difficulty=self.difficulty, split=self.split)
        super(ExpertTurns, twin).reset(number)  # type: ignore[safe-super]
        turns, step = 1, twin.plain_step(twin.oracle())
        while not (step.terminated or step.truncated) and turns < self.max_turns:
            turns, step = turns + 1, twin.plain_step(twin.oracle())
        if not step.terminated:
            raise SettingError(f"the oracle of {type(self).__name__} does not solve task {number}")
        self.turn_index = place % turns
        read = list(super().reset(number))  # type: ignore[safe-super]
        for _ in range(self.turn_index):
            action = self.oracle()
            read += [action.message, *self.plain_step(action).messages]
        self.expected = self.oracle()
        return read

    def step(self, action: Action) -> Step:
        if self.split != "train":
            return self.plain_step(action)
        good = self.acceptable(action)
        return Step([], float(good), terminated=True, info={"success": good})


class KeyDoorTurns(ExpertTurns, KeyDoor):
    """KeyDoor: every move that brings the goal as near as the expert's is as good; with ``rule=exact`` only the expert's own."""

    def acceptable(self, action: Action) -> bool:
        if super().acceptable(action):
            return True
        state, left = self.state, self.turns_to_solve()
        self.act(action)  # moves the state and nothing else
        nearer = self.turns_to_solve() < left
        self.state = state
        return nearer and self.rule != "exact"


class LookupTurns(ExpertTurns, Lookup):
    """Lookup: searches of the same kind, and the same answer."""
