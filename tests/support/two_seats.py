"""A game of two seats that an untrained model plays: two rounds, and whose texts are longer wins."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, ClassVar

from turnwise.core.protocols import Action, Step
from turnwise.environments.base import Environment, text_action, user_message

SEATS, ROUNDS = ("first", "second"), 2


class Longer(Environment):
    agents: ClassVar[tuple[str, ...]] = SEATS
    max_turns = 2 * ROUNDS
    suggests: ClassVar[Mapping[str, Any]] = {}
    inline = True

    def reset(self, seed: int):
        self.moves, self.lengths = 0, [0, 0]
        return [user_message(f"{self.agent}, {seed % 7}: speak.")]

    @property
    def agent(self) -> str:
        return SEATS[self.moves % 2]

    def step(self, action: Action) -> Step:
        seat = self.moves % 2
        self.lengths[seat] += len(action.text)
        self.moves += 1
        if self.moves < 2 * ROUNDS:
            return Step([user_message(f"{self.agent}: speak.")], 0.0)
        sign = (self.lengths[seat] > self.lengths[1 - seat]) - (self.lengths[seat] < self.lengths[1 - seat])
        info = {"success": self.lengths[0] > self.lengths[1], "paid": {SEATS[1 - seat]: -float(sign)}}
        return Step([user_message("it is over.")], float(sign), True, False, info)

    def oracle(self) -> Action:
        return text_action("a long word")

    def random_action(self, rng: random.Random) -> Action:
        return text_action(rng.choice(["a", "a long word", "two words"]))


class SlowLonger(Longer):
    """The same in a thread that takes a time of its own."""

    inline = False

    def step(self, action: Action) -> Step:
        import time

        time.sleep(random.random() * 0.01)
        return super().step(action)
