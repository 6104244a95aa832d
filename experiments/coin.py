"""A game that any policy wins half of the time: rewards vary without training, and a run has gradients from its first step.

turnwise train dr_grpo --env coin:Coin        with experiments/ on PYTHONPATH
"""

from __future__ import annotations

import zlib
from typing import ClassVar

from turnwise.core.protocols import Step
from turnwise.environments.base import Environment, text_action, user_message

WORDS = ("red", "blue", "green", "white")
TURNS = 3
WORDINGS = ("game {}: say three words", "three words for game {}", "say some words, game {}")


class Coin(Environment):
    """Three words; the last pays if a hash of the task and of all that was said is even. It can be forked and hinted."""

    max_turns = TURNS
    inline = True
    suggests: ClassVar = {"max_tokens": 4, "context": 160}
    symbols = " ?(?:red|blue|green|white)"
    wordings = len(WORDINGS)

    def reset(self, seed):
        self.seed, self.said = seed, []
        return [user_message(WORDINGS[self.wording % len(WORDINGS)].format(seed % 4))]

    def step(self, action):
        self.said.append(action.text.strip())
        if len(self.said) < TURNS:
            return Step([user_message("again")])
        return Step([], float(self.won), terminated=True, info={"success": self.won})

    @property
    def won(self):
        return pays(self.seed, self.said)

    def oracle(self):
        last = len(self.said) == TURNS - 1
        return text_action(next((w for w in WORDS if not last or pays(self.seed, [*self.said, w])), WORDS[0]))

    def random_action(self, rng):
        return text_action(rng.choice(WORDS))

    def hints(self):
        return ("say colours", f"say {' '.join(WORDS[:TURNS])}")

    def hint(self):
        return self.hints()[-1]

    def turns_to_solve(self):
        return float(TURNS - len(self.said))

    def state_key(self):
        return str(len(self.said))

    def snapshot(self):
        return {"seed": self.seed, "said": list(self.said)}

    def restore(self, snapshot):
        self.seed, self.said = snapshot["seed"], list(snapshot["said"])


def pays(seed, said):
    """Whether these words win the game of this seed."""
    return zlib.crc32(f"{seed}/{'/'.join(said)}".encode()) % 2 == 0
