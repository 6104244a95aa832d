"""Train on your own prompts with your own reward functions.

The rows are made here: two or three numbers, of which the answer is the largest. Rows of a file work alike
(`data="prompts.jsonl"`, also .csv, .parquet or a data set), and so does the command line:

    turnwise train --data prompts.jsonl --reward my.py:correct --reward 0.2*my.py:brief --model smollm2

The tiny model of this example knows no language. It begins by imitating the answers of the rows, half of them made wrong, and
learns the rest from the rewards. A real model begins with what it knows.

    python examples/own_prompts_and_reward.py          about 30 seconds on two cores
"""

from __future__ import annotations

import tempfile

from turnwise import train

PAIRS = [{"prompt": f"{a} or {b}?", "answer": str(max(a, b)), "numbers": 2} for a in range(10) for b in range(10)]
TRIPLES = [
    {"prompt": f"{a} or {b} or {c}?", "answer": str(max(a, b, c)), "numbers": 3}
    for a in range(10) for b in range(10) for c in range(10)
]  # fmt: skip


def correct(completion: str, answer: str) -> bool:
    """One answer at a time. A bool is a reward of 1 or 0, and says whether the answer is right."""
    return completion.strip() == answer


def brief(prompts: list, completions: list, numbers: list[int], **columns: list) -> list[float]:
    """All answers to a prompt at once, with any column of the row by its name, as TRL calls reward functions."""
    return [1.0 if len(text) == 1 else 0.0 for text in completions]


def main(steps: int = 40, cold_steps: int = 60, eval_tasks: int = 100) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        summary = train(
            data=PAIRS + TRIPLES, reward=[correct, (0.2, brief)], method="grpo", steps=steps, groups=8, group_size=8,
            lr=1e-3, max_tokens=4, hidden=128, cold_steps=cold_steps, eval_tasks=eval_tasks, trackers=(), out=folder,
        )  # fmt: skip
    before, after = summary["success_before"], summary["success_after"]
    low, high = after["interval"]
    print(f"held-out prompts answered: {before['success']:.0%} → {after['success']:.0%} [{low:.0%}, {high:.0%}]")
    return summary


if __name__ == "__main__":
    main()
