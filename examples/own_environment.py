"""Your own environment with a tool: write it, check it, train on it.

Shows an environment class whose tool is a typed Python function, the check that `turnwise check-env` runs, scripted players
(a perfect one, a random one, a mediocre one for the supervised cold start), and a short training run of the tiny model.

    python examples/own_environment.py          about 20 seconds on two cores
"""

from __future__ import annotations

import random
import re
import tempfile
from typing import ClassVar

from turnwise import Action, Environment, Step, train
from turnwise.environments.base import sample_problem, text_action, tool_action, user_message
from turnwise.environments.checker.check import check_env
from turnwise.tools import Toolbox

PRICES = {"pen": 3, "cup": 7, "hat": 12, "map": 5, "key": 9, "jar": 4}


def price(item: str) -> int:
    """The price of one item."""
    return PRICES[item]


class Shop(Environment):
    """Ask the tool for the price of an item, then name it. Guessing is right one time in six."""

    max_turns = 3
    toolbox = Toolbox([price])
    tools = toolbox.schemas  # shown to the model by the chat template
    suggests: ClassVar = {"max_tokens": 24, "context": 160}
    symbols = "|".join(PRICES)  # the tiny tokenizer keeps these words whole

    def reset(self, seed: int):
        # ``draw`` keeps the training split and the held-out split disjoint by content.
        self.item, self.shelf = sample_problem(
            lambda rng: (rng.choice(list(PRICES)), rng.randint(1, 99)), seed, self.split
        )
        self.turn, self.seen = 0, False
        return [user_message(f"Shelf {self.shelf}: what is the price of a {self.item}?")]

    def step(self, action: Action) -> Step:
        self.turn += 1
        if action.calls or action.faults:  # unreadable calls arrive as ``faults`` and are answered in words
            messages, errors = self.toolbox.run(action)
            self.seen = self.seen or errors == 0
            out_of_turns = self.turn >= self.max_turns
            info = {"tool_calls": len(action.calls), "tool_errors": errors}
            return Step(messages, truncated=out_of_turns, info={**info, **({"success": False} if out_of_turns else {})})
        answer = re.search(r"\d+", action.text)
        right = bool(answer) and int(answer.group()) == PRICES[self.item]
        return Step([], float(right), terminated=True, info={"success": right})

    # Scripted players: the check uses the first two, the cold start imitates the third.
    def oracle(self) -> Action:
        return text_action(f"answer: {PRICES[self.item]}") if self.seen else tool_action("price", item=self.item)

    def random_action(self, rng: random.Random) -> Action:
        return text_action(f"answer: {rng.choice(list(PRICES.values()))}")

    def demonstrate(self, rng: random.Random) -> Action:
        """Looks the price up two times in three, guesses otherwise."""
        return self.oracle() if self.seen or rng.random() < 0.65 else self.random_action(rng)


def main(steps: int = 20, cold_steps: int = 100, eval_tasks: int = 60) -> dict:
    """Check the environment, then train on it; returns the summary of the run."""
    report = check_env(Shop, episodes=5)
    print(report.text())
    assert report.ok, "the check found faults"
    with tempfile.TemporaryDirectory() as folder:
        summary = train(
            env=f"{Shop.__module__}:Shop", difficulty=(1,), method="grpo", steps=steps, cold_steps=cold_steps, groups=4,
            group_size=8, hidden=128, eval_tasks=eval_tasks, trackers=(), out=folder,
        )  # fmt: skip
    for when in ("before", "after"):
        found = summary[f"success_{when}"]
        low, high = found["interval"]
        print(f"success {when} RL: {found['success']:.0%} [{low:.0%}, {high:.0%}]")
    return summary


if __name__ == "__main__":
    main()
