"""A task nobody can know: one of a few words wins, another for every seed. A hint tells which."""

from __future__ import annotations

import random

from turnwise.core.protocols import Step
from turnwise.environments.base import Environment, text_action, user_message

WORDS = ("red", "blue", "green", "white")


class Lottery(Environment):
    """One word, twice: the second counts."""

    max_turns = 2
    inline = True
    suggests = {"max_tokens": 4, "cold_steps": 60, "cold_batch": 16, "cold_lr": 0.01}  # noqa: RUF012
    symbols = " ?(?:red|blue|green|white|yes|no)"

    def reset(self, seed):
        self.seed, self.turn, self.won = seed, 0, False
        return [user_message(f"say {' '.join(WORDS)}")]

    def step(self, action):
        self.turn += 1
        self.won = action.text.strip() == self.word
        if self.turn < 2:
            return Step([user_message("again")])
        return Step([], float(self.won), terminated=True, info={"success": self.won})

    @property
    def word(self):
        return random.Random(self.seed).choice(WORDS)

    def state_key(self):
        return str(self.turn)

    def oracle(self):
        return text_action(self.word)

    def random_action(self, rng):
        return text_action(rng.choice(WORDS))

    def demonstrate(self, rng):
        return self.random_action(rng)


class Hinted(Lottery):
    def hint(self):
        return f"say {self.word}"
