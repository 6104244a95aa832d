"""A generative reward model that names the first wrong step: what it reads, what it says, and what its answer is worth.

It reads a finished episode with numbered steps and says ``error: 2``, or ``error: none``. Knows no model and no trainer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from turnwise.core.records import Message

NO_ERROR = -1
STEP_CHARACTERS = 48  # of a step or a reply; the end is kept, where a traceback says what is wrong
_VERDICT = re.compile(r"error: ?(none|\d{1,4})")
_SYNTAX = re.compile(r'</?tool_call>|"(?:name|arguments)": ?|[{}"]')


def steps_of(messages: Sequence[Message]) -> list[str]:
    """The lines of an episode: its question, then ``step 0 ...`` and what came back, in turn."""
    lines, step = list[str](), 0
    for message in messages:
        text = " ".join(_SYNTAX.sub("", str(message.get("content") or "")).split())
        if message.get("role") == "assistant":
            lines.append(f"step {step} {text[-STEP_CHARACTERS:]}")
            step += 1
        elif message.get("role") != "system":
            lines.append(f"> {text[-STEP_CHARACTERS:]}" if step else text)
    return lines


def count_steps(lines: Sequence[str]) -> int:
    return sum(line.startswith("step ") for line in lines)


def question(lines: Sequence[str]) -> list[Message]:
    """The prompt of the reward model."""
    return [{"role": "user", "content": " ".join([*lines, "first error?"])}]


def answer(error: int) -> str:
    """How the reward model should say it."""
    return "error: none" if error == NO_ERROR else f"error: {error}"


def read_answer(text: str) -> int | None:
    """The step that a reply names, −1 for none; None where it is no verdict."""
    found = _VERDICT.fullmatch(text.strip().lower().rstrip("."))
    if found is None:
        return None
    return NO_ERROR if found[1] == "none" else int(found[1])


def step_index_reward(steps: int, true: int, said: int | None) -> float:
    """−1 for what is no verdict, or names a step that does not exist. Without an error: 1 if none was named, else −1. With one:
    −1 if none was named, else 1 − |said − true|/steps."""
    if said is None or said >= steps:
        return -1.0
    if true == NO_ERROR or said == NO_ERROR:
        return 1.0 if said == true else -1.0
    return 1.0 - abs(said - true) / steps
