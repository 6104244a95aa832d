"""A reward model that finds flawed reasoning, trained and then used: the pipeline of FAPO.

1. Scripted episodes of `calculator` are recorded, each with its first wrong step, which the environment knows.
2. A tiny model learns by RL to name that step; its reward is 1 for the right one and less for each step it is off.
3. A policy is trained on `calculator` with `fapo`. The reward model reads each success, and one with an error earns less. The
   same run with `grpo` rewards flawed successes like all others.

    python examples/flaw_finder.py     160 seconds on one core
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from pathlib import Path

from turnwise import Action, train
from turnwise.environments.base import tool_action
from turnwise.environments.builtin.calculator import Calculator
from turnwise.rewards.judge import steps_of


def imperfect(env: Calculator, rng: random.Random) -> Action:
    """The demonstrator, with further calls in between, half of which fail: the first wrong step may be any."""
    if rng.random() < 0.35:
        return tool_action("python", code=rng.choice(["t=a+b;t", "t=a*b;t", "t=a+;t", "t=z;t"]))
    return env.demonstrate(rng)


async def labelled_episode(seed: int, difficulty: int) -> dict:
    """One episode of the imperfect demonstrator, as the reward model reads it, and its first wrong step."""
    env, rng = Calculator(difficulty=difficulty), random.Random(f"episode/{seed}")
    messages, step = list(env.reset(seed)), None
    try:
        while step is None or not (step.terminated or step.truncated):
            action = imperfect(env, rng)
            step = await env.step(action)
            messages += [action.message, *step.messages]
    finally:
        env.close()
    return {"lines": steps_of(messages), "error": int(step.info["facts"]["error"])}


async def record(path: Path, count: int, difficulty: int) -> None:
    rows = []
    for begin in range(0, count, 32):
        rows += await asyncio.gather(
            *(labelled_episode(seed, difficulty) for seed in range(begin, min(begin + 32, count)))
        )
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


def flawed(run: Path, last: int = 5) -> float:
    """The share of successes that the reward model found flawed, over the last steps of a run."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-last:]
    asked = sum(row.get("judge/calls", 0) + row.get("judge/cached", 0) for row in rows)
    return sum(row.get("judge/flawed", 0) for row in rows) / max(1, asked)


def main(
    difficulty: int = 2, episodes: int = 2000, judge_steps: int = 30, steps: int = 40, judge_cold: int = 100, **more
) -> dict:
    """Returns the summaries of the reward model and of both policies, and the share of flawed successes of each."""
    with tempfile.TemporaryDirectory() as folder:
        rows, shared = Path(folder) / "flaws.jsonl", {"eval_tasks": 100, "trackers": (), "out": folder, **more}
        asyncio.run(record(rows, episodes, difficulty))
        found = {
            "judge": train(
                env=f"turnwise.environments.first_error:FirstError,rows={rows}", method="dapo", name="judge", temperature=1.2,
                steps=judge_steps, method_options={"dual": 10.0}, **{**shared, "cold_steps": judge_cold},
            )
        }  # fmt: skip
        for method in ("fapo", "grpo"):
            found[method] = train(
                env="calculator", difficulty=(difficulty,), method=method, name=method, steps=steps,
                judge=f"first_error:{folder}/judge/model", **shared,
            )  # fmt: skip
            found[f"{method} flawed"] = flawed(Path(folder) / method)
    print(f"reward model: {found['judge']['success_before']['success']:.0%} of first errors named before RL, "
          f"{found['judge']['success_after']['success']:.0%} after")  # fmt: skip
    for method in ("fapo", "grpo"):
        print(
            f"{method}: reward {found[method]['success_after']['reward']:.2f}, flawed successes {found[f'{method} flawed']:.0%}"
        )
    return found


if __name__ == "__main__":
    main()
