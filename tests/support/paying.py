"""Environments that pay rewards and report no success, each with one fault a run should tell of."""

from __future__ import annotations

from typing import ClassVar

from turnwise.core.protocols import Step
from turnwise.environments.base import Environment, text_action, user_message


class Paying(Environment):
    """Pays a tenth of the digit that is said, times the difficulty."""

    difficulties = (1, 2)
    max_turns = 1
    inline = True
    suggests: ClassVar = {"max_tokens": 4, "context": 64}

    def reset(self, seed):
        return [user_message("digit?")]

    def pay(self, text):
        digits = [c for c in text if c.isdigit()]
        return int(digits[0]) / 10 * self.difficulty if digits else 0.0

    def step(self, action):
        paid = self.pay(action.text)
        return Step([], paid, True, False, {"rewards": {"digit": paid, "short": float(len(action.text) < 3)}})

    def oracle(self):
        return text_action("9")

    def random_action(self, rng):
        return text_action(str(rng.randrange(10)))


class Flat(Paying):
    """The same reward for everything."""

    def pay(self, text):
        return 0.5


class Excessive(Paying):
    """Rewards whose squares float32 does not hold."""

    def pay(self, text):
        return super().pay(text) * 1e30


class Sometimes(Paying):
    """Raises for answers of even length, which no scripted policy gives."""

    def pay(self, text):
        if len(text) % 2 == 0:
            raise ValueError("an even length")
        return super().pay(text)
