"""An expert's traces turned into plans that the policy plays itself: BEPA with both of its levels.

A tiny model first learns to read plans: in half of its demonstrations the prompt ends with a plan, and the demonstrator follows
it. Then `bepa` trains it on the plain environment. Where a whole group fails, `--guidance bepa` makes a plan of the scripted
solution, the policy plays the task with it, and a success enters the cache of its task without the plan. `without` is the
same run whose cache holds the expert's own traces.

    python examples/expert_plans.py     140 seconds on one core
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from turnwise import Action, train
from turnwise.environments.builtin.calculator import Calculator
from turnwise.rollout.support import plan_of


class Advised(Calculator):
    """Calculator whose prompt ends with a plan in half of the training tasks; the demonstrator follows it there."""

    def reset(self, seed: int):
        messages = super().reset(seed)
        self.advised = self.split == "train" and random.Random(f"advised/{seed}").random() < 0.5
        if not self.advised:
            return messages
        first = self.oracle().text
        self.replies = [("", True)]  # as if the call had run
        plan, self.replies = plan_of([first, self.oracle().text]), []
        return [{**messages[0], "content": f"{messages[0]['content']}\n{plan}"}]

    def demonstrate(self, rng: random.Random) -> Action:
        return self.oracle() if self.advised else super().demonstrate(rng)


def main(
    difficulty: int = 3, steps: int = 40, cold_steps: int = 200, runs: tuple = ("plans", "without"), **more
) -> dict:
    """Cold start with plans, then a run with plans and one without; returns their summaries by name."""
    found, tiny = {}, {key: more.pop(key) for key in ("hidden", "layers", "cold_batch") if key in more}
    with tempfile.TemporaryDirectory() as folder:
        shared = {"difficulty": (difficulty,), "eval_tasks": 100, "trackers": (), "out": folder, "context": 256, **more}
        base = {"method": "grpo", "steps": 1, "cold_steps": cold_steps, **tiny}  # its cold start is what counts
        train(env=f"{Advised.__module__}:Advised", name="base", **base, **shared)
        for name in runs:
            found[name] = train(
                env="calculator", method="bepa", demos="oracle", guidance="bepa" if name == "plans" else "none", name=name,
                model=str(Path(folder) / "base" / "initial"), method_options={"pool": 64}, steps=steps, **shared,
            )  # fmt: skip
    for name, summary in found.items():
        before, after = (summary[f"success_{when}"]["success"] for when in ("before", "after"))
        print(f"{name}: success {before:.0%} before, {after:.0%} after")
    return found


if __name__ == "__main__":
    main()
